"""The extension answers as Python does: the same launches to the byte, results, counters and errors; and it
keeps nothing that it should not."""

import ctypes
import gc
import os
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import fastcall, proof
from kiln.runtime.arrays import view
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.operation import Operation
from kiln.tests.runtime.exchange import (
    STREAM,
    TABLE,
    Exchange,
    Exchanged,
    Hooks,
    Strided,
    Wide,
    capsule,
    new_capsule,
    stand_in,
)
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver
from kiln.tests.runtime.test_cuda import CudaArray, Tensor, entry
from kiln.tests.runtime.test_cuda import tree as cuda_tree
from kiln.tests.runtime.trees import value

Call = Callable[[Any], Any]
X, OUT = Exchanged((2, 32)), Exchanged((2, 32), ptr=9 << 20)
PARAMETERS = 8


class Ways:
    """The same library twice, on a driver each: one whose calls C answers, and one without the extension."""

    def __init__(self, root: Path) -> None:
        self.drivers = {"c": FakeDriver(), "python": FakeDriver()}
        for driver in self.drivers.values():
            driver.stack = [0xC0]
        self.libs = {"c": kiln.load(root, CudaDevice(0, self.drivers["c"]))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fastcall, "native", lambda: fastcall.Native(None, "switched off by a test"))
            self.libs["python"] = kiln.load(root, CudaDevice(0, self.drivers["python"]))

    def both(self, call: Call) -> Any:
        """What a call gives and launches, the same either way."""
        c, python = (self.observed(way, call) for way in ("c", "python"))
        assert c == python
        return c

    def observed(self, way: str, call: Call) -> tuple[Any, ...]:
        """(result or error, launches, counters)."""
        driver, lib = self.drivers[way], self.libs[way]
        before = len(driver.launches)
        try:
            found: Any = described(call(lib))
        except kiln.KilnError as e:
            found = type(e), str(e)
        # Of a launch that failed, Python has let the parameters go.
        made = driver.launches[before:]
        return found, made and [launched(x) for x in made if not driver.fail] + [len(made)], lib.stats()

    @property
    def by_c(self) -> int:
        """Launches that did not go through Python."""
        return self.drivers["c"].launched_by_c


def described(array: Any) -> Any:
    return type(array), array.shape, array.dtype, array.data_ptr()


def launched(launch: Any) -> Any:
    """Everything that the driver is given, parameters as bytes."""
    config = vars(launch["config"]).copy()
    attributes = [(a.id, vars(a.value.clusterDim) if a.id == 4 else None) for a in config.pop("attrs")]
    table = (ctypes.c_uint64 * PARAMETERS).from_address(launch["params"])
    return config, attributes, launch["function"], [ctypes.string_at(p, 8) for p in table]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two variants by alignment; the fast one with every attribute that a launch may have."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    monkeypatch.setitem(sys.modules, "torch", stand_in())
    launch = {"pdl": True, "cooperative": True}
    fast = entry("aligned", dtype="bf16", tier="fast", cluster=[2, 1, 1], launch=launch, shared_bytes=512)
    fast["params"] = [value("seed", ["arg", "seed"]) if p["name"] == "shifted" else p for p in fast["params"]]
    single = entry("single", dtype="f32")
    return cuda_tree(tmp_path, fast, entry("plain", align=2, dtype="bf16"), single)


@pytest.fixture
def ways(root: Path) -> Iterator[Ways]:
    found = Ways(root)
    for x in (X, Wide((2, 32), 64)):
        view(x)
        fastcall.meet(fastcall.native().module, x)
    yield found
    Hooks.before_read, Hooks.fails = None, False
    for lib in found.libs.values():
        lib.close()


