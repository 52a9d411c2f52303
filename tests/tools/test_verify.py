"""`kiln verify`: what it prints; what it finds is tested with the verifier."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kiln.runtime.manifest import canonical_json
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.trees import cpu_kernel, manifest

TARGET = "cpu-x86_64"


@pytest.fixture
def cpu_tree(tmp_path: Path) -> Path:
    """An intact tree of one CPU kernel."""
    entry, data = cpu_kernel("doubled")
    folder = tmp_path / "tree" / TARGET
    folder.mkdir(parents=True)
    written = canonical_json(manifest(TARGET, [entry]))
    (folder / "MANIFEST.json").write_bytes(written)
    (folder / entry["file"]).write_bytes(data)
    listed = {
        "manifest": f"{TARGET}/MANIFEST.json",
        "bytes": len(written),
        "sha256": hashlib.sha256(written).hexdigest(),
    }
    index = {"schema": 1, "generation": 1, "targets": {TARGET: listed}}
    (folder.parent / "INDEX.json").write_bytes(canonical_json(index))
    return folder.parent


def root_digest(tree: Path) -> str:
    return "sha256:" + hashlib.sha256((tree / "INDEX.json").read_bytes()).hexdigest()


def test_an_intact_tree(kiln: Run, kiln_json: RunJson, cpu_tree: Path) -> None:
    digest = root_digest(cpu_tree)
    assert kiln_json("verify", cpu_tree) == (
        0,
        {"ok": True, "faults": [], "tree": str(cpu_tree), "root": digest, "signature": "not signed"},
    )
    code, out, err = kiln("verify", cpu_tree, "--expect", digest)
    assert (code, err) == (0, "")
    assert out.startswith(f"{cpu_tree} is intact, root {digest}")


def test_a_tree_with_faults(kiln: Run, kiln_json: RunJson, cpu_tree: Path) -> None:
    (cpu_tree / TARGET / "extra.bin").write_bytes(b"x")
    code, document = kiln_json("verify", cpu_tree)
    assert (code, document["ok"], document["root"]) == (1, False, None)
    (fault,) = document["faults"]
    assert fault["file"] == f"{TARGET}/extra.bin"
    code, out, _ = kiln("verify", cpu_tree)
    assert code == 1
    assert f"1 fault in {cpu_tree}" in out


def test_another_tree_than_expected(kiln: Run, cpu_tree: Path) -> None:
    assert kiln("verify", cpu_tree, "--expect", "sha256:" + "0" * 64)[0] == 1


def test_no_tree(kiln: Run, tmp_path: Path) -> None:
    code, out, err = kiln("verify", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "is not a folder" in err
