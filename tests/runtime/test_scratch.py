"""Scratch pools: order, growth, capture, poison, the caller's buffer; and that no bit depends on them."""

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import proof
from kiln.runtime.arrays import View
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import ContractError, DriverError, UnavailableError
from kiln.runtime.scratch import GRAIN, Counters, HostMemory, ScratchPolicy, ScratchPool, laid_out
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver, read_params
from kiln.tests.runtime.test_cuda import SIG, CudaArray, entry
from kiln.tests.runtime.test_cuda import tree as cuda_tree
from kiln.tests.runtime.trees import PLAN, dim, pointer

MiB = 1 << 20


class Recorder(HostMemory):
    """Device memory on the host: numbers blocks, notes what is done, can be captured."""

    deferred = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []
        self.captured: set[int] = set()

    def allocate(self, size: int, stream: int, zeroed: bool = False) -> int:
        self.log.append(("allocate zeroed" if zeroed else "allocate", size, stream))
        return super().allocate(size, stream, zeroed)

    def free(self, address: int) -> None:
        self.log.append(("free",))
        super().free(address)

    def synchronize(self, stream: int) -> None:
        self.log.append(("synchronize", stream))

    def fill(self, address: int, size: int, stream: int) -> None:
        self.log.append(("fill", stream))
        super().fill(address, size, stream)

    def capturing(self, stream: int) -> bool:
        return stream in self.captured


def made(policy: ScratchPolicy | None = None) -> tuple[ScratchPool, Recorder]:
    memory = Recorder()
    return ScratchPool(memory, policy or ScratchPolicy()), memory


def use(pool: ScratchPool, size: int, stream: int) -> int:
    """The address of a call's scratch."""
    block = pool.take(size, stream) or pool.grow(size, stream, "op.v")
    pool.put(block)
    assert block.address % 256 == 0
    assert block.size >= size
    return block.address


def test_a_stream_reuses_its_block_and_no_other() -> None:
    pool, memory = made()
    first = use(pool, 1000, 7)
    assert use(pool, GRAIN, 7) == first
    assert use(pool, 1, 8) != first
    assert memory.log == [("allocate", GRAIN, 7), ("allocate", GRAIN, 8)]
    assert pool.counters == Counters(hits=1, growths=2, fills=0, blocks=2, bytes=2 * GRAIN)


def test_calls_that_queue_at_once_get_different_blocks() -> None:
    pool, _ = made()
    a = pool.grow(10, 7, "op.v")
    b = pool.take(10, 7) or pool.grow(10, 7, "op.v")
    assert a.address != b.address
    pool.put(a)
    pool.put(b)
    assert pool.take(10, 7) is not None
    assert pool.take(10, 7) is not None
    assert pool.take(10, 7) is None


def test_an_outgrown_block_is_kept_for_graphs_until_released() -> None:
    pool, memory = made()
    small = use(pool, 10, 7)
    large = use(pool, GRAIN + 1, 7)
    assert small != large
    assert ("free",) not in memory.log
    assert memory.log[-1] == ("allocate", 2 * GRAIN, 7)
    assert use(pool, 10, 7) == large
    pool.release(8)
    assert ("free",) not in memory.log
    assert pool.counters[3:] == (2, 3 * GRAIN)
    pool.release(7)
    assert memory.log[-3:] == [("synchronize", 7), ("free",), ("free",)]
    assert pool.counters[3:] == (0, 0)
    assert use(pool, 10, 7)


def test_host_memory_is_not_retired() -> None:
    memory = HostMemory()
    pool = ScratchPool(memory, ScratchPolicy())
    use(pool, 10, 0)
    use(pool, GRAIN + 1, 0)
    assert len(memory._held) == 1
    pool.close()
    assert not memory._held


def test_growth_while_captured_is_refused_and_harmless() -> None:
    pool, memory = made()
    address = use(pool, 10, 7)
    memory.captured = {7}
    assert use(pool, GRAIN, 7) == address
    with pytest.raises(UnavailableError) as e:
        pool.grow(GRAIN + 1, 7, "op.v")
    assert f"op.v: scratch growth during graph capture: need {GRAIN + 1} bytes, have {GRAIN}" in str(e.value)
    assert use(pool, GRAIN, 7) == address
    with pytest.raises(UnavailableError, match="have 0"):
        ScratchPool(memory, ScratchPolicy()).grow(1, 7, "op.v")
    memory.captured = set()
    assert use(pool, GRAIN + 1, 7) != address


