"""The self-test: what it covers, and that it finds every kind of broken kernel."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.manifest import canonical_json
from kiln.runtime.select import FURTHER, entry_of
from kiln.runtime.selfcase import cases_of
from kiln.runtime.selftest import PART, SelftestReport, SelftestResult
from kiln.tests.runtime.fake_driver import read_params
from kiln.tests.runtime.trees import (
    PARAMS,
    PLAN,
    compile_c,
    cpu_manifest,
    dim,
    kernel,
    manifest,
    write_tree,
)
from kiln.tests.tools.host_driver import HostDriver
from kiln.tests.trees import cpu_kernel, cuda_tree
from kiln.tests.trees import manifest as plain_manifest

TREE = Path(__file__).parents[2] / "aot_artifacts"

LOOP = """
i64 kiln_{name}(void *const *p, const i64 *n, const double *f, i64 begin, i64 end) {{
  float *x = p[0];
  float *out = p[1];
  (void)f;
  for (i64 r = begin; r < end; ++r)
    for (i64 c = 0; c < n[0]; ++c) {{ {body} }}
  return 0;
}}
"""
BODIES = {
    "negate": "out[r * n[2] + c] = -x[r * n[1] + c];",
    "wrong": "out[r * n[2] + c] = -2 * x[r * n[1] + c];",
    "short": "if (c) out[r * n[2] + c] = -x[r * n[1] + c];",
    "beyond": "out[r * n[2] + c] = out[r * n[2] + c + 16] = -x[r * n[1] + c];",
    "input": "out[r * n[2] + c] = -x[r * n[1] + c]; x[r * n[1] + c] = 0;",
    "infinite": "out[r * n[2] + c] = -x[r * n[1] + c] / (r + c ? 1.0f : 0.0f);",
    "counting": "static int seen; out[r * n[2] + c] = -x[r * n[1] + c] + seen++ / 512;",
}
FAULTS = {
    "wrong": r"out and that of good: \d+ of 768 elements differ, expected the same bits",
    "short": "its outputs are not all written, or not the same each time",
    "beyond": "it wrote memory that is not its to write",
    "input": "it wrote memory that is not its to write",
    "infinite": "an output of finite inputs is not finite",
    "counting": "its outputs are not all written, or not the same each time",
}
SHAPE = {"contract": {"kind": "exact", "rel_l2": 0.0, "max_eps": 0.0}}
BIG = {"numerics": {**SHAPE, "selftest": {"seed": 1, "shape": {"M": 3, "N": 256}}}}


@pytest.fixture(scope="session")
def broken_so(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    loops = (LOOP.format(name=name, body=body) for name, body in BODIES.items())
    return compile_c(tmp_path_factory.mktemp("broken"), "typedef long long i64;" + "".join(loops))


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, broken_so: bytes) -> Make:
    """Makes a tree whose op `negate` has these variants, best first, and `good` last."""

    def tree(*names: str, **more: Any) -> Path:
        entries = [
            kernel("negate", n, PARAMS["negate"], broken_so, entry=f"kiln_{n}", priority=9, **BIG, **more)
            for n in names
        ]
        entries.append(kernel("negate", "good", PARAMS["negate"], broken_so, **BIG, **more))
        documents = {"cpu-x86_64": manifest(entries, recipes=[])}
        return write_tree(tmp_path / "tree", documents, {"ops.so": broken_so})

    return tree


def by_name(report: SelftestReport) -> dict[str, SelftestResult]:
    return {r.variant: r for r in report.results}


def test_every_candidate_of_the_shipped_tree() -> None:
    with kiln.load(TREE) as lib:
        report = lib.selftest()
        count = sum(len(lib.op(n).candidates) for n in lib.ops)
        assert report.ok, str(report)
        assert len(report.results) == count
        assert all(r.calls or r.skipped for r in report.results)
        # What is compared with nothing is a plan of a pipeline, or an op with one ISA tier.
        assert len(report.alone) * 20 < count
        assert (
            str(report)
            .splitlines()[-1]
            .startswith(f"passed: {sum(bool(r.calls) for r in report.results)} of")
        )


@pytest.mark.parametrize("target", ["sm_90a", "sm_80", "sm_120a", "cpu-aarch64"])
def test_every_candidate_has_a_call_that_it_takes(target: str) -> None:
    from kiln.runtime.selftest import _internal, _Trial

    with kiln.load(TREE, target) as lib:
        internal = _internal(lib)
        missed = [
            (name, c.variant)
            for name in lib.ops
            if name not in internal
            for c in lib.op(name).candidates
            if entry_of(c, lib.op(name).candidates) is None
            if _Trial(lib.op(name), None, {})._own_case(c) is None
        ]
        assert missed == []


def test_a_further_entry_of_a_kernel_is_no_witness(tmp_path: Path, broken_so: bytes) -> None:
    shapes = {"when": ["eq", ["dim", "M"], 1 << 28], "priority": 5}
    entries = [
        kernel("negate", "good", PARAMS["negate"], broken_so, **BIG),
        kernel("negate", "good.shapes", PARAMS["negate"], broken_so, **BIG, **shapes),
        kernel("negate", "good.rows", PARAMS["negate"], broken_so, **BIG, priority=4),
    ]
    documents = {"cpu-x86_64": manifest(entries, recipes=[])}
    with kiln.load(write_tree(tmp_path / "tree", documents, {"ops.so": broken_so})) as lib:
        candidates = lib.op("negate").candidates
        assert [entry_of(c, candidates) for c in candidates] == ["good", "good", None]
        report = lib.selftest()
        found = by_name(report)
    assert report.ok
    assert report.alone == ("negate.good",)
    assert [found[n].skipped for n in ("good", "good.rows", "good.shapes")] == [None, FURTHER, FURTHER]


def test_entries_of_other_kernels_are_no_further_ones(tmp_path: Path, broken_so: bytes) -> None:
    entries = [
        kernel("negate", name, PARAMS["negate"], broken_so, entry=f"kiln_{symbol}", **BIG)
        for name, symbol in (("good", "negate"), ("good.wrong", "wrong"), ("goods", "negate"))
    ]
    documents = {"cpu-x86_64": manifest(entries, recipes=[])}
    with kiln.load(write_tree(tmp_path / "tree", documents, {"ops.so": broken_so})) as lib:
        candidates = lib.op("negate").candidates
        assert [entry_of(c, candidates) for c in candidates] == [None, None, None]
        assert not lib.selftest().ok


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_kernel_is_found(make: Make, name: str) -> None:
    with kiln.load(make(name)) as lib:
        report = lib.selftest()
        found = by_name(report)
        assert not report.ok
        assert not found["good"].faults
        assert re.match(FAULTS[name], found[name].faults[0])
        assert f"negate.{name}: " in str(report)
        assert re.match(r"\d faults?: 2 of 2 on this CPU", str(report).splitlines()[-1])


def test_the_good_one_alone_is_told_so(make: Make) -> None:
    with kiln.load(make()) as lib:
        report = lib.selftest()
        assert (report.ok, report.alone) == (True, ("negate.good",))
        assert "1 compared with nothing: negate.good" in str(report)


def test_a_plan_is_compared_with_what_else_runs_the_op(tmp_path: Path, ops_so: bytes) -> None:
    document = cpu_manifest(ops_so)
    with kiln.load(write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        assert lib.selftest().ok
        assert lib.selftest(["negate"]).results == lib.selftest(["negate"]).results
        assert [r.op for r in lib.selftest(["negate"]).results] == ["negate"]
    # An op's own kernel that is another op's: negate instead of scale_negate.
    wrong = kernel("scale_negate", "own", PARAMS["scale_add"], ops_so, entry="kiln_scale_add", tier="fused")
    document["kernels"] = sorted([*document["kernels"], wrong], key=lambda k: (k["op"], k["variant"]))
    with kiln.load(write_tree(tmp_path / "u", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        faults = by_name(lib.selftest())["own"].faults
        assert "out and that of composite: 15 of 15 elements differ" in faults[0]


def test_halves_of_another_op_run_in_it(tmp_path: Path, ops_so: bytes) -> None:
    document = cpu_manifest(ops_so)
    document["recipes"] = [{**PLAN, "tier": "primitive"}]
    with kiln.load(write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        report = lib.selftest()
        assert {r.op for r in report.results if r.skipped == PART} == {"negate", "scale_add"}
        assert f"2 not run: {PART}" in str(report)


def test_what_cannot_run_is_skipped_with_its_reason(make: Make) -> None:
    with kiln.load(make("wrong")) as lib:
        lib.disable("wrong")
        report = lib.selftest()
        assert report.ok
        assert by_name(report)["wrong"].skipped == "disabled by disable('wrong')"
        lib.disable("good")
        assert not lib.selftest().ok
        assert str(lib.selftest()).splitlines()[-1].startswith("nothing ran: 0 of 2")


def test_a_predicate_that_no_tried_size_fulfils_is_a_fault(make: Make) -> None:
    with kiln.load(make(when=["and", ["lt", dim("N"), 0], ["gt", dim("N"), 0]])) as lib:
        (result,) = lib.selftest().results
        assert result.faults == [
            "no call was found that it takes: its predicate allows none of the sizes that were tried"
        ]


def test_sizes_come_from_predicates(make: Make) -> None:
    when = ["and", ["eq", dim("N"), 640], ["ge", dim("M"), 17], ["divisible", ["stride", "x"], 64]]
    with kiln.load(make(when=when)) as lib:
        operation = lib.op("negate")
        case = next(cases_of(operation.candidates[0], operation.sig))
        assert case.slots[0].shape == (256, 640)
        assert lib.selftest().ok


def test_providers_are_compared_too(make: Make) -> None:
    with kiln.load(make()) as lib:
        lib.register_provider("negate", "mine", lambda x, out: np.negative(x, out=out))
        lib.register_provider("negate", "off", lambda x, out: np.multiply(x, -2, out=out))

        def decline(x: Any, out: Any) -> Any:
            raise kiln.Decline

        lib.register_provider("negate", "never", decline)
        found = by_name(lib.selftest())
        assert set(found) == {"good", "mine", "off"}
        assert (found["mine"].faults, found["mine"].witnesses) == ([], 2)
        assert "of 768 elements differ" in found["off"].faults[0]


def test_a_pretended_device_cannot_be_tested() -> None:
    with kiln.load(TREE, "sm_90a") as lib, pytest.raises(kiln.UnavailableError, match="cannot run kernels"):
        lib.selftest()


def test_a_sealed_library_says_what_to_do(make: Make) -> None:
    with kiln.load(make()) as lib:
        lib.seal()
        (result,) = lib.selftest().results
        assert "prepare it before sealing" in result.faults[0]


def doubles(factor: float) -> Callable[[str, int], None]:
    """A launch of the kernel `doubled` on host memory."""

    def launch(entry: str, params: int) -> None:
        x, y, _, n, *_ = read_params(params, "QQdqQQ")
        for row in range(3):
            at = [(ctypes.c_float * n).from_address(p + 4 * row * n) for p in (x, y)]
            source, target = map(np.ctypeslib.as_array, at)
            target[:] = factor * source

    return launch


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    """`doubled` for sm_90a and for this CPU."""
    root = tmp_path / "twin"
    cuda, files = cuda_tree("sm_90a", "doubled")
    entry, data = cpu_kernel("doubled")
    cpu = plain_manifest("cpu-x86_64", [entry])
    for document in (cuda, cpu):
        document["kernels"][0]["numerics"]["selftest"]["shape"] = {"M": 3, "N": 64}
    documents = {"sm_90a": canonical_json(cuda), "cpu-x86_64": canonical_json(cpu)}
    return write_tree(root, documents, {**files, entry["file"]: data})


@pytest.mark.parametrize(("factor", "fine"), [(2.0, True), (3.0, False)])
def test_a_device_is_compared_with_this_cpu(twin: Path, factor: float, fine: bool) -> None:
    driver = HostDriver(doubles(factor))
    with kiln.load(twin, CudaDevice(0, driver)) as lib, kiln.load(twin) as host:
        alone = lib.selftest()
        assert (alone.ok, len(alone.alone)) == (True, 1)
        report = lib.selftest(against=host)
        assert (report.ok, report.alone) == (fine, ())
        if not fine:
            assert "y and that of this CPU (cpu-x86_64): 192 of 192 elements differ" in str(report)
        allocations = driver.names().count("cuMemAlloc")
        assert allocations == driver.names().count("cuMemFree") > 0
