"""`kiln sign` and `kiln verify --key`, and what a build does to a signature."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kiln.compiler import tree as tree_module
from kiln.compiler.errors import BuildError
from kiln.compiler.tree import TargetContent, claim_output, locked, recover, write_tree
from kiln.runtime.load import load
from kiln.runtime.signature import fingerprint
from kiln.runtime.verify import verify_tree
from kiln.tests.runtime.keys import private_pem, public_pem, public_raw
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.trees import cpu_kernel, manifest

TARGET = "cpu-x86_64"
SIG = "INDEX.json.sig"


def content(priority: int = 0) -> dict[str, TargetContent]:
    entry, data = cpu_kernel("doubled")
    entry["priority"] = priority
    return {TARGET: TargetContent(manifest(TARGET, [entry]), {entry["file"]: data})}


def write(out: Path, priority: int = 0) -> tree_module.Written:
    with locked(claim_output(out)):
        return write_tree(out, content(priority))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A tree of one CPU kernel."""
    write(tmp_path / "tree")
    return tmp_path / "tree"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key's file; the public one lies beside it."""
    (tmp_path / "private.pem").write_bytes(private_pem())
    (tmp_path / "public.pem").write_bytes(public_pem())
    return tmp_path / "private.pem"


def names(out: Path) -> set[str]:
    return {p.name for p in out.iterdir()}


def test_sign_and_verify(kiln: Run, kiln_json: RunJson, out: Path, key: Path) -> None:
    word = fingerprint(public_raw())
    code, document = kiln_json("sign", out, "--key", key)
    first = (out / SIG).read_bytes()
    assert (code, document["key"], document["signature"]) == (0, word, first.hex())
    assert kiln("sign", out, "--key", key)[1] == f"{out / SIG} is the signature of {word}\n"
    assert (out / SIG).read_bytes() == first
    assert (out / SIG).stat().st_mode & 0o777 == 0o644
    assert names(out) == {"INDEX.json", SIG, TARGET}
    for given in (word, key.parent / "public.pem"):
        code, text, _ = kiln("verify", out, "--key", given)
        assert (code, f"signed by {word}" in text) == (0, True)
    assert "signature not checked (give --key)" in kiln("verify", out)[1]
    load(out, key=word).close()


def test_another_key_has_not_signed_it(kiln: Run, kiln_json: RunJson, out: Path, key: Path) -> None:
    other = fingerprint(public_raw(2))
    code, document = kiln_json("verify", out, "--key", other)
    assert (code, document["faults"][0]["file"]) == (1, SIG)
    assert "expected a signed tree" in document["faults"][0]["why"]
    kiln("sign", out, "--key", key)
    code, text, _ = kiln("verify", out, "--key", other)
    assert (code, f"is not signed by {other}" in text) == (1, True)
    assert kiln_json("verify", out, "--key", other)[1]["signature"] == "not what the key signed, or damaged"


def test_a_damaged_tree_is_not_signed(kiln: Run, out: Path, key: Path) -> None:
    (out / TARGET / "rows.so").write_bytes(b"rot")
    code, text, _ = kiln("sign", out, "--key", key)
    assert (code, "nothing was signed" in text, "rows.so" in text) == (1, True, True)
    assert SIG not in names(out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("{out}",), "--key"),
        (("{out}", "--key", "/nonexistent"), "the key '/nonexistent': No such file"),
        (("{out}", "--key", "{public}"), "is no private key in PEM"),
        (("/nonexistent", "--key", "{private}"), "is not a folder"),
    ],
)
def test_refusals(kiln: Run, out: Path, key: Path, words: tuple[str, ...], told: str) -> None:
    places = {"out": out, "private": key, "public": key.parent / "public.pem"}
    code, text, err = kiln("sign", *(w.format(**places) for w in words))
    assert (code, text) == (2, "")
    assert told in err
    assert "internal error" not in err
    assert SIG not in names(out)


def test_a_bad_signature_is_replaced(kiln: Run, out: Path, key: Path) -> None:
    (out / SIG).write_bytes(b"short")
    assert [f.file for f in verify_tree(out)] == [SIG]
    assert kiln("sign", out, "--key", key)[0] == 0
    assert verify_tree(out, key=public_raw()) == []


def test_a_build_takes_the_signature_of_another_index_away(kiln: Run, out: Path, key: Path) -> None:
    kiln("sign", out, "--key", key)
    assert not write(out).signature_removed
    assert verify_tree(out, key=public_raw()) == []
    assert write(out, priority=1).signature_removed
    assert names(out) == {"INDEX.json", TARGET}
    assert verify_tree(out) == []
    assert not write(out, priority=2).signature_removed


def test_a_failed_build_keeps_the_signature(
    kiln: Run, out: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kiln("sign", out, "--key", key)
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if Path(target).name == "INDEX.json":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(BuildError, match="the tree is as it was"):
        write(out, priority=1)
    assert names(out) == {"INDEX.json", SIG, TARGET}
    assert verify_tree(out, key=public_raw()) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_killed_build_is_undone_or_finished(kiln: Run, out: Path, key: Path, replaced: bool) -> None:
    kiln("sign", out, "--key", key)
    aside = tree_module._put_signature_aside(out)
    assert aside is not None
    assert SIG not in names(out)
    if replaced:
        index = out / "INDEX.json"
        index.write_bytes(index.read_bytes().replace(b'"generation": 1', b'"generation": 2'))
    with locked(out):
        recover(out)
    assert names(out) == {"INDEX.json", TARGET} | (set() if replaced else {SIG})
    assert not os.path.lexists(aside)


def test_a_signature_is_written_whole_or_not_at_all(
    kiln: Run, out: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kiln("sign", out, "--key", key)
    good = (out / SIG).read_bytes()
    monkeypatch.setattr(os, "fsync", _full)
    code, _, err = kiln("sign", out, "--key", key)
    assert (code, "nothing was signed" in err) == (2, True)
    assert (names(out), (out / SIG).read_bytes()) == ({"INDEX.json", SIG, TARGET}, good)


def _full(fd: int) -> None:
    raise OSError(28, "No space left on device")