def test_reserve_makes_room_for_threads() -> None:
    pool, memory = made()
    pool.reserve(10, 7, threads=3)
    pool.reserve(20, 7, threads=2)
    pool.reserve(0, 9)
    assert memory.log == [("allocate", GRAIN, 7)] * 3
    assert all(pool.take(10, 7) is not None for _ in range(3))


def test_poison_fills_before_each_use_but_not_into_a_graph() -> None:
    pool, memory = made(ScratchPolicy(poison=True))
    use(pool, 10, 7)
    use(pool, 10, 7)
    assert pool.counters == Counters(hits=1, growths=1, fills=2, blocks=1, bytes=GRAIN)
    memory.captured = {7}
    use(pool, 10, 7)
    assert pool.counters.fills == 2
    memory.captured = set()
    pool.poison(7)
    assert pool.counters.fills == 3
    assert memory.log.count(("fill", 7)) == 3


def test_the_callers_buffer_is_used_and_never_outgrown() -> None:
    pool, memory = made()
    use(pool, 10, 7)
    pool.give(256 * 99, 4096, 7)
    assert use(pool, 4096, 7) == 256 * 99
    with pytest.raises(UnavailableError, match=r"needs 4097 bytes of scratch, the buffer .* has 4096"):
        pool.grow(4097, 7, "op.v")
    held = pool.take(1, 7)
    with pytest.raises(UnavailableError, match="in use by another thread"):
        pool.grow(1, 7, "op.v")
    assert held is not None
    pool.put(held)
    with pytest.raises(ContractError, match="multiple of 256"):
        pool.give(257, 4096, 8)
    pool.release(7)
    assert memory.log.count(("free",)) == 1, "only its own"
    assert use(pool, 10, 7) != 256 * 99


def test_a_block_that_is_out_when_a_buffer_is_given_is_retired() -> None:
    pool, _ = made()
    out = pool.grow(10, 7, "op.v")
    pool.give(256, 4096, 7)
    pool.put(out)
    assert use(pool, 10, 7) == 256


def test_without_a_pool_each_call_allocates() -> None:
    pool, memory = made(ScratchPolicy(pool=False))
    use(pool, 10, 7)
    use(pool, 10, 7)
    assert memory.log == [("allocate", 10, 7), ("free",)] * 2
    pool.reserve(10, 7)
    assert len(memory.log) == 4
    assert pool.counters[3:] == (0, 0)


def test_layout_of_one_block() -> None:
    assert laid_out([]) == ([], 0)
    assert laid_out([1, 256, 257, 0]) == ([0, 256, 512, 1024], 1280)


def test_threads_never_share_a_block() -> None:
    pool, _ = made()
    held: set[int] = set()
    shared = []

    def work() -> None:
        for _ in range(300):
            block = pool.take(64, 7) or pool.grow(64, 7, "op.v")
            if block.address in held:
                shared.append(block)
            held.add(block.address)
            held.discard(block.address)
            pool.put(block)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not shared
    assert pool.counters.growths <= 4


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan of two steps over a temporary, whose kernel needs scratch."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    scratch = [{"name": "tmp", "bytes": ["mul", 4, dim("N")], "align": 256}]
    kernel = entry("a", scratch=scratch)
    kernel["params"] = [*kernel["params"], pointer("scratch:tmp", "write", name="tmp")]
    steps = [
        {"op": "negate", "bind": {"x": "x", "out": "temp:t0"}, "args": {"eps": ["arg", "eps"]}, "attrs": {}},
        {"op": "negate", "bind": {"x": "temp:t0", "out": "out"}, "args": {}, "attrs": {}},
    ]
    plan = {**PLAN, "op": "twice", "steps": steps}
    ops = {"negate": SIG, "twice": {**SIG, "kind": "recipe"}}
    return cuda_tree(tmp_path, kernel, ops=ops, recipes=[plan])


