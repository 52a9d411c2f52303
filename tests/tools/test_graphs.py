"""The device checks of graphs, scratch, streams, contexts and soaks on a stand-in for a GPU: what passes, and
above all what does not."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.runtime.cuda import CudaDevice
from kiln.runtime.load import Library, load
from kiln.runtime.manifest import canonical_json
from kiln.runtime.scratch import ScratchPolicy
from kiln.tests.runtime.fake_driver import CUresult, read_params
from kiln.tests.runtime.trees import write_tree
from kiln.tests.support.documents import manifest_document
from kiln.tests.tools.conftest import Run
from kiln.tests.tools.host_driver import GraphDriver
from kiln.tools import graphs
from kiln.tools.cli import main

CATALOGS = Path(__file__).resolve().parents[1] / "catalogs"
TARGET = "sm_90a"


def difference(entry: str, params: int) -> None:
    """The kernel `difference` on host memory."""
    a, b, out, *strides, rows, width = read_params(params, "QQQqqqii")
    for row in range(rows):
        x, y, z = (
            np.ctypeslib.as_array((ctypes.c_float * width).from_address(p + 4 * row * s))
            for p, s in zip((a, b, out), strides, strict=True)
        )
        with np.errstate(all="ignore"):
            z[:] = x - y


def only_difference(op: str) -> bool:
    return op == "difference"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The right twins for a GPU."""
    sys.path.append(str(CATALOGS))
    out = tmp_path_factory.mktemp("twins") / "tree"
    options = ["--catalog", "twins_right", "--target", TARGET, "--op", "difference", "--jobs", "2"]
    assert main(["build", *options, "--out", str(out)]) == 0
    yield out
    sys.path.remove(str(CATALOGS))


def opener(tree: Path, driver: GraphDriver) -> graphs.Open:
    def opened(policy: ScratchPolicy) -> Library:
        return load(tree, CudaDevice(0, driver, scratch=policy))

    return opened


def looked(tree: Path, driver: GraphDriver, launches: int = 0) -> dict[str, graphs.Check]:
    checks = graphs.look(opener(tree, driver), TARGET, only_difference, not launches, launches)
    return {c.name: c for c in checks}


def test_a_right_kernel_passes_everything(tree: Path) -> None:
    driver = GraphDriver(difference)
    checks = looked(tree, driver)
    assert {name: c.faults for name, c in checks.items()} == {name: [] for name in checks}
    captured = checks["captured as first use"].count
    assert captured >= 1
    assert checks["replays equal eager calls"].count == graphs.REPLAYS * captured
    assert checks["two streams at once"].count == captured
    assert checks["no context, or another one current"].count == 3 * min(captured, graphs.FEW)
    assert driver.names().count("cuGraphLaunch") >= graphs.REPLAYS * captured
    assert driver.stack == [0]


def test_a_call_that_cannot_be_captured_is_a_fault(tree: Path) -> None:
    driver = GraphDriver(difference)
    driver.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    captured, replayed = graphs.graphs(opener(tree, driver), TARGET, only_difference)
    assert captured.count == replayed.count == 0
    assert all("900" in fault for fault in captured.faults)
    assert captured.faults
    assert not driver.capturing


class Stale(GraphDriver):
    """Replays flip a bit of what was computed."""

    def cuGraphLaunch(self, graph: Any, stream: int) -> Any:
        result = super().cuGraphLaunch(graph, stream)
        for _, params in graph:
            out = read_params(ctypes.addressof(params), "QQQqqqii")[2]
            ctypes.c_uint32.from_address(out).value ^= 1
        return result


def test_a_replay_that_differs_is_a_fault(tree: Path) -> None:
    _, replayed = graphs.graphs(opener(tree, Stale(difference)), TARGET, only_difference)
    assert replayed.count == len(replayed.faults) > 0
    assert "replay 1 differs from the eager call" in replayed.faults[0]