GOOD: dict[str, tuple[Call, bool]] = {
    "position": (lambda lib: lib.negate(X), True),
    "name": (lambda lib: lib.negate(x=X), True),
    "out=": (lambda lib: lib.negate(X, out=OUT), True),
    "out=(...)": (lambda lib: lib.negate(X, out=(OUT,)), True),
    "out=None": (lambda lib: lib.negate(X, out=None, stream=None), True),
    "eps=": (lambda lib: lib.negate(X, eps=0.25), True),
    "eps by position": (lambda lib: lib.negate(X, 0.25, out=OUT), True),
    "eps=-0.0": (lambda lib: lib.negate(X, eps=-0.0, out=OUT), True),
    "eps=nan": (lambda lib: lib.negate(X, eps=float("nan"), out=OUT), False),
    "eps=inf": (lambda lib: lib.negate(X, eps=float("inf"), out=OUT), False),
    "eps=1": (lambda lib: lib.negate(X, eps=1, out=OUT), False),
    "eps=float32": (lambda lib: lib.negate(X, eps=np.float32(0.5), out=OUT), False),
    "seed=": (lambda lib: lib.negate(X, seed=-(1 << 63), out=OUT), True),
    # What is computed from a scalar is Python's to compute.
    "seed + 5": (lambda lib: lib.negate(Exchanged((2, 32), ptr=(7 << 20) + 2), seed=7, out=OUT), False),
    "stream=5": (lambda lib: lib.negate(X, out=OUT, stream=5), True),
    "stream object": (lambda lib: lib.negate(X, out=OUT, stream=SimpleNamespace(cuda_stream=6)), True),
    "other address": (lambda lib: lib.negate(Exchanged((2, 32), ptr=7 << 20), out=OUT), True),
    "other alignment": (lambda lib: lib.negate(Exchanged((2, 32), ptr=(7 << 20) + 2), out=OUT), True),
    "one row": (lambda lib: lib.negate(Exchanged((1, 32)), out=Exchanged((1, 32), ptr=8 << 20)), True),
    "more dims": (lambda lib: lib.negate(Exchanged((2, 3, 32))), True),
    "wider rows": (lambda lib: lib.negate(Wide((2, 32), 64), out=OUT), True),
    "still wider rows": (lambda lib: lib.negate(Wide((2, 32), 96), out=OUT), True),
    "float32": (lambda lib: lib.negate(Exchanged((2, 32), dtype="float32")), True),
    "no rows": (lambda lib: lib.negate(Exchanged((0, 32)), out=Exchanged((0, 32), ptr=8 << 20)), False),
    "no table": (lambda lib: lib.negate(Tensor((2, 32))), False),
    "a type that derives": (lambda lib: lib.negate(Strided((2, 32)), out=OUT), False),
    "a variant by name": (lambda lib: lib.negate(X, out=OUT, variant="plain"), False),
}


@pytest.mark.parametrize("name", GOOD)
def test_launches_are_the_same_to_the_byte(ways: Ways, name: str) -> None:
    call, in_c = GOOD[name]
    for turn in range(5):
        before = ways.by_c
        found, launches, _ = ways.both(call)
        assert type(found[0]) is type
        assert ways.by_c - before == (1 if in_c and turn > 1 else 0)
        assert launches[-1:] == ([] if name == "no rows" else [1])


@pytest.mark.parametrize(("seed", "in_c"), [(-(1 << 31), True), (1 << 31, False)])
def test_a_scalar_that_its_parameter_does_not_hold(root: Path, tmp_path: Path, seed: int, in_c: bool) -> None:
    narrow = entry("narrow", dtype="bf16")
    low = value("seed", ["arg", "seed"], "i32")
    narrow["params"] = [low if p["name"] == "shifted" else p for p in narrow["params"]]
    ways = Ways(cuda_tree(tmp_path / "narrow", narrow))
    for _ in range(4):
        ways.both(lambda lib: lib.negate(X, seed=5, out=OUT))
    before = ways.by_c
    found, _, _ = ways.both(lambda lib: lib.negate(X, seed=seed, out=OUT))
    assert (ways.by_c - before, found[0] is Exchanged) == (int(in_c), in_c)


def test_calls_of_all_kinds_after_each_other(ways: Ways) -> None:
    for _ in range(4):
        for call, _ in GOOD.values():
            ways.both(call)
    assert ways.by_c > len(GOOD)


