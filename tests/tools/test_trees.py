"""Reading trees and recording evidence in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kiln.runtime.errors import IntegrityError, SchemaError, UnavailableError
from kiln.tests.tools.synthetic import digest, kernel, manifest, write_tree
from kiln.tools.console import UsageError
from kiln.tools.evidence import Compiled, Proofs, Ran
from kiln.tools.trees import default_tree, read_tree, record_proofs

ADD = digest("add.generic.cubin")
RAN = Ran("NVIDIA H100", "580.2", "2026-02-01", 5, 0.0, True)


def test_reads_manifests_and_evidence(tree: Path) -> None:
    found = read_tree(tree)
    assert list(found.manifests) == ["sm_80", "sm_90a"]
    assert found.evidence["sm_90a"].of(ADD).ran is not None
    assert digest("gone.generic.cubin") not in found.evidence["sm_90a"].artifacts
    assert list(read_tree(tree, ["sm_80"]).manifests) == ["sm_80"]


def test_recording_merges_with_what_is_there(tree: Path) -> None:
    before = read_tree(tree).evidence["sm_90a"]
    record_proofs(tree, "sm_90a", {ADD: Proofs(ran=RAN), "f" * 64: Proofs(compiled=Compiled(True, True))})
    after = read_tree(tree).evidence["sm_90a"]
    assert after.of(ADD) == Proofs(ran=RAN, measured=before.of(ADD).measured)
    assert after.artifacts.keys() == before.artifacts.keys()
    assert sorted(p.name for p in tree.iterdir()) == ["INDEX.json", "sm_80", "sm_90a"]


def test_refusals(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no artifact tree"):
        read_tree(tmp_path / "none")
    with pytest.raises(UsageError, match="did you mean sm_90a"):
        read_tree(tree, ["sm_90"])
    (tree / "sm_80" / "EVIDENCE.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"sm_80/EVIDENCE\.json"):
        read_tree(tree)
    (tree / "sm_80" / "MANIFEST.json").unlink()
    with pytest.raises(IntegrityError, match=r"MANIFEST\.json"):
        read_tree(tree)


def test_the_default_is_the_folder_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_tree().is_absolute()
    write_tree(tmp_path / "aot_artifacts", manifest("sm_80", [kernel("add")]))
    assert default_tree() == Path("aot_artifacts")


def test_what_is_no_plain_file_is_refused(tree: Path) -> None:
    (tree / "sm_80" / "EVIDENCE.json").symlink_to(tree / "INDEX.json")
    with pytest.raises(IntegrityError, match=r"EVIDENCE\.json"):
        read_tree(tree)
    (tree / "INDEX.json").unlink()
    os.mkfifo(tree / "INDEX.json")
    with pytest.raises(IntegrityError, match="not a regular file"):
        read_tree(tree)