def noisy() -> Callable[[str, int], None]:
    """A kernel whose result depends on how often it ran."""
    count = 0

    def run(entry: str, params: int) -> None:
        nonlocal count
        difference(entry, params)
        count += 1
        ctypes.c_uint32.from_address(read_params(params, "QQQqqqii")[2]).value ^= count

    return run


def test_a_result_that_changes_is_a_fault(tree: Path) -> None:
    checks = looked(tree, GraphDriver(noisy()))
    for name in ("replays equal eager calls", "two streams at once", "no context, or another one current"):
        assert checks[name].faults, name
    assert looked(tree, GraphDriver(noisy()), 100)["equal bits to the end"].faults


@pytest.fixture(scope="module")
def counting(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same kernels, given scratch that must stay zero in place of a pointer that they never read."""
    m = manifest_document(tree / TARGET)
    scratch = {"name": "counters", "bytes": 64, "align": 16, "zeroed": True}
    for kernel in m["kernels"]:
        at = next(i for i, p in enumerate(kernel["params"]) if p["kind"] == "null")
        operand = {"dtype": "u8", "operand": "scratch:counters", "access": "write", "align": 16}
        kernel["params"][at] = {"name": "counters", "kind": "ptr", **operand}
        kernel["scratch"] = [scratch]
    files = {name: (tree / TARGET / name).read_bytes() for name in [k["file"] for k in m["kernels"]]}
    out = tmp_path_factory.mktemp("counting") / "tree"
    return write_tree(out, {TARGET: canonical_json({**m, "sources": {}})}, files)


def counts(left: int) -> Callable[[str, int], None]:
    """The kernel, which finds zeros and leaves a byte."""

    def run(entry: str, params: int) -> None:
        difference(entry, params)
        *_, counters, _ = read_params(params, "QQQqqqiiQQ")
        assert left or not any(ctypes.string_at(counters, 64))
        ctypes.c_uint8.from_address(counters + 63).value = left

    return run


def test_zeroed_scratch_must_be_left_so(counting: Path) -> None:
    (good,) = graphs.scratch(opener(counting, GraphDriver(counts(0))), TARGET, only_difference)
    assert good.count > 0
    assert good.faults == []
    (bad,) = graphs.scratch(opener(counting, GraphDriver(counts(3))), TARGET, only_difference)
    assert len(bad.faults) == bad.count == good.count
    assert "leaves scratch that must be zero with other bytes" in bad.faults[0]


def test_a_soak_counts_its_launches(tree: Path) -> None:
    driver = GraphDriver(difference)
    checks = looked(tree, driver, 500)
    bits = checks["equal bits to the end"]
    assert bits.count >= 500
    assert driver.names().count("cuLaunchKernelEx") >= bits.count
    assert not bits.faults
    assert not checks["constant memory"].faults


def test_memory_that_vanishes_is_a_fault(tree: Path) -> None:
    driver = GraphDriver(difference)
    driver.lost = 1 << 16
    assert "bytes and" in looked(tree, driver, 500)["constant memory"].faults[0]


def test_only_on_cuda(kiln: Run, tree: Path) -> None:
    for option in (["--graphs"], ["--soak", "5"]):
        code, _, err = kiln("test", "--tree", tree, *option)
        assert code == 2
        assert "give --device cuda" in err


def test_the_command(kiln: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = GraphDriver(difference)
    monkeypatch.setattr(
        graphs, "CudaDevice", lambda ordinal, scratch=None: CudaDevice(ordinal, driver, scratch=scratch)
    )
    monkeypatch.setattr(graphs, "cuda", lambda library: library.device)
    code, out, _ = kiln("test", "--tree", tree, "--device", "cuda", "--soak", "50", "--op", "difference")
    assert code == 0
    assert "equal bits to the end: 5" in out
    code, _, err = kiln("test", "--tree", tree, "--device", "cuda", "--graphs", "--op", "differense")
    assert code == 2
    assert "did you mean difference" in err
