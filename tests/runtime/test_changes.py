"""Changes of providers, disabled names and counting, where calls are remembered, bound or sealed."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import proof
from kiln.runtime.arrays import View
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import ContractError, SelectionError, UnavailableError
from kiln.runtime.load import Library
from kiln.runtime.operation import Operation
from kiln.tests.runtime.fake_driver import FakeDriver
from kiln.tests.runtime.test_cuda import SIG, CudaArray, entry
from kiln.tests.runtime.test_cuda import tree as cuda_tree
from kiln.tests.runtime.trees import OPS, PARAMS, PLAN, dim, kernel, manifest, pointer, write_tree

MiB = 1 << 20
X = np.arange(12, dtype=np.float32).reshape(3, 4)
Fn = Callable[..., Any]


@pytest.fixture
def lib(tree: Path) -> Iterator[kiln.Library]:
    with kiln.load(tree) as library:
        yield library


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops of calls that went the long way."""
    seen: list[str] = []
    real = Operation._long

    def long(self: Operation, *args: Any) -> Any:
        seen.append(self.name)
        return real(self, *args)

    monkeypatch.setattr(Operation, "_long", long)
    return seen


def negates(log: list[str], name: str) -> Fn:
    """A provider of `negate` that notes its name."""

    def fn(x: Any, out: Any) -> None:
        log.append(name)
        np.negative(x, out=out)

    return fn


def learned(lib: kiln.Library, long_ways: list[str]) -> None:
    """Make calls until they take the short way."""
    for _ in range(3):
        lib.negate(X)
    long_ways.clear()
    lib.negate(X)
    assert long_ways == []


def test_a_change_reaches_the_next_call(lib: kiln.Library, long_ways: list[str]) -> None:
    log: list[str] = []
    changes: list[tuple[Callable[[], None], list[str]]] = [
        (lambda: lib.register_provider("negate", "mine", negates(log, "mine")), ["mine"]),
        (lambda: lib.register_provider("negate", "low", negates(log, "low"), priority=5), ["mine"]),
        (lambda: lib.register_provider("negate", "high", negates(log, "high"), priority=200), ["high"]),
        (lambda: lib.disable("high"), ["mine"]),
        (lambda: lib.disable("mine"), ["low"]),
        (lambda: lib.disable("provider"), []),
        (lambda: lib.enable("provider"), ["low"]),
        (lambda: lib.enable("high"), ["high"]),
    ]
    for change, expected in changes:
        learned(lib, long_ways)
        log.clear()
        change()
        assert np.array_equal(lib.negate(X), -X)
        assert (long_ways, log) == (["negate"], expected)


def test_counting_reaches_the_next_call(lib: kiln.Library, long_ways: list[str]) -> None:
    learned(lib, long_ways)
    lib.count_calls()
    for _ in range(4):
        lib.negate(X)
    assert (lib.provider_stats("negate", reset=True).selections, long_ways[0]) == (4, "negate")
    learned(lib, long_ways)
    lib.count_calls(False)
    lib.provider_stats("negate", reset=True)
    for _ in range(4):
        lib.negate(X)
    assert lib.provider_stats("negate").selections == 0


def test_other_capabilities_reach_the_next_call(lib: kiln.Library, long_ways: list[str]) -> None:
    log: list[str] = []
    many = kiln.Capabilities(True, 0, 0, 1000, frozenset())
    fn = negates(log, "mine")
    lib.register_provider("negate", "mine", fn, supports=lambda c: c.unit_count == 1000)
    learned(lib, long_ways)
    assert log == []
    lib.providers.capabilities = many
    lib.negate(X)
    assert log == ["mine"]


def test_a_decline_on_the_short_way(lib: kiln.Library, long_ways: list[str]) -> None:
    log: list[float] = []

    def picky(x: Any, y: Any, out: Any, alpha: float) -> None:
        log.append(alpha)
        if alpha > 1:
            raise kiln.Decline("too large")
        np.add(x * np.float32(alpha), y, out=out)

    lib.register_provider("scale_add", "picky", picky)
    for _ in range(2):
        lib.scale_add(X, X, 0.5)
        lib.scale_add(X, X, 2.0)
    long_ways.clear()
    lib.provider_stats("scale_add", reset=True)
    for alpha in (0.5, 3.0, 1.0, 4.0):
        assert np.array_equal(lib.scale_add(X, X, alpha), X * np.float32(alpha) + X)
    assert (long_ways, log[-4:]) == ([], [0.5, 3.0, 1.0, 4.0])
    stats = lib.provider_stats("scale_add")
    assert (stats.declines, stats.fallbacks, stats.misses) == (2, 2, 0)
    lib.disable("base")
    with pytest.raises(SelectionError, match=r"picky declined \(too large\), and no candidate below"):
        lib.scale_add(X, X, 3.0)
    assert np.array_equal(lib.scale_add(X, X, 0.5), X * np.float32(0.5) + X)


