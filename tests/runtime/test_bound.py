"""Bound calls: what they launch, what may change, and what is refused."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import proof
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.device import PlainCall
from kiln.runtime.errors import ContractError, DriverError, UnavailableError
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver, read_params
from kiln.tests.runtime.test_call import counting_tree
from kiln.tests.runtime.test_cuda import CudaArray, entry
from kiln.tests.runtime.test_cuda import tree as cuda_tree

X, OUT = CudaArray((4, 32)), CudaArray((4, 32), 2 << 20)


def rows(*shape: int) -> Any:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[kiln.Library, FakeDriver]:
    """Two variants by alignment on a recording driver whose context is current."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    driver = FakeDriver()
    driver.stack = [0xC0]
    root = cuda_tree(tmp_path, entry("aligned", tier="fast"), entry("plain", align=4))
    return kiln.load(root, CudaDevice(0, driver)), driver


def last(driver: FakeDriver) -> list[Any]:
    """Parameters of the last launch."""
    return read_params(driver.launches[-1]["params"], "QQiqfq")


def test_a_launch_is_one_driver_call(gpu: Any) -> None:
    lib, driver = gpu
    bound = lib.negate.bind(X, eps=0.25, seed=7, out=OUT, stream=0x51)
    assert (bound.variant, bound.outputs, bound.pointers) == ("aligned", OUT, (1 << 20, 0, 0, 2 << 20))
    driver.allowed = {"cuLaunchKernelEx"}
    for _ in range(3):
        assert bound() is OUT
    assert last(driver) == [1 << 20, 2 << 20, 32, 32, 0.25, 12]
    assert driver.launches[-1]["config"].hStream == 0x51
    assert lib.stats() == {"negate": {"aligned": 3}}


def test_another_stream_for_one_launch(gpu: Any) -> None:
    lib, driver = gpu
    bound = lib.negate.bind(X, out=OUT, stream=1)
    for stream in (None, 2, 2, None):
        bound(stream=stream)
    assert [c["config"].hStream for c in driver.launches] == [1, 2, 2, 1]
    bound.update(x=CudaArray((4, 32), 9 << 20))
    for stream in (1, 2):
        bound(stream=stream)
        assert last(driver)[0] == 9 << 20
    with pytest.raises(ContractError, match="stream of type str"):
        bound(stream="x")


