"""Every request to the system and to the driver failing in turn: a typed error, and nothing left behind."""

import ctypes
import errno
import fcntl
import os
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import arrays, cpu, files, scratch, targets
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.cuda_memory import DeviceArray
from kiln.runtime.driver import _LOST
from kiln.runtime.entities import Tensor
from kiln.runtime.errors import DriverError, KilnError, UnavailableError
from kiln.runtime.scratch import ScratchPolicy
from kiln.runtime.verify import verify_tree
from kiln.tests.runtime.c.fake import part_of_tree
from kiln.tests.runtime.fake_driver import FakeDriver

X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Faults:
    """The requests so far, of which one fails."""

    def __init__(self) -> None:
        self.requests = 0
        self.at = -1
        self.error: BaseException = MemoryError()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which fails when its turn comes."""

        def wrapped(*args: Any, **named: Any) -> Any:
            self.requests += 1
            if self.requests - 1 == self.at:
                raise self.error
            return function(*args, **named)

        return wrapped


class Wrapped:
    """A module of which some functions may fail."""

    def __init__(self, module: Any, names: set[str], faults: Faults) -> None:
        self._module = module
        self.__dict__.update({n: faults.wrap(getattr(module, n)) for n in names})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The system's answers to the runtime under control."""
    made = Faults()
    monkeypatch.setattr(files, "os", Wrapped(os, {"open", "read", "fstat"}, made))
    monkeypatch.setattr(cpu, "os", Wrapped(os, {"memfd_create", "write", "open"}, made))
    monkeypatch.setattr(cpu, "fcntl", Wrapped(fcntl, {"fcntl"}, made))
    monkeypatch.setattr(cpu, "ctypes", Wrapped(ctypes, {"CDLL"}, made))
    monkeypatch.setattr(targets, "open", made.wrap(open), raising=False)
    monkeypatch.setattr(tempfile, "mkdtemp", made.wrap(tempfile.mkdtemp))
    return made


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """NumPy's allocations under control: what they raise is Python's own MemoryError."""
    made = Faults()
    for module in (arrays, scratch):
        monkeypatch.setattr(module, "np", Wrapped(np, {"empty"}, made))
    return made


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def signed(root: Path) -> bytes | None:
    """The key that signed the tree, where signatures can be made."""
    if find_spec("cryptography") is None:
        return None
    from kiln.tests.runtime.keys import public_raw, sign_tree

    sign_tree(root)
    return public_raw()


def on_cpu(root: Path, key: bytes | None) -> None:
    """Everything that a library does on the CPU."""
    with kiln.load(root, threads=2, key=key, scratch=ScratchPolicy(poison=True)) as lib:
        x, y = X.copy(), X.copy()
        assert np.array_equal(lib.scale_negate(x, y), -3 * X)
        bound = lib.bind("negate", x)
        assert np.array_equal(bound(), -X)
        lib.prepare()
        lib.reserve("scale_negate", x, y, threads=2)
        lib.scratch.release(0)
    assert not verify_tree(root)


def each_failing(run: Callable[[], None], faults: Faults, errors: list[BaseException]) -> Counter[str]:
    """Run with the n-th request failing for every n; how often which kind of error came out."""
    run()
    before, total = descriptors(), faults.requests
    told: Counter[str] = Counter(requests=total)
    for error in errors:
        for nth in range(total):
            faults.requests, faults.at, faults.error = 0, nth, error
            try:
                run()
            except KilnError as e:
                told[type(e).__name__] += 1
            except MemoryError:
                told["MemoryError"] += 1
            except AssertionError:
                told["a fault of the tree"] += 1
            assert faults.requests > nth
            assert descriptors() == before, nth
    faults.at = -1
    run()
    return told


def test_every_request_to_the_system(tree: Path, faults: Faults) -> None:
    key = signed(tree)
    numbers = (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EACCES, errno.ENOSPC)
    told = each_failing(lambda: on_cpu(tree, key), faults, [OSError(n, os.strerror(n)) for n in numbers])
    assert told["requests"] > 20
    # What can do without does: a memory file, /proc/cpuinfo.
    assert told["IntegrityError"] + told["UnavailableError"] > 2 * told["requests"]
    assert told["a fault of the tree"] > 10


