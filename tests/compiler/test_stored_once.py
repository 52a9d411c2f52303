"""Kernels whose files are equal: one file of the tree, whatever is built beside them later."""

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler.drift import check
from kiln.compiler.pipeline import build
from kiln.runtime.manifest import parse_manifest
from kiln.runtime.verify import verify_tree
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from kiln.tests.compiler.test_tree import snapshot
from kiln.tests.support.documents import manifest_document

ONE, OTHER = "doubled.generic.cubin", "spilling.generic.cubin"


@pytest.fixture
def here() -> Any:
    """An executor in this process."""
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield executor


def backend(**more: Any) -> FakeBackend:
    """One whose kernel of `spilling` is that of `doubled`."""
    return FakeBackend(targets=("sm_80",), modes={"spilling": "other"}, **more)


def stored(out: Path) -> dict[str, Any]:
    """By op: as which file a kernel is stored, None for its own."""
    return {k["op"]: k.get("stored_as") for k in manifest_document(out / "sm_80")["kernels"]}


def files(out: Path) -> set[str]:
    """The cubins on disk."""
    return {p.name for p in (out / "sm_80").glob("*.cubin")}


def make(out: Path, made_by: FakeBackend, here: Any, ops: list[str] | None = None) -> dict[str, str]:
    """A build; what became of each op."""
    report = build([CATALOG], None, out, backends=[made_by], ops=ops, executor=here)
    return {k.op: k.state for k in report.kernels}


def test_a_copy_is_not_written(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "t", backend(), here)
    assert stored(tmp_path / "t") == {"doubled": None, "scaled_sum": None, "spilling": ONE}
    assert files(tmp_path / "t") == {ONE, "scaled_sum.generic.cubin"}
    assert verify_tree(tmp_path / "t") == []
    loaded = parse_manifest((tmp_path / "t/sm_80/MANIFEST.json").read_bytes())
    assert {k.op: k.file for k in loaded.kernels}["spilling"] == ONE


def test_it_is_found_again(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "t", backend(), here)
    before = snapshot(tmp_path / "t")
    assert set(make(tmp_path / "t", backend(), here).values()) == {"reused"}
    assert check([CATALOG], tmp_path / "t", backends=[backend()]) == []
    assert check([CATALOG], tmp_path / "t", rebuild=True, backends=[backend()], executor=here) == []
    assert snapshot(tmp_path / "t") == before


def test_it_outlives_the_one_it_was_stored_as(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "t", backend(), here)
    states = make(tmp_path / "t", backend(ops=("scaled_sum", "spilling")), here)
    assert states["spilling"] == "reused"
    assert files(tmp_path / "t") == {OTHER, "scaled_sum.generic.cubin"}
    assert stored(tmp_path / "t")["spilling"] is None
    assert verify_tree(tmp_path / "t") == []


def test_either_may_be_built_alone(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "t", backend(), here)
    alone = FakeBackend(targets=("sm_80",), salt={"spilling": "new"})
    assert make(tmp_path / "t", alone, here, ["spilling"]) == {"spilling": "built"}
    assert files(tmp_path / "t") == {ONE, OTHER, "scaled_sum.generic.cubin"}
    make(tmp_path / "t", backend(), here, ["spilling"])
    assert make(tmp_path / "t", backend(salt={"doubled": "new"}), here, ["doubled"]) == {"doubled": "built"}
    assert stored(tmp_path / "t")["spilling"] == ONE
    assert verify_tree(tmp_path / "t") == []