def test_other_arrays_of_the_layout(gpu: Any) -> None:
    lib, driver = gpu
    bound = lib.negate.bind(X, eps=0.5, out=OUT)
    other, out = CudaArray((4, 32), 5 << 20), CudaArray((4, 32), 6 << 20)
    bound.update(x=other, out=out)
    assert bound() is out
    assert last(driver) == [5 << 20, 6 << 20, 32, 32, 0.5, 5]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"x": CudaArray((5, 32))}, r"x: its shape is \(5, 32\), bound is \(4, 32\); bind again"),
    "type": ({"x": CudaArray((4, 32), typestr="<f8")}, "its dtype is f64, bound is f32"),
    "strides": ({"x": CudaArray((4, 32), strides=(256, 4))}, r"its strides is \(64, 1\)"),
    "read-only": ({"out": CudaArray((4, 32), data=(4 << 20, True))}, "its readonly is True"),
    "null": ({"x": CudaArray((4, 32), 0)}, "null address"),
    "overlap": ({"x": CudaArray((4, 32), (2 << 20) + 16)}, "overlaps"),
    "alignment": ({"x": CudaArray((4, 32), (4 << 20) + 4)}, r"negate\.plain now, bound is negate\.aligned"),
    "no candidate": ({"x": CudaArray((4, 32), (4 << 20) + 2)}, "aligned to 4 bytes"),
    "no operand": ({"y": X}, "y is not a tensor operand"),
    "scalar": ({"eps": 0.5}, "eps is not a tensor operand"),
    "no array": ({"x": 1.0}, "x: found an object of type float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_update_refuses_changes_nothing(gpu: Any, name: str) -> None:
    lib, driver = gpu
    lib.prepare()
    bound = lib.negate.bind(X, out=OUT)
    arrays, why = REFUSED[name]
    with pytest.raises(kiln.KilnError, match=why):
        bound.update(**arrays)
    bound()
    assert last(driver)[:2] == [1 << 20, 2 << 20]


def test_better_or_worse_alignment_that_the_kernel_takes(gpu: Any) -> None:
    lib, driver = gpu
    bound = lib.negate.bind(X, out=OUT)
    bound.update(x=CudaArray((4, 32), (4 << 20) + 16))
    bound()
    assert last(driver)[0] == (4 << 20) + 16


def test_zero_rows_launch_nothing(gpu: Any) -> None:
    lib, driver = gpu
    bound = lib.negate.bind(CudaArray((0, 32)), out=CudaArray((0, 32), 2 << 20))
    assert (bound.candidate, bound.variant) == (None, None)
    bound()
    bound.update(x=CudaArray((0, 32), 5 << 20))
    bound()
    assert driver.launches == []


def test_errors_are_those_of_a_call(gpu: Any) -> None:
    lib, driver = gpu
    with pytest.raises(ContractError, match="the operand x is missing"):
        lib.negate.bind()
    bound = lib.negate.bind(X, out=OUT)
    driver.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    for stream in (None, 3):
        with pytest.raises(DriverError, match=r"negate\.aligned: cuLaunchKernelEx returned 1"):
            bound(stream=stream)
    del driver.fail["cuLaunchKernelEx"]
    driver.stack = [0]
    bound()
    assert driver.stack == [0]
    lib.close()
    with pytest.raises(UnavailableError, match="was closed"):
        bound()


def test_on_the_cpu(tree: Path) -> None:
    with kiln.load(tree) as lib:
        x, y = rows(3, 4), rows(3, 4)
        bound = lib.scale_add.bind(x, y, alpha=3.0)
        out = bound.outputs
        assert bound() is out
        assert np.array_equal(out, x * np.float32(3) + y)
        y2 = y.copy() + 1
        bound.update(y=y2)
        bound()
        assert np.array_equal(out, x * np.float32(3) + y2)
        with pytest.raises(ContractError, match="stream= on the CPU"):
            bound(stream=4)
        bound = lib.gather.bind(rows(4, 3), np.array([9], np.int32))
        with pytest.raises(ContractError, match="gather: row 0 holds an index"):
            bound()
    with pytest.raises(UnavailableError, match="was closed"):
        bound()


def test_in_place_operands_move_as_one(tree: Path) -> None:
    with kiln.load(tree) as lib:
        x, total = rows(2, 3), rows(2, 3)
        bound = lib.accumulate.bind(x, total)
        other = np.zeros((2, 3), np.float32)
        bound.update(sum=other)
        assert bound() is other
        assert np.array_equal(other, x)
        before = total.copy()
        bound()
        assert np.array_equal(total, before)
        with pytest.raises(ContractError, match="bias: it was absent when the call was bound"):
            bound.update(bias=rows(3))


def test_a_plan(tree: Path) -> None:
    with kiln.load(tree) as lib:
        x, y = rows(3, 4), rows(3, 4)
        bound = lib.scale_negate.bind(x, y)
        assert bound.variant == "composite"
        for _ in range(3):
            x += 1
            assert np.array_equal(bound(), -(x * np.float32(2) + y))
        assert lib.scratch.counters.growths == 1


def test_threads_launch_one_call_with_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has blocks of its own, also where all of them are one bound call: its kernel counts in
    scratch, and tells if another one does so at the same time."""
    wrong: list[Exception] = []
    update = PlainCall.update

    def slow(self: PlainCall, *addresses: Any) -> None:
        # Where addresses are left for all threads to see, let another one in.
        update(self, *addresses)
        time.sleep(1e-3)

    with kiln.load(counting_tree(tmp_path), threads=1) as lib:
        bound = lib.negate.bind(rows(4096, 1024))
        monkeypatch.setattr(PlainCall, "update", slow)

        def launch() -> None:
            try:
                for _ in range(20):
                    bound()
            except ContractError as e:
                wrong.append(e)

        threads = [threading.Thread(target=launch) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong
        assert lib.scratch.zeroed.counters.growths <= 4
