"""Contexts, devices, threads, forks: one library is of one context, and says so where something else is
asked of it."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kiln.runtime as kiln
from kiln.runtime import proof
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import ContextLostError, ContractError, DriverError, UnavailableError
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver, read_params
from kiln.tests.runtime.test_cuda import CudaArray, entry
from kiln.tests.runtime.test_cuda import tree as cuda_tree

X, OUT = CudaArray((4, 32)), CudaArray((4, 32), 2 << 20)
PRIMARY, FOREIGN = 0xC0, 0xF0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one kernel."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    return cuda_tree(tmp_path, entry("a"))


def test_two_contexts_on_one_device(root: Path) -> None:
    driver = FakeDriver()
    primary = kiln.load(root, CudaDevice(0, driver))
    foreign = kiln.load(root, CudaDevice(0, driver, context=FOREIGN))
    for lib, context in ((primary, PRIMARY), (foreign, FOREIGN)):
        lib.negate(X, out=OUT)
        assert driver.launches[-1]["function"].context == context
        assert driver.stack == [0]
    assert driver.names().count("cuModuleLoadData") == 2
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 1
    driver.stack = [FOREIGN]
    before = len(driver.log)
    foreign.negate(X, out=OUT)
    assert [n for n, _ in driver.log[before:]] == ["cuLaunchKernelEx"]
    primary.negate(X, out=OUT)
    assert driver.launches[-1]["function"].context == PRIMARY
    assert driver.stack == [FOREIGN]
    foreign.close()
    assert "cuDevicePrimaryCtxRelease" not in driver.names()
    primary.negate(X, out=OUT)
    primary.close()
    assert driver.names().count("cuDevicePrimaryCtxRelease") == 1
    assert driver.names().count("cuModuleUnload") == 2


def test_two_devices_in_one_process(root: Path) -> None:
    driver = FakeDriver(devices=2)
    libs = [kiln.load(root, CudaDevice(n, driver)) for n in range(2)]
    for lib, context in zip(libs, (0xC0, 0xC1), strict=True):
        lib.negate(X, out=OUT)
        assert driver.launches[-1]["function"].context == context
    away = CudaArray((4, 32))
    away.device = type("D", (), {"id": 0})()  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="x is on cuda:0, expected cuda:1; move it, or load the library"):
        libs[1].negate(away, out=OUT)


def test_a_stream_or_function_of_another_context_is_named(root: Path) -> None:
    driver = FakeDriver()
    driver.stack = [PRIMARY]
    lib = kiln.load(root, CudaDevice(0, driver))
    lib.negate(X, out=OUT)
    driver.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(DriverError, match=r"negate\.a: .* 400 .*of another context"):
        lib.negate(X, out=OUT, stream=0xBAD)
    assert driver.stack == [PRIMARY]


LOST = [
    ("cuLaunchKernelEx", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS),
    ("cuLaunchKernelEx", CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED),
    ("cuLaunchKernelEx", CUresult.CUDA_ERROR_INVALID_CONTEXT),
    ("cuModuleLoadData", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS),
]


@pytest.mark.parametrize(("function", "code"), LOST)
def test_a_lost_context_is_typed_and_close_is_quiet(root: Path, function: str, code: CUresult) -> None:
    driver = FakeDriver()
    lib = kiln.load(root, CudaDevice(0, driver))
    driver.fail[function] = code
    for _ in range(2):
        with pytest.raises(ContextLostError) as e:
            lib.negate(X, out=OUT)
        assert e.value.code == code
    driver.fail["cuModuleUnload"] = driver.fail["cuCtxPushCurrent"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    lib.close()


def test_other_driver_errors_do_not_lose_the_context(root: Path) -> None:
    driver = FakeDriver()
    lib = kiln.load(root, CudaDevice(0, driver))
    driver.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError) as e:
        lib.negate(X, out=OUT)
    assert not isinstance(e.value, ContextLostError)
    del driver.fail["cuLaunchKernelEx"]
    lib.negate(X, out=OUT)
    driver.fail["cuModuleUnload"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError):
        lib.close()


class ThreadedDriver(FakeDriver):
    """Each thread has its own stack of contexts, as with the real driver."""

    def __init__(self) -> None:
        self._local = threading.local()
        super().__init__()

    @property
    def stack(self) -> list[int]:
        """The contexts of this thread."""
        if not hasattr(self._local, "stack"):
            self._local.stack = [0]
        found: list[int] = self._local.stack
        return found

    @stack.setter
    def stack(self, value: list[int]) -> None:
        self._local.stack = value


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads take turns at almost every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
def test_threads_launch_at_once(root: Path) -> None:
    driver = ThreadedDriver()
    lib = kiln.load(root, CudaDevice(0, driver))
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        x, out = CudaArray((4, 32), (number + 1) << 24), CudaArray((4, 32), (number + 1) << 25)
        start.wait()
        try:
            bound = lib.negate.bind(x, seed=number, out=out, stream=number % 2)
            for _ in range(200):
                lib.negate(x, seed=number, out=out, stream=number % 2)
                bound()
        except Exception as e:
            wrong.append(e)
        wrong.extend(driver.stack[1:])

    seen: list[tuple[int, ...]] = []
    real = driver.cuLaunchKernelEx

    def launch(config: Any, function: Any, params: int, extra: int) -> Any:
        values = read_params(params, "QQiqfq")
        result = real(config, function, params, extra)
        if result[0] == 0:
            seen.append((config.hStream, values[0], values[1], values[5]))
        return result

    lib.device.launch = launch  # type: ignore[attr-defined]
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert len(seen) == 8 * 400
    assert set(seen) == {(n % 2, (n + 1) << 24, (n + 1) << 25, n + 5) for n in range(8)}
    assert driver.names().count("cuModuleLoadData") == 1
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_whatever_it_calls(root: Path) -> None:
    driver = FakeDriver()
    lib = kiln.load(root, CudaDevice(0, driver))
    bound = lib.negate.bind(X, out=OUT)
    owned = lib.negate(X)
    for _ in range(3):
        lib.negate(X, out=OUT)
    launched = len(driver.launches)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for call in (lambda: lib.negate(X, out=OUT), bound, lib.prepare, lambda: lib.negate.bind(X)):
            try:
                call()
            except UnavailableError as e:
                os.write(write, b"1" if "before the process was forked" in str(e) else b"0")
        del owned
        lib.close()
        fine = len(driver.launches) == launched and "cuMemFreeAsync" not in driver.names()
        os.write(write, b"quiet" if fine else b"loud")
        os._exit(0)
    os.waitpid(pid, 0)
    # A child may prepare what is loaded: that touches no driver.
    assert os.read(read, 99) == b"111quiet"
    lib.negate(X, out=OUT)
    assert len(driver.launches) == launched + 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_library_of_the_childs_own_works(root: Path) -> None:
    kiln.load(root, CudaDevice(0, FakeDriver())).negate(X, out=OUT)
    pid = os.fork()
    if pid == 0:
        driver = FakeDriver()
        kiln.load(root, CudaDevice(0, driver)).negate(X, out=OUT)
        os._exit(0 if len(driver.launches) == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