BAD: dict[str, Call] = {
    "nothing": lambda lib: lib.negate(),
    "too many": lambda lib: lib.negate(X, 0.5, 1, 2),
    "twice": lambda lib: lib.negate(X, x=X),
    "unknown name": lambda lib: lib.negate(X, y=X),
    "None": lambda lib: lib.negate(None),
    "no array": lambda lib: lib.negate(3),
    "no array to write": lambda lib: lib.negate(X, out=3),
    "a list of outputs": lambda lib: lib.negate(X, out=[3]),
    "too many outputs": lambda lib: lib.negate(X, out=(OUT, OUT)),
    "null address": lambda lib: lib.negate(Exchanged((2, 32), ptr=0)),
    "CPU": lambda lib: lib.negate(Exchanged((2, 32), device="cpu")),
    "another device": lambda lib: lib.negate(Tensor((2, 32), device="meta")),
    "type": lambda lib: lib.negate(Exchanged((2, 32), dtype="float16")),
    "types": lambda lib: lib.negate(Exchanged((2, 32), dtype="float32"), out=OUT),
    "shape of out": lambda lib: lib.negate(X, out=Exchanged((3, 32), ptr=9 << 20)),
    "in place": lambda lib: lib.negate(X, out=X),
    "overlap": lambda lib: lib.negate(X, out=Exchanged((2, 32), ptr=(1 << 20) + 32)),
    "alignment": lambda lib: lib.negate(Exchanged((2, 32), ptr=(1 << 20) + 1), out=OUT),
    "eps": lambda lib: lib.negate(X, eps="1", out=OUT),
    "eps out of range": lambda lib: lib.negate(X, eps=1e39, out=OUT),
    "seed": lambda lib: lib.negate(X, seed=True, out=OUT),
    "seed out of range": lambda lib: lib.negate(X, seed=1 << 63, out=OUT),
    "stream": lambda lib: lib.negate(X, stream="x"),
    "mode": lambda lib: lib.negate(X, mode="x"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_the_same_to_the_letter(ways: Ways, name: str) -> None:
    for _ in range(3):
        for call, _ in GOOD.values():
            ways.both(call)
        found, launches, _ = ways.both(BAD[name])
        assert issubclass(found[0], kiln.KilnError)
        assert launches == []


@pytest.mark.parametrize("stream", [-1, 1 << 64])
def test_a_stream_that_is_no_handle_is_pythons(ways: Ways, stream: int) -> None:
    for _ in range(3):
        ways.both(lambda lib: lib.negate(X, out=OUT, stream=4))
    before = ways.by_c
    ways.both(lambda lib: lib.negate(X, out=OUT, stream=stream))
    assert ways.by_c == before


@pytest.mark.parametrize("code", [CUresult.CUDA_ERROR_INVALID_VALUE, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS])
@pytest.mark.parametrize("bound", [False, True])
def test_a_status_is_the_same_error_and_one_launch(ways: Ways, code: CUresult, bound: bool) -> None:
    for _ in range(3):
        ways.both(lambda lib: lib.negate(X, out=OUT))
    for driver in ways.drivers.values():
        driver.fail["cuLaunchKernelEx"] = code
    found, launches, _ = ways.both(
        lambda lib: lib.negate.bind(X, out=OUT)() if bound else lib.negate(X, out=OUT)
    )
    assert issubclass(found[0], kiln.DriverError)
    assert "negate.aligned: cuLaunchKernelEx returned" in found[1]
    assert launches == [1]


@pytest.mark.parametrize("stack", [[0], [0xBAD]])
def test_without_the_context_python_launches(ways: Ways, stack: list[int]) -> None:
    for driver in ways.drivers.values():
        driver.stack = stack.copy()
    bound = {way: lib.negate.bind(X, out=OUT) for way, lib in ways.libs.items()}
    for turn in range(4):
        found, launches, counted = ways.both(lambda lib: lib.negate(X, out=OUT))
        assert (launches[-1], counted["negate"]["aligned"]) == (1, 2 * turn + 1)
        ways.both(lambda lib: bound["c" if lib is ways.libs["c"] else "python"]())
        assert [d.stack for d in ways.drivers.values()] == [stack, stack]
    for lib in ways.libs.values():
        lib.close()
    found, launches, _ = ways.both(lambda lib: lib.negate(X, out=OUT))
    assert "was closed" in found[1]


def test_bound_calls(ways: Ways) -> None:
    bound = {way: lib.negate.bind(X, eps=0.5, seed=9, out=OUT) for way, lib in ways.libs.items()}

    def of(lib: Any) -> Any:
        return bound["c" if lib is ways.libs["c"] else "python"]

    calls: list[Call] = [
        lambda lib: of(lib)(),
        lambda lib: of(lib)(None),
        lambda lib: of(lib)(5),
        lambda lib: of(lib)(stream=6),
        lambda lib: (of(lib).update(x=Exchanged((2, 32), ptr=5 << 20)), of(lib)())[1],
        lambda lib: (of(lib).update(out=Exchanged((2, 32), ptr=6 << 20)), of(lib)())[1],
    ]
    for call in calls * 2:
        before = ways.by_c
        assert ways.both(call)[1][-1] == 1
        assert ways.by_c == before + 1
    for wrong in ({"stream": None, "y": 1}, {"out": OUT}):
        with pytest.raises(TypeError) as c:
            bound["c"](**wrong)
        with pytest.raises(TypeError) as python:
            bound["python"](**wrong)
        assert str(c.value) == str(python.value)
    with pytest.raises(TypeError, match="multiple values"):
        bound["c"](*[None], **{"stream": None})
    found, _, _ = ways.both(lambda lib: of(lib)("x"))
    assert "stream of type str" in found[1]


def test_a_call_that_its_framework_does_not_describe_is_pythons(ways: Ways) -> None:
    for _ in range(3):
        ways.both(lambda lib: lib.negate(X))
    Hooks.fails = True
    before = ways.by_c
    ways.both(lambda lib: lib.negate(X))
    assert ways.by_c == before


@pytest.mark.parametrize("major", [0, 2])
def test_tables_of_other_versions(major: int) -> None:
    table = Exchange(major, 0, None, TABLE.managed, TABLE.read, TABLE.stream)
    module = fastcall.native().module
    assert not module.register_exchange(type("T", (), {}), capsule(table))
    table.older = ctypes.addressof(TABLE)
    assert bool(module.register_exchange(type("T", (), {}), capsule(table))) is (major == 2)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        module.register_exchange(type("T", (), {}), new_capsule(ctypes.addressof(table), None, None))


def test_everything_is_forgotten_under_a_running_call(ways: Ways) -> None:
    """Another thread may seal, or disable a name, at any moment that a call lets others run."""
    lib = ways.libs["c"]
    for _ in range(4):
        ways.both(lambda lib: lib.negate(X))
    torch: Any = sys.modules["torch"]
    plain = torch.empty_like
    before = ways.by_c

    def forgets(x: Any = None) -> Any:
        lib.disable("nothing")
        return None if x is None else plain(x)

    torch.empty_like = Hooks.before_read = forgets
    for _ in range(4):
        assert described(lib.negate(X)) == described(X.new_empty((2, 32), "bfloat16"))
    Hooks.before_read = None
    # The first of them ended with what it had found.
    assert ways.by_c == before + 1
    for _ in range(4):
        assert lib.negate(X, out=OUT) is OUT
    assert ways.by_c > before


def test_what_was_decided_before_a_name_was_disabled_is_not_learned(ways: Ways) -> None:
    lib = ways.libs["c"]
    torch: Any = sys.modules["torch"]
    plain = torch.empty_like
    lib.negate(Exchanged((5, 32)))

    def disables(x: Any) -> Any:
        # As another thread may, while this call is under way: decided, and not yet learned.
        torch.empty_like = plain
        lib.disable("aligned")
        lib.negate(X)
        return plain(x)

    torch.empty_like = disables
    lib.negate(X)
    before = lib.stats()["negate"]
    for _ in range(4):
        lib.negate(X)
    assert lib.stats()["negate"] == {**before, "plain": before["plain"] + 4}


def test_everything_is_forgotten_by_another_thread(tree: Path) -> None:
    with kiln.load(tree, threads=1) as lib:
        arrays = [np.full((3, 5), n, np.float32) for n in range(4)]
        wrong: list[Any] = []
        done = threading.Event()

        def run(x: Any) -> None:
            out = np.empty_like(x)
            while not done.is_set():
                for found in (lib.negate(x), lib.negate(x, out=out), lib.scale_add(x, x, alpha=-2.0)):
                    if not np.array_equal(found, -x):
                        wrong.append(found)

        threads = [threading.Thread(target=run, args=(x,)) for x in arrays]
        for t in threads:
            t.start()
        for _ in range(300):
            lib.disable("nothing")
            time.sleep(0.001)
        done.set()
        for t in threads:
            t.join()
        assert wrong == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_launches_nothing(ways: Ways) -> None:
    lib, driver = ways.libs["c"], ways.drivers["c"]
    bound = lib.negate.bind(X, out=OUT)
    for _ in range(4):
        lib.negate(X, out=OUT)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls: list[Callable[[], Any]] = [bound, lambda: lib.negate(X, out=OUT)]
        for call in calls:
            try:
                call()
            except kiln.UnavailableError as e:
                os.write(write, f"{e} {driver.launched_by_c}\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 4096).decode().splitlines()
    assert len(said) == 2
    assert all("before the process was forked" in s and s.endswith(f" {ways.by_c}") for s in said)


def test_layouts_are_bounded(ways: Ways) -> None:
    lib = ways.libs["c"]
    for _ in range(2):
        for rows in range(1, 5000):
            lib.negate(Exchanged((rows, 32)), out=Exchanged((rows, 32), ptr=1 << 40))
    before = ways.by_c
    lib.negate(Exchanged((4999, 32)), out=Exchanged((4999, 32), ptr=1 << 40))
    assert ways.by_c == before + 1
    # Each layout that is known holds its launcher's counter; 4096 are kept, then all start over.
    assert 900 < sys.getrefcount(lib.negate.counts["aligned"]) < 4096 + 1000


def traced() -> int:
    """Bytes that are held, but for what a thread of pytest-xdist holds of its messages."""
    others = [tracemalloc.Filter(False, f"*/{package}/*") for package in ("execnet", "xdist")]
    found = tracemalloc.take_snapshot().filter_traces(others)
    return sum(trace.size for trace in found.traces)


def test_nothing_is_kept(ways: Ways) -> None:
    lib, eps = ways.libs["c"], 0.123
    bound = lib.negate.bind(X, out=OUT)
    calls: list[Callable[[], Any]] = [
        bound,
        lambda: lib.negate(X, out=OUT),
        lambda: lib.negate(X, out=(OUT,)),
        lambda: lib.negate(X, eps=eps),
        lambda: lib.negate(X, out=OUT, stream=5),
        lambda: updated(bound)(),
        lambda: refused(lambda: lib.negate(X, eps="1")),
        lambda: refused(lambda: lib.negate(X, out=3)),
    ]
    held = (X, OUT, eps, None, bound, lib.negate)
    before: list[int] = []
    size = 0
    tracemalloc.start()
    for turn in range(4):
        for call in calls:
            for _ in range(300):
                call()
        for _ in range(300):
            lib.disable("nothing")
            for _ in range(3):
                lib.negate(X)
        ways.drivers["c"].launches.clear()
        ways.drivers["c"].log.clear()
        gc.collect()
        now = [sys.getrefcount(x) for x in held if x is not None]
        if turn > 1:
            assert now == before
            assert abs(traced() - size) < 4_000
        before, size = now, traced()
    tracemalloc.stop()
    assert ways.by_c > 3000


def updated(bound: kiln.BoundCall) -> kiln.BoundCall:
    bound.update(x=X)
    return bound


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(kiln.KilnError):
        call()


def test_an_op_that_nobody_holds_goes(root: Path) -> None:
    lib = kiln.load(root, CudaDevice(0, FakeDriver()))
    bound = lib.negate.bind(X, out=OUT)
    for _ in range(4):
        lib.negate(X)
        bound()
    gone = weakref.ref(lib.negate), weakref.ref(bound)
    lib.close()
    del lib, bound
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_current_streams_are_asked_for_at_each_call(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        config = ways.both(lambda lib: lib.negate(X))[1][0][0]
        assert config["hStream"] == STREAM
    monkeypatch.setattr("kiln.tests.runtime.exchange.STREAM", 0x99)
    assert ways.observed("c", lambda lib: lib.negate(X))[1][0][0]["hStream"] == 0x99


def test_a_layout_first_met_with_other_arrays(ways: Ways) -> None:
    """Arrays that C does not read come first; those that it reads are known soon."""
    for _ in range(3):
        ways.both(lambda lib: lib.negate(Tensor((2, 32)), out=Tensor((2, 32), ptr=9 << 20)))
    for _ in range(3):
        ways.both(lambda lib: lib.negate(X, out=OUT))
    assert ways.by_c > 0
    ways.both(lambda lib: lib.negate(CudaArray((2, 32), typestr="<V2"), out=CudaArray((2, 32), 9 << 20)))


def test_it_can_be_switched_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(kiln.load(root, CudaDevice(0, FakeDriver())).negate, fastcall.native().module.Caller)
    monkeypatch.setenv("KILN_DISABLE", "native")
    assert type(kiln.load(root, CudaDevice(0, FakeDriver())).negate) is Operation


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (("cpython", "linux", [".abi3.so", ".so"], __file__), None),
        (("pypy", "linux", [".so"], __file__), "pypy on linux; the extension is for CPython on Linux"),
        (
            ("cpython", "darwin", [".abi3.so"], __file__),
            "cpython on darwin; the extension is for CPython on Linux",
        ),
        (
            ("cpython", "linux", [".cpython-314t-x86_64-linux-gnu.so", ".so"], __file__),
            "loads no abi3 modules",
        ),
        (("cpython", "linux", [".abi3.so"], "/nowhere/native-mips.so"), "there is no native-mips.so"),
    ],
)
def test_why_there_is_none(found: tuple[Any, ...], why: str | None) -> None:
    said = fastcall.why_not(*found)
    assert said is None if why is None else said is not None and why in said


def test_a_broken_module_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "native.so"
    broken.write_bytes(b"no ELF")
    monkeypatch.setattr(fastcall, "module_path", lambda _: str(broken))
    found = fastcall.native.__wrapped__()
    assert found.module is None
    assert str(found.why).startswith("it cannot be loaded")
