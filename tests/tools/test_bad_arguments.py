"""Arguments and places that a shell may hand to `kiln`, as a process of its own."""

from pathlib import Path

import pytest

from kiln.tests.tools.test_cli import kiln_process


@pytest.mark.parametrize("locale", ["C", "xx_XX.nonsense"])
@pytest.mark.parametrize("path", ["/nowhere/\udcff\udcfe", "/nowhere/é\n"])
def test_odd_paths_are_told_in_any_locale(locale: str, path: str) -> None:
    with kiln_process("verify", path, LC_ALL=locale, LANG=locale, PYTHONUTF8="0") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("kiln verify: ")
    assert "Traceback" not in err


def test_no_home(tree: Path) -> None:
    none = "/nonexistent"
    arguments = ("targets", "--tree", str(tree))
    with kiln_process(*arguments, HOME=none, TMPDIR=none, XDG_CACHE_HOME=none) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "sm_90a" in out
