"""`kiln test` on this CPU and on a stand-in for a GPU: what passes, and above all what does not."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.compiler.catalog import load as load_catalog
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.load import load
from kiln.runtime.manifest import Manifest, canonical_json
from kiln.runtime.select import FURTHER
from kiln.runtime.targets import cpu_target
from kiln.tests.runtime.fake_driver import read_params
from kiln.tests.runtime.test_verify import seal
from kiln.tests.support.documents import manifest_document
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.tools.host_driver import HostDriver
from kiln.tools import conformance
from kiln.tools.campaign import Result
from kiln.tools.cases import Deriver, Judge, views
from kiln.tools.cli import main
from kiln.tools.evidence import read_evidence
from kiln.tools.trees import digests, read_tree

CATALOGS = Path(__file__).resolve().parents[1] / "catalogs"
CPU = cpu_target()
OPS = ["above", "centred", "difference"]


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    sys.path.append(str(CATALOGS))
    yield
    sys.path.remove(str(CATALOGS))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, _on_the_path: None) -> Path:
    """The right twins for this CPU and a GPU."""
    out = tmp_path_factory.mktemp("twins") / "tree"
    targets = ("--target", CPU, "--target", "sm_90a")
    assert main(["build", "--catalog", "twins_right", *targets, "--out", str(out), "--jobs", "2"]) == 0
    return out


@pytest.fixture
def tree(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "tree"))


def _manifest(tree: Path, target: str) -> Manifest:
    return read_tree(tree, [target]).manifests[target]


def test_every_kernel_runs_and_passes(kiln_json: RunJson, tree: Path) -> None:
    code, found = kiln_json("test", "--tree", tree, "--catalog", "twins_right")
    assert code == 0
    assert found["ok"]
    tested = {(r["op"], r["variant"]) for r in found["results"]}
    assert tested == {(k.op, k.variant) for k in _manifest(tree, CPU).kernels}
    assert all(r["cases"] >= 4 and r["max_error"] == 0 for r in found["results"] if not r["skipped"])


@pytest.mark.parametrize("op", OPS)
def test_bytes_that_compute_something_else_fail(kiln_json: RunJson, tree: Path, op: str) -> None:
    code, found = kiln_json("test", "--tree", tree, "--catalog", "twins_wrong", "--op", op, "--evidence")
    assert code == 1
    ran = [r for r in found["results"] if not r["skipped"]]
    exact = [r for r in ran if op != "centred" or ".f32." in r["variant"]]
    assert exact
    assert not any(r["passed"] for r in exact)
    assert all("expected" in fault and "at [" in fault for r in exact for fault in r["faults"][:1])
    evidence = read_tree(tree, [CPU]).evidence[CPU]
    assert all(p.ran is not None and not p.ran.contract_met for p in evidence.artifacts.values())


def test_evidence_is_recorded_by_digest(kiln: Run, tree: Path) -> None:
    assert kiln("test", "--tree", tree, "--catalog", "twins_right", "--evidence")[0] == 0
    manifest = _manifest(tree, CPU)
    evidence = read_evidence(tree / CPU, CPU, digests(manifest))
    runnable = {k.sha256 for k in manifest.kernels if k.isa is not None and not k.isa.features}
    for digest in runnable:
        ran = evidence.of(digest).ran
        assert ran is not None
        assert ran.contract_met
        assert ran.max_error == 0
        of_file = [k for k in manifest.kernels if k.sha256 == digest]
        assert ran.cases >= 4 * len(of_file), "a file has the cases of all its kernels"
    assert kiln("verify", tree)[0] == 0


def test_nothing_is_recorded_without_being_asked(kiln: Run, tree: Path) -> None:
    assert kiln("test", "--tree", tree, "--catalog", "twins_right", "--op", "above")[0] == 0
    assert not (tree / CPU / "EVIDENCE.json").exists()


def test_a_damaged_tree_is_not_run(kiln: Run, tree: Path) -> None:
    victim = tree / CPU / _manifest(tree, CPU).kernels[0].file
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    code, out, _ = kiln("test", "--tree", tree, "--catalog", "twins_right")
    assert code == 1
    assert victim.name in out
    assert "nothing was run" in out


def test_an_op_that_no_catalog_declares_fails(kiln_json: RunJson, tree: Path) -> None:
    code, found = kiln_json("test", "--tree", tree)
    assert code == 1
    assert all("no catalog declares" in r["faults"][0] for r in found["results"] if not r["skipped"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "abuve"], "did you mean above"),
        (["--target", "sm_90a"], "does not run sm_90a"),
        (["--device", "gpu"], "expected cpu, cuda"),
    ],
)
def test_what_cannot_be_done_is_said(kiln: Run, tree: Path, arguments: list[str], said: str) -> None:
    code, _, err = kiln("test", "--tree", tree, "--catalog", "twins_right", *arguments)
    assert code == 2
    assert said in err


def test_a_summary_names_the_worst_element(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("test", "--tree", tree, "--catalog", "twins_wrong", "--op", "difference")
    assert code == 1
    assert "differ, the worst at [" in out
    assert re.match(r"[1-9] variants? failed: ", out.rstrip().splitlines()[-1])


def _on_host(tree: Path, driver: HostDriver, op: str) -> list[Result]:
    with load(tree, CudaDevice(0, driver)) as library:
        return conformance.test(library, ["sm_90a"], load_catalog(("twins_right",)).ops, [op])


def _difference_hook(wrong: str = "") -> Any:
    """A launch of the kernel `difference` on host memory, or a broken one."""

    def run(entry: str, params: int) -> None:
        a, b, out, *strides, rows, width = read_params(params, "QQQqqqii")
        for row in range(rows + (wrong == "beyond")):
            x, y, z = (
                np.ctypeslib.as_array((ctypes.c_float * width).from_address(p + 4 * row * s))
                for p, s in zip((a, b, out), strides, strict=True)
            )
            with np.errstate(all="ignore"):
                z[:] = y - x if wrong == "swapped" else x - y
            if wrong == "input":
                y[0] = 7.0

    return run


def test_a_gpu_kernel_that_computes_the_op_passes(tree: Path) -> None:
    results = _on_host(tree, HostDriver(_difference_hook()), "difference")
    assert results
    assert all(r.passed and r.cases >= 4 for r in results)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("swapped", "differ, the worst"), ("beyond", "outside the outputs"), ("input", "outside the outputs")],
)
def test_a_gpu_kernel_that_does_not_is_caught(tree: Path, wrong: str, said: str) -> None:
    results = _on_host(tree, HostDriver(_difference_hook(wrong)), "difference")
    assert results
    for r in results:
        assert not r.passed
        assert any(said in fault for fault in r.faults)


def test_a_gpu_kernel_that_writes_nothing_is_caught(tree: Path) -> None:
    for r in _on_host(tree, HostDriver(), "*"):
        assert not r.passed


def test_proofs_leave_out_a_file_of_which_a_kernel_did_not_run(tree: Path) -> None:
    found = _on_host(tree, HostDriver(), "difference")
    assert len(conformance.proofs(found, "d", "1")) == len(found)
    found[0].cases = 0
    assert found[0].digest not in conformance.proofs(found, "d", "1")


def test_a_further_entry_of_a_kernel_is_tested_once(tree: Path) -> None:
    path = tree / "sm_90a" / "MANIFEST.json"
    document = manifest_document(path.parent)
    first = next(k for k in document["kernels"] if k["op"] == "difference")
    huge = {"when": ["and", first["when"], ["eq", ["dim", "M"], 1 << 30]], "priority": first["priority"] + 1}
    document["kernels"].append({**first, "variant": f"{first['variant']}.shapes", **huge})
    document["kernels"].sort(key=lambda k: (k["op"], k["variant"]))
    path.write_bytes(canonical_json(document))
    seal(tree)
    found = _on_host(tree, HostDriver(_difference_hook()), "difference")
    skipped = {r.variant: r.skipped for r in found}
    assert skipped.pop(f"{first['variant']}.shapes") == FURTHER
    assert set(skipped.values()) == {None}
    assert first["sha256"] in conformance.proofs(found, "d", "1")


def test_a_case_selects_exactly_its_candidate(tree: Path) -> None:
    with load(tree, "sm_90a") as library:
        operation = library.op("difference")
        for candidate in operation.candidates:
            judge = Judge(operation, 0)
            found = [case for _, case in Deriver(judge, candidate).cases()]
            assert len(found) >= 4
            assert {case.variant for case in found} == {candidate.variant}
            assert len({case.dims["N"] for case in found}) > 2
            assert any(case.slot("a").strides[0] > case.dims["N"] for case in found)
            for case in found:
                pointers = [v.ptr for v in views(case, 1 << 30, 0).values()]
                assert len(set(pointers)) == (2 if case.layout == "alias" else 3)


def test_json_holds_every_fault(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("test", "--tree", tree, "--catalog", "twins_wrong", "--json")
    assert code == 1
    assert {r["op"] for r in json.loads(out)["results"] if r["faults"]} == set(OPS)