def on(root: Path, driver: FakeDriver, policy: ScratchPolicy | None = None) -> kiln.Library:
    driver.stack = [0xC0]
    return kiln.load(root, CudaDevice(0, driver, scratch=policy))


X, OUT = CudaArray((4, 32)), CudaArray((4, 32), 2 << 20)


def addresses(launch: Any) -> tuple[int, int, int]:
    """x, out and scratch of a launch of the kernel; the launch before may have been overwritten."""
    values = read_params(launch["params"], "QQiqfqQQQ")
    return values[0], values[1], values[8]


def test_a_plan_takes_one_block_for_temporaries_and_scratch(twice: Path) -> None:
    driver = FakeDriver()
    with on(twice, driver) as lib:
        lib.twice(X, out=OUT, eps=0.5, stream=9)
        assert [a for n, a in driver.log if n == "cuMemAllocAsync"] == [(2 * MiB, 9)]
        assert ("cuStreamSynchronize", (9,)) in driver.log
        block = next(iter(driver.allocated))
        x, out, scratch = addresses(driver.launches[-1])
        assert (x, out, scratch) == (block, 2 << 20, block + 512)
        before = len(driver.log)
        for _ in range(4):
            lib.twice(X, out=OUT, eps=0.5, stream=9)
        assert {n for n, _ in driver.log[before:]} == {"cuLaunchKernelEx"}
        assert lib.scratch.counters == Counters(hits=4, growths=1, fills=0, blocks=1, bytes=2 * MiB)
        assert lib.stats() == {"twice": {"composite": 5}, "negate": {"a": 10}}
        lib.negate(X, out=OUT, stream=10)
        assert len(driver.allocated) == 2
    assert driver.allocated == {}


def test_each_step_gets_its_scalars(twice: Path) -> None:
    driver = FakeDriver()
    lib = on(twice, driver)
    seen: list[Any] = []
    real = driver.cuLaunchKernelEx

    def launch(config: Any, function: Any, params: int, extra: int) -> Any:
        seen.append(read_params(params, "QQiqfq")[4:])
        return real(config, function, params, extra)

    lib.device.launch = launch  # type: ignore[attr-defined]
    for eps in (0.5, 0.25, 0.25):
        lib.twice(X, out=OUT, eps=eps)
    default = pytest.approx(1e-6)
    assert [eps for eps, _ in seen] == [0.5, default, 0.25, default, 0.25, default]


def test_sealed_plans_need_reserved_scratch(twice: Path) -> None:
    driver = FakeDriver()
    lib = on(twice, driver)
    lib.prepare(calls=[("twice", {"x": X, "out": OUT})], stream=9)
    lib.seal()
    driver.allowed = {"cuLaunchKernelEx"}
    lib.twice(X, out=OUT, stream=9)
    lib.twice.bind(X, out=OUT, stream=9)()
    why = r"twice\.composite needs 768 bytes of scratch"
    with pytest.raises(UnavailableError, match=why):
        lib.twice(X, out=OUT, stream=10)
    with pytest.raises(UnavailableError, match=why):
        lib.twice.bind(X, out=OUT, stream=9)(stream=10)
    big = CudaArray((20000, 32)), CudaArray((20000, 32), 1 << 28)
    with pytest.raises(UnavailableError, match="and the library is sealed"):
        lib.twice(big[0], out=big[1], stream=9)


def test_growth_in_a_capture_names_the_plan(twice: Path) -> None:
    driver = FakeDriver()
    lib = on(twice, driver)
    lib.prepare()
    driver.capturing = {9}
    with pytest.raises(UnavailableError, match=r"twice\.composite: scratch growth during graph capture"):
        lib.twice(X, out=OUT, stream=9)
    assert driver.allocated == {}


def test_pool_off_allocates_in_stream_order_and_gives_back(twice: Path) -> None:
    driver = FakeDriver()
    lib = on(twice, driver, ScratchPolicy(pool=False))
    driver.capturing = {9}
    lib.prepare()
    lib.twice(X, out=OUT, stream=9)
    assert [a for n, a in driver.log if n == "cuMemAllocAsync"] == [(768, 9)]
    assert driver.allocated == {}
    driver.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="1 CUDA_ERROR_INVALID_VALUE"):
        lib.twice(X, out=OUT, stream=9)
    assert driver.allocated == {}