def test_every_request_without_memory_files(
    ops_so: bytes, faults: Faults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(vars(cpu)["os"], "memfd_create", refuse)

    def load() -> None:
        cpu.load_object(ops_so, "ops.so")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    told = each_failing(load, faults, [error])
    assert told == {"requests": 4, "UnavailableError": 3, "IntegrityError": 1}
    assert list(tmp_path.iterdir()) == []


def test_every_allocation(tree: Path, short_of_memory: Faults) -> None:
    """A library that was refused memory goes on, and has lost none."""
    with kiln.load(tree, threads=2) as lib:

        def run() -> None:
            assert np.array_equal(lib.scale_negate(X, X), -3 * X)
            lib.reserve("scale_negate", X, X, threads=2)
            lib.scratch.release(0)
            held = vars(lib.device.scratch)["_memory"]._held
            assert held == {}

        def clean() -> None:
            try:
                run()
            finally:
                lib.scratch.release(0)
                assert vars(lib.device.scratch)["_memory"]._held == {}

        told = each_failing(clean, short_of_memory, [MemoryError()])
    assert told == {"requests": 3, "MemoryError": 3}


@pytest.mark.parametrize("given", [0, 1, 2])
def test_threads_that_cannot_be_started(tree: Path, given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes as many as there are; none is left, nothing is computed twice."""
    monkeypatch.setattr(cpu, "MIN_WORK", 1)
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len([t for t in started if t.is_alive()]) >= given:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    x = np.ones((64, 8), np.float32)
    total = x.copy()
    with kiln.load(tree, threads=4) as lib:
        for _ in range(3):
            lib.accumulate(x, total)
    assert (total == 4).all()
    assert len([t for t in started if t.is_alive()]) == 0
    assert bool(started) == bool(given)


MADE = {
    "cuModuleLoadData": "modules",
    "cuDevicePrimaryCtxRetain": "contexts",
}
GONE = {"cuModuleUnload": "modules", "cuDevicePrimaryCtxRelease": "contexts"}
CODES = (1, 2, 3, 4, 34, 46, 100, 101, 200, 201, 209, 214, 218, 222, 304, 400, 500, 700, 702, 709, 716, 719,
         803, 900, 901, 906, 999)  # fmt: skip
CLOSING = {"cuModuleUnload", "cuMemFree", "cuMemFreeAsync", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"}


class FailingDriver(FakeDriver):
    """Its n-th call fails with a code."""

    def __init__(self, at: int = -1, code: int = 0) -> None:
        super().__init__()
        self.at, self.code = at, code
        self.live: Counter[str] = Counter()
        self.finalizing = False
        """Whether the call that failed was one of a finalizer, which can tell nobody."""

    def _result(self, name: str, args: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        fails = len(self.log) == self.at
        # What could not be given back is as gone: it is asked for once.
        self.live[GONE.get(name, "")] -= name in GONE
        self.live[MADE.get(name, "")] += name in MADE and not fails
        if not fails:
            return super()._result(name, args, *values)
        self.log.append((name, args))
        self.finalizing = any(f.name == "__del__" for f in traceback.extract_stack())
        return (self.code, *(0 for _ in values))


@pytest.fixture(scope="module")
def cuda_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the committed tree: plans with a temporary, and what they call."""
    shipped = Path(__file__).parents[2] / "aot_artifacts"
    return part_of_tree(tmp_path_factory.mktemp("cuda"), shipped, "silu_mul_quant_fp8")


def on_cuda(root: Path, driver: FakeDriver, pool: bool) -> None:
    """Everything that a library does on CUDA."""
    device = CudaDevice(0, driver, scratch=ScratchPolicy(pool, poison=True))
    with kiln.load(root, device) as lib:
        for rows in (64, 1 << 14):
            named: dict[str, Any] = {"scale": 0.5, "tier": "composite"}
            for t in lib.op("silu_mul_quant_fp8").sig.tensors:
                if t.role != "out":
                    named[t.name] = DeviceArray(device, _shape(t, rows), _dtype(t), 7)
            lib.silu_mul_quant_fp8(**named, stream=7)
            bound = lib.bind("silu_mul_quant_fp8", **named, stream=8)
            bound()
            bound(stream=7)
            lib.reserve("silu_mul_quant_fp8", **named, stream=9, threads=2)
        lib.scratch.release(7)
        device.synchronize(8)


def _shape(t: Tensor, rows: int) -> tuple[int, ...]:
    return tuple(rows if e == ("dim", "M") else 256 for e in t.shape)


def _dtype(t: Tensor) -> str:
    return t.dtype if isinstance(t.dtype, str) else t.dtype.choices[0]


@pytest.mark.parametrize("pool", [True, False])
def test_every_driver_call(cuda_tree: Path, pool: bool) -> None:
    whole = FailingDriver()
    on_cuda(cuda_tree, whole, pool)
    names = whole.names()
    last = max(i for i, n in enumerate(names) if n == "cuStreamSynchronize")
    assert len(names) > 60
    assert whole.live["modules"] == whole.live["contexts"] == 0
    for nth, name in enumerate(names):
        for code in CODES if pool and names.index(name) == nth else (2,):
            driver, where = FailingDriver(nth, code), (nth, name, code)
            refused = wrong = False
            try:
                on_cuda(cuda_tree, driver, pool)
            except KilnError as e:
                # Not kept: it holds the arrays of the frames it went through.
                refused = True
                wrong = isinstance(e, DriverError) and (e.code != code or name not in str(e))
            assert not wrong, where
            assert len(driver.log) > nth, where
            # A launch that another context refuses is made again in the device's own.
            again = name == "cuLaunchKernelEx" and code in (201, 400)
            lost_late = nth > last and code in _LOST
            assert refused or lost_late or name in CLOSING or again or driver.finalizing, where
            assert driver.stack == [0], where
            assert driver.live["contexts"] == 0, where
            # What a context that cannot be entered any more held goes with it.
            entering = name in ("cuCtxGetCurrent", "cuCtxPushCurrent")
            if not entering and not (driver.finalizing and name == "cuDevicePrimaryCtxRetain"):
                assert (driver.live["modules"], driver.allocated) == (0, {}), where


def test_an_array_that_outlives_its_library(cuda_tree: Path) -> None:
    driver = FailingDriver()
    device = CudaDevice(0, driver)
    with kiln.load(cuda_tree, device):
        array = DeviceArray(device, (4,), "f32", 0)
    assert driver.live["contexts"] == 0
    del array
    assert (driver.live["contexts"], driver.allocated) == (0, {})


def test_no_device_is_told_as_such(cuda_tree: Path) -> None:
    for code in (34, 100):
        with pytest.raises(UnavailableError, match="CUDA cannot be used here"):
            on_cuda(cuda_tree, FailingDriver(0, code), True)
