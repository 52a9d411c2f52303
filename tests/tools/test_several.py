"""Several devices at once, on stand-ins for GPUs: what passes, and what does not."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.cuda import CudaDevice
from kiln.runtime.load import Library, load
from kiln.runtime.scratch import ScratchPolicy
from kiln.tests.runtime.fake_driver import CUresult, read_params
from kiln.tests.tools.host_driver import GraphDriver
from kiln.tests.tools.test_graphs import CATALOGS, TARGET, difference, only_difference
from kiln.tools.cli import main
from kiln.tools.graphs import Check, Open
from kiln.tools.several import devices


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kernel for a GPU."""
    sys.path.append(str(CATALOGS))
    out = tmp_path_factory.mktemp("several") / "tree"
    options = ["--catalog", "twins_right", "--target", TARGET, "--op", "difference", "--jobs", "2"]
    assert main(["build", *options, "--out", str(out)]) == 0
    yield out
    sys.path.remove(str(CATALOGS))


def opener(tree: Path, ordinal: int, driver: GraphDriver) -> Open:
    def opened(policy: ScratchPolicy) -> Library:
        return load(tree, CudaDevice(ordinal, driver, scratch=policy))

    return opened


def looked(tree: Path, drivers: Sequence[GraphDriver]) -> list[Check]:
    for driver in drivers:
        driver.devices = len(drivers)
    return devices([opener(tree, i, d) for i, d in enumerate(drivers)], TARGET, only_difference)


def test_right_kernels_on_two_devices_pass(tree: Path) -> None:
    together, strangers = looked(tree, [GraphDriver(difference), GraphDriver(difference)])
    assert (together.faults, strangers.faults) == ([], [])
    assert together.count == strangers.count >= 2


def test_a_device_whose_bits_change_is_a_fault(tree: Path) -> None:
    calls = 0

    def drifting(entry: str, params: int) -> None:
        nonlocal calls
        calls += 1
        difference(entry, params)
        if calls > 3:
            out = read_params(params, "QQQqqqii")[2]
            ctypes.c_float.from_address(out).value = 7.5

    together, _ = looked(tree, [GraphDriver(difference), GraphDriver(drifting)])
    assert any("its bits change beside another device" in f for f in together.faults)


class Failing(GraphDriver):
    """A device that is lost after a few launches."""

    calls = 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        self.calls += 1
        if self.calls > 3:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        return super().cuLaunchKernelEx(config, function, params, extra)


def test_a_call_that_fails_on_one_device_is_a_fault(tree: Path) -> None:
    together, _ = looked(tree, [GraphDriver(difference), Failing(difference)])
    assert any("cuLaunchKernelEx" in f for f in together.faults)