def test_no_memory_is_an_error_and_leaves_nothing(twice: Path) -> None:
    driver = FakeDriver()
    lib = on(twice, driver)
    driver.fail["cuMemAllocAsync"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DriverError, match="out of memory"):
        lib.twice(X, out=OUT)
    del driver.fail["cuMemAllocAsync"]
    lib.twice(X, out=OUT)
    assert lib.scratch.counters.growths == 1


def test_the_callers_buffer_serves_a_plan(twice: Path) -> None:
    driver = FakeDriver()
    lib = on(twice, driver)
    lib.set_scratch(View(1 << 30, (768,), (1,), "u8", 0, False, None), stream=9)
    lib.twice(X, out=OUT, stream=9)
    assert addresses(driver.launches[-1]) == (1 << 30, 2 << 20, (1 << 30) + 512)
    assert driver.allocated == {}


def test_a_stream_that_is_each_threads_own_has_no_scratch(
    twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One handle, but a block would pass from one thread's stream to another's."""
    driver = FakeDriver()
    lib = on(twice, driver)
    buffer = View(1 << 30, (768,), (1,), "u8", 0, False, None)
    why = "found stream {}, which is another one in each thread; scratch is handed on along one stream"
    with pytest.raises(UnavailableError, match=why.format(2)):
        lib.twice(X, out=OUT, stream=2)
    with pytest.raises(UnavailableError, match=why.format(2)):
        lib.set_scratch(buffer, stream=2)
    with pytest.raises(UnavailableError, match=why.format(2)):
        lib.twice.reserve(X, out=OUT, stream=2)
    assert driver.allocated == {}
    lib.negate(X, out=OUT, variant="a", stream=0)
    monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    with pytest.raises(UnavailableError, match=why.format(0)):
        lib.twice.reserve(CudaArray((20000, 32)), out=CudaArray((20000, 32), 1 << 28), stream=0)
    apart = on(twice, FakeDriver(), ScratchPolicy(pool=False))
    apart.twice(X, out=OUT, stream=2)


BUFFERS = {
    "CPU": np.zeros(768, np.uint8),
    "strided": View(1 << 30, (768,), (2,), "u8", 0, False, None),
    "read-only": View(1 << 30, (768,), (1,), "u8", 0, True, None),
    "another device": View(1 << 30, (768,), (1,), "u8", 1, False, None),
    "misaligned": View((1 << 30) + 64, (768,), (1,), "u8", 0, False, None),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_will_not_do(twice: Path, name: str) -> None:
    lib = on(twice, FakeDriver())
    with pytest.raises(ContractError, match=r"expected a (dense one|multiple of 256)"):
        lib.set_scratch(BUFFERS[name], stream=9)
    lib.twice(X, out=OUT, stream=9)


POLICIES = {
    "pooled": ScratchPolicy(),
    "poisoned": ScratchPolicy(poison=True),
    "no pool": ScratchPolicy(pool=False),
    "no pool, poisoned": ScratchPolicy(pool=False, poison=True),
}


@pytest.mark.parametrize("name", POLICIES)
def test_no_bit_depends_on_the_pool(tree: Path, name: str) -> None:
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((5, 40)).astype(np.float32) for _ in range(2))
    with kiln.load(tree, scratch=POLICIES[name]) as lib:
        for rows in (5, 3, 5):
            expected = -(x[:rows] * np.float32(2) + y[:rows])
            assert np.array_equal(lib.scale_negate(x[:rows], y[:rows]), expected)
        fills = lib.scratch.counters.fills
        assert fills == (3 if POLICIES[name].poison else 0)


def test_poison_reaches_what_a_plan_reads(tree: Path) -> None:
    """A step that reads its temporary before it is written meets NaN: the poison is there."""
    with kiln.load(tree, scratch=ScratchPolicy(poison=True)) as lib:
        x = np.ones((2, 3), np.float32)
        lib.scale_negate(x, x)
        block = lib.scratch.take(1, 0)
        assert block is not None
        seen = np.ctypeslib.as_array((ctypes.c_uint8 * block.size).from_address(block.address))
        assert (seen == 0xFF).all()