def test_a_change_made_by_a_provider_on_the_short_way(lib: kiln.Library, long_ways: list[str]) -> None:
    log: list[str] = []
    change: list[Callable[[], None]] = []

    def early(x: Any, out: Any) -> None:
        if change:
            change.pop()()
        negates(log, "early")(x, out)

    lib.register_provider("negate", "early", early)
    learned(lib, long_ways)
    change.append(lambda: lib.register_provider("negate", "late", negates(log, "late"), priority=200))
    log.clear()
    for _ in range(3):
        lib.negate(X)
    assert log == ["early", "late", "late"]


def test_a_layout_met_during_a_change_is_not_kept(lib: kiln.Library) -> None:
    log: list[str] = []
    asked: list[kiln.Capabilities] = []

    def meanwhile(c: kiln.Capabilities) -> bool:
        # The change comes when the second layout is decided: the form of the call is known by then.
        asked.append(c)
        if len(asked) == 2:
            lib.register_provider("negate", "late", negates(log, "late"), priority=200)
        return True

    lib.register_provider("negate", "early", negates(log, "early"), supports=meanwhile)
    lib.negate(X)
    for _ in range(3):
        lib.negate(X[:2])
    assert log == ["early", "early", "late", "late"]


def test_threads_meet_a_change_at_once(lib: kiln.Library) -> None:
    """Whoever calls after a change has returned gets it, while others call all the time."""
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        while not stop.is_set():
            if not (np.array_equal(lib.negate(X), -X) and np.array_equal(lib.scale_negate(X, X), -3 * X)):
                wrong.append("bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    asked: dict[int, set[str]] = {}

    def noting(name: str) -> Fn:
        def fn(x: Any, out: Any) -> None:
            asked.setdefault(threading.get_ident(), set()).add(name)
            np.negative(x, out=out)

        return fn

    me = threading.get_ident()
    try:
        for i in range(30):
            lib.register_provider("negate", f"p{i}", noting(f"p{i}"), priority=i + 1)
            for name, operands in (("negate", (X,)), ("scale_negate", (X, X))):
                asked[me] = set()
                lib.op(name)(*operands)
                assert asked[me] == {f"p{i}"}
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert wrong == []


def test_no_plan_keeps_a_step_of_before(lib: kiln.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is called while the change is under way is decided with the steps of after it, whatever the
    order of ops."""
    log: list[str] = []
    lib.scale_negate(X, X)
    everything = Library._everything
    monkeypatch.setattr(
        Library, "_everything", lambda self: sorted(everything(self), key=lambda o: o.name != "scale_negate")
    )
    real = Operation.forget

    def forget(self: Operation) -> None:
        real(self)
        lib.scale_negate(X, X)

    monkeypatch.setattr(Operation, "forget", forget)
    lib.register_provider("negate", "mine", negates(log, "mine"))
    monkeypatch.undo()
    log.clear()
    lib.scale_negate(X, X)
    assert log == ["mine"]


def test_what_is_remembered_keeps_no_array(lib: kiln.Library) -> None:
    log: list[str] = []
    lib.register_provider("negate", "mine", negates(log, "mine"))
    x = X.copy()
    gone = [weakref.ref(x), weakref.ref(lib.negate(x))]
    del x
    gc.collect()
    assert log == ["mine"]
    assert [r() for r in gone] == [None, None]


def test_a_bound_call_keeps_its_provider(lib: kiln.Library) -> None:
    log: list[str] = []
    lib.register_provider("negate", "mine", negates(log, "mine"))
    x, other, out = X.copy(), X + 1, np.empty_like(X)
    bound = lib.bind("negate", x, out=out)
    assert (bound.variant, bound.candidate) == ("mine", lib.providers.of("negate")[0])
    assert bound() is out
    assert np.array_equal(out, -x)
    bound.update(x=other)
    assert np.array_equal(bound(), -other)
    assert (log, lib.stats()) == (["mine"] * 2, {"negate": {"mine": 2}})
    lib.register_provider("negate", "last", negates(log, "last"), priority=-5)
    bound.update(x=x)
    assert np.array_equal(bound(), -x)
    lib.disable("mine")
    with pytest.raises(ContractError, match=r"run negate\.base now, bound is negate\.mine; bind again"):
        bound.update(x=other)
    assert np.array_equal(bound(), -x)
    log.clear()
    lib.negate(x)
    again = lib.bind("negate", x)
    assert (again.variant, log) == ("base", [])
    assert np.array_equal(again(), -x)


def test_a_bound_plan_keeps_the_provider_of_its_step(lib: kiln.Library) -> None:
    log: list[str] = []
    lib.register_provider("negate", "mine", negates(log, "mine"))
    bound = lib.bind("scale_negate", X, X)
    lib.disable("mine")
    assert np.array_equal(bound(), -3 * X)
    assert log == ["mine"]
    assert np.array_equal(lib.scale_negate(X, X), -3 * X)
    assert log == ["mine"]


def test_a_bound_kernel_keeps_running_when_a_provider_comes(lib: kiln.Library) -> None:
    log: list[str] = []
    bound = lib.bind("negate", X)
    lib.register_provider("negate", "mine", negates(log, "mine"))
    assert np.array_equal(bound(), -X)
    assert (bound.variant, log) == ("base", [])
    lib.negate(X)
    assert log == ["mine"]


def test_a_bound_provider_on_operands_in_place(lib: kiln.Library) -> None:
    def accumulate(x: Any, sum: Any, bias: Any) -> None:
        sum += 2 * x

    lib.register_provider("accumulate", "mine", accumulate)
    total, apart = np.zeros_like(X), np.empty_like(X)
    bound = lib.bind("accumulate", X, total)
    assert bound() is total
    bound()
    assert np.array_equal(total, 4 * X)
    bound.update(sum=(other := np.ones_like(X)))
    assert bound() is other
    assert np.array_equal(other, 1 + 2 * X)
    # Written elsewhere: it goes to the kernel below at each launch.
    elsewhere = lib.bind("accumulate", X, total, out=apart)
    for _ in range(2):
        assert np.array_equal(elsewhere(), 5 * X)


def test_a_closed_library_closes_bound_providers(tree: Path) -> None:
    log: list[str] = []
    with kiln.load(tree) as lib:
        lib.register_provider("negate", "mine", negates(log, "mine"))
        bound = lib.bind("negate", X)
        lib.negate(X)
    with pytest.raises(UnavailableError, match="was closed"):
        bound()
    with pytest.raises(UnavailableError, match="was closed"):
        lib.negate(X)
    assert log == ["mine"]


@pytest.fixture
def roots(tmp_path: Path, ops_so: bytes) -> list[Path]:
    """Two roots that both hold `negate`; the second has a plan over its own."""

    def root(name: str, ops: tuple[str, ...], recipes: list[Any]) -> Path:
        document = manifest((kernel(op, "base", PARAMS[op], ops_so) for op in ops), recipes=recipes)
        document["ops"] = {op: OPS[op] for op in (*ops, *(r["op"] for r in recipes))}
        return write_tree(tmp_path / name, {"cpu-x86_64": document}, {"ops.so": ops_so})

    return [root("own", ("gather", "negate"), []), root("pack", ("negate", "scale_add"), [PLAN])]


def test_sealed_over_two_roots(roots: list[Path]) -> None:
    index = np.zeros(3, np.int32)
    with kiln.load(roots) as lib:
        assert lib.prepare(calls=[("scale_negate", {"x": X, "y": X})]) == 4
        assert lib.loaded == ("gather.base", "negate.base", "negate.base", "scale_add.base")
        lib.seal()
        assert np.array_equal(lib.negate(X), -X)
        assert np.array_equal(lib.gather(X, index), X[index])
        assert np.array_equal(lib.scale_negate(X, X), -3 * X)
        assert np.array_equal(lib.bind("scale_negate", X, X)(), -3 * X)
    with kiln.load(roots) as lib:
        # The plan's `negate` is not the one that serves calls.
        assert lib.prepare(["gather", "negate", "scale_add"]) == 3
        lib.seal()
        assert np.array_equal(lib.negate(X), -X)
        with pytest.raises(UnavailableError, match=r"negate\.base is not loaded and the library is sealed"):
            lib.scale_negate(X, X)


def test_scratch_is_reserved_over_two_roots(roots: list[Path]) -> None:
    with kiln.load(roots) as lib:
        size = lib.reserve("scale_negate", X, X)
        assert size == 256
        assert lib.scratch.counters.growths == 1
        lib.seal()
        lib.scale_negate(X, X)
        assert lib.scratch.counters.growths == 1


def test_providers_change_on_a_sealed_library(lib: kiln.Library, long_ways: list[str]) -> None:
    log: list[str] = []
    lib.prepare(["negate"])
    lib.seal()
    learned(lib, long_ways)
    lib.register_provider("negate", "mine", negates(log, "mine"))
    lib.register_provider("scale_add", "none", lambda x, y, out, alpha: kiln.Decline("never"))
    assert np.array_equal(lib.negate(X), -X)
    assert log == ["mine"]
    with pytest.raises(UnavailableError, match=r"scale_add\.base is not loaded and the library is sealed"):
        lib.scale_add(X, X)


def never(x: Any, out: Any, eps: float, seed: int) -> kiln.Decline:
    """A provider of the op on the device that takes no call."""
    return kiln.Decline("never")


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[kiln.Library, FakeDriver]:
    """A kernel that needs scratch and a plan of two calls of it, on a recording driver."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    scratch = [{"name": "tmp", "bytes": ["mul", 4, dim("N")], "align": 256}]
    need = entry("a", scratch=scratch)
    need["params"] = [*need["params"], pointer("scratch:tmp", "write", name="tmp")]
    steps = [
        {"op": "negate", "bind": {"x": "x", "out": "temp:t0"}, "args": {}, "attrs": {}},
        {"op": "negate", "bind": {"x": "temp:t0", "out": "out"}, "args": {}, "attrs": {}},
    ]
    plan = {**PLAN, "op": "twice", "steps": steps}
    ops = {"negate": SIG, "twice": {**SIG, "kind": "recipe"}}
    driver = FakeDriver()
    driver.stack = [0xC0]
    lib = kiln.load(cuda_tree(tmp_path, need, ops=ops, recipes=[plan]), CudaDevice(0, driver))
    return lib, driver


IN, OUT = CudaArray((4, 32)), CudaArray((4, 32), 2 * MiB)


def test_a_provider_gets_the_addresses_and_the_stream_of_its_launch(gpu: Any) -> None:
    lib, driver = gpu
    seen: list[tuple[int, int, int]] = []

    def mine(x: View, out: View, eps: float, seed: int, stream: int) -> None:
        seen.append((x.ptr, out.ptr, stream))

    lib.register_provider("negate", "mine", mine, arrays="view")
    bound = lib.negate.bind(IN, out=OUT, stream=5)
    driver.allowed = set()
    bound()
    bound(stream=6)
    bound.update(x=CudaArray((4, 32), 7 * MiB))
    bound()
    bound(stream=6)
    assert seen == [(MiB, 2 * MiB, 5), (MiB, 2 * MiB, 6), (7 * MiB, 2 * MiB, 5), (7 * MiB, 2 * MiB, 6)]


@pytest.mark.parametrize("counted", [False, True])
def test_reserved_scratch_serves_what_a_provider_declines(gpu: Any, counted: bool) -> None:
    lib, driver = gpu
    lib.count_calls(counted)
    lib.register_provider("negate", "picky", never, arrays="view")
    named = {"x": IN, "out": OUT}
    lib.prepare()
    assert lib.reserve("negate", **named, stream=7) == 256
    assert lib.reserve("twice", **named, stream=9) == 512
    lib.seal()
    driver.allowed = {"cuLaunchKernelEx"}
    for _ in range(3):
        lib.negate(**named, stream=7)
        lib.twice(**named, stream=9)
    lib.twice.bind(**named, stream=9)()
    assert len(driver.launches) == 3 * 1 + 3 * 2 + 2
    with pytest.raises(UnavailableError, match=r"negate\.a needs \d+ bytes of scratch on this stream"):
        lib.negate(**named, stream=8)
    assert lib.scratch.counters.growths == 1 + 2, "a step's kernel has a block of its own"


def test_a_reserve_loads_what_a_provider_may_leave(gpu: Any) -> None:
    lib, _ = gpu
    lib.register_provider("negate", "picky", never, arrays="view")
    assert lib.reserve("negate", IN, out=OUT, stream=7) == 256
    assert lib.loaded == ("negate.a",)
    lib.disable("a")
    assert lib.reserve("negate", IN, out=OUT, stream=7) == 0
