"""`kiln build` of Kiln's own catalog, twice: the second time nothing runs, and the same is said; of anything
else it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler.stamp import stamp_of
from kiln.tests.compiler.fake_backend import FakeBackend
from kiln.tests.compiler.test_pipeline import here, make
from kiln.tests.tools.conftest import Run
from kiln.tools import build, cli

__all__ = ["here"]  # a fixture


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Any) -> list[Any]:
    """The builds that run, each of a stand-in catalog; the sources are a folder of one file."""
    ran: list[Any] = []

    def stand_in(catalogs: Any, targets: Any, out: str, **options: Any) -> Any:
        ran.append((catalogs, targets, options["ops"]))
        return make(Path(out), FakeBackend(), here)

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(build, "build", stand_in)
    monkeypatch.setattr(build, "source_folders", lambda catalogs: [tmp_path / "src"])
    return ran


def test_nothing_runs_twice(kiln: Run, builds: list[Any], tmp_path: Path) -> None:
    first, second, third = (kiln("build", "--all", "--out", tmp_path / "t") for _ in range(3))
    assert len(builds) == 1
    assert second == third
    assert (second[0], second[2]) == (0, "")
    assert [line for line in second[1].splitlines() if "sm_80" in line and "reused" in line]
    assert first[1].splitlines()[-1] == second[1].splitlines()[-1]  # the root


CHANGES: dict[str, Callable[[Path], object]] = {
    "a source": lambda p: (p / "src" / "a.py").write_text("x = 2\n"),
    "a new source": lambda p: (p / "src" / "b.json").write_text("{}"),
    "an artifact": lambda p: (p / "t" / "sm_80" / "doubled.generic.cubin").write_bytes(b"rot"),
    "the stamp": lambda p: stamp_of(p / "t").write_text("{}"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_built(
    kiln: Run, builds: list[Any], tmp_path: Path, change: Callable[[Path], object]
) -> None:
    kiln("build", "--out", tmp_path / "t")
    change(tmp_path)
    assert kiln("build", "--out", tmp_path / "t")[0] == 0
    assert len(builds) == 2


@pytest.mark.parametrize("words", [("--op", "a*"), ("--catalog", "mine"), ("--target", "sm_80")])
def test_what_was_not_asked_for_before_runs(
    kiln: Run, builds: list[Any], tmp_path: Path, words: tuple[str, str]
) -> None:
    kiln("build", "--out", tmp_path / "t")
    kiln("build", "--out", tmp_path / "t", *words)
    assert len(builds) == 2


@pytest.mark.parametrize("words", [("--op", "a*"), ("--catalog", "mine")])
def test_a_build_of_some_ops_or_of_another_catalog_leaves_no_stamp(
    kiln: Run, builds: list[Any], tmp_path: Path, words: tuple[str, str]
) -> None:
    for _ in range(2):
        kiln("build", "--out", tmp_path / "t", *words)
    assert len(builds) == 2
    assert not stamp_of(tmp_path / "t").exists()


def test_objects_are_left_alone_at_the_end_of_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kiln", "targets"])
    before = gc.get_freeze_count()
    cli.main(["targets"])
    assert gc.get_freeze_count() == before
    try:
        cli.main()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
