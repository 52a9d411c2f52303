"""libkiln against a recording driver: launches as the Python runtime makes them, contexts, capture,
scratch."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kiln.runtime as kiln
from kiln.backends.cuda.backend import CudaBackend
from kiln.runtime.arrays import View, contiguous
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import ContractError, DriverError, SelectionError, TargetError, UnavailableError
from kiln.runtime.manifest import parse_manifest
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.derived import cases
from kiln.tests.runtime.c.fake import (
    FakeCuda,
    RecordingDriver,
    part_of_tree,
    without_addresses_of_temporaries,
)
from kiln.tests.support.committed import build_from
from kiln.tools.cases import arguments, views

TREE = Path(__file__).parents[3] / "aot_artifacts"
BASE = 1 << 40


class Fake(FakeCuda):
    """With a tree of the few ops that most tests call: loading the committed one takes 0.7 s."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.few = folder / "few"
        ops = ("rms_norm", "layer_norm", "fused_add_rms_norm", "silu_mul_quant_fp8")
        build_from(self.few, ["sm_90a"], ops, [CudaBackend()])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    fake = Fake(tmp_path_factory.mktemp("cuda"))
    fake.know(TREE, parse_manifest((TREE / "sm_90a" / "MANIFEST.json").read_bytes()))
    return fake


@pytest.fixture
def fake(loaded: Fake) -> Iterator[Fake]:
    loaded.reset()
    yield loaded
    assert loaded.live() == (0, 0, 0)
    assert loaded.c.fake_depth() == 0


def opened(
    c: ctypes.CDLL, fake: Fake, device: str = "cuda", tree: Path | None = None, **options: Any
) -> libkiln.Library:
    return libkiln.Library(c, tree or fake.few, device, driver_path=fake.path, **options)


def tensor(*shape: int, dtype: str = "bf16", at: int = BASE, device: int = 0) -> View:
    return View(at, shape, contiguous(shape), dtype, device, False, None)


def norm(rows: int = 4, **more: Any) -> dict[str, Any]:
    """Operands of rms_norm."""
    x = {"x": tensor(rows, 256), "weight": tensor(256, at=BASE + (1 << 30)), "eps": 1e-6}
    return {**x, "out": tensor(rows, 256, at=BASE + (2 << 30)), **more}


def fp4(rows: int = 4) -> dict[str, Any]:
    """Operands of an op whose plans need scratch."""
    return {
        "x": tensor(rows, 256),
        "gate": tensor(rows, 256, at=BASE + (1 << 30)),
        "q": tensor(rows, 128, dtype="u8", at=BASE + (2 << 30)),
    }


def test_same_launches(c: ctypes.CDLL, fake: Fake) -> None:
    """Every kernel and plan: entry, grid, block, shared memory, attributes, stream, each parameter."""
    manifest = parse_manifest((TREE / "sm_90a" / "MANIFEST.json").read_bytes())
    driver = RecordingDriver(manifest)
    compared, several = 0, 0
    ran: set[tuple[str, str]] = set()
    with (
        kiln.load(TREE, CudaDevice(0, driver)) as python,
        opened(c, fake, tree=TREE) as library,
    ):
        for case in cases(python, "sm_90a"):
            operation = python.operation("sm_90a", case.op)
            call = arguments(operation.sig, case, views(case, BASE, 0))
            driver.recorded.clear()
            fake.reset()
            operation(**call, stream=0x51)
            library.op(case.op)(**call, stream=0x51)
            expected, found = (
                without_addresses_of_temporaries(launches, BASE, BASE + case.bytes)
                for launches in (driver.recorded, fake.launches())
            )
            assert found == expected, str(case)
            compared += len(found)
            several += len(found) > 1
            ran.update((f.sha256, f.entry) for f in found)
    assert compared > 300
    assert several > 20
    assert len(ran) > 90


def test_selects_and_refuses(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        assert library.rms_norm.explain(**norm()).startswith("rms_norm on cuda:0 (compute capability 9.0):")
        assert "cuDevicePrimaryCtxRetain" not in fake.names()
        host = {**norm(), "x": tensor(4, 256, device=-1)}
        with pytest.raises(ContractError, match="x is on the CPU, expected cuda:0"):
            library.rms_norm(**host)
        with pytest.raises(ContractError, match="x has a null address"):
            library.rms_norm(**norm(x=tensor(4, 256, at=0)))
        with pytest.raises(SelectionError, match="aligned to"):
            library.rms_norm(**norm(x=tensor(4, 256, at=BASE + 1)))
        rows = 1 << 31
        with pytest.raises(SelectionError, match="bf16_p8192: passes M as i32, but it is 2147483648"):
            library.rms_norm(**norm(rows, out=tensor(rows, 256, at=BASE << 1)))
        assert not fake.launches()


@pytest.mark.parametrize(
    ("cc", "version", "why"),
    [
        ((8, 9), 13000, None),
        ((7, 0), 13000, "nothing that cuda:0"),
        ((9, 0), 12080, r"driver supports CUDA 12\.8"),
    ],
)
def test_device_decides_the_target(
    c: ctypes.CDLL, fake: Fake, cc: tuple[int, int], version: int, why: str | None
) -> None:
    fake.c.fake_device(*cc, version, 1, 0)
    if why is not None:
        with pytest.raises(TargetError, match=why):
            opened(c, fake, tree=TREE)
        return
    with opened(c, fake, tree=TREE) as library:
        assert "compute capability 8.9" in library.rms_norm.explain(**norm())


@pytest.mark.parametrize(
    ("grid", "rows", "why"),
    [
        ([1, ["dim", "M"], 1], 65536, "grid axis 1 would be 65536, a device takes 65535; split the call"),
        ([1, 1, ["dim", "M"]], 65536, "grid axis 2 would be 65536, a device takes 65535; split the call"),
        ([["sub", ["dim", "M"], 4], 1, 1], 3, "a grid extent of -1; expected an integer of 0 or more"),
        ([["floordiv", 8, ["sub", ["dim", "M"], 4]], 1, 1], 4, r"\(8 // \(M - 4\)\) divides by zero"),
        ([["mul", ["dim", "M"], 1 << 62], 1, 1], 4, "leaves the range of 64-bit integers"),
    ],
)
def test_grids_are_checked_before_the_driver_sees_them(
    c: ctypes.CDLL, fake: Fake, tmp_path: Path, grid: Any, rows: int, why: str
) -> None:
    root = part_of_tree(tmp_path, TREE, "rms_norm", grid=grid)
    with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
        with pytest.raises(ContractError, match=why):
            library.rms_norm(**norm(rows))
        assert not fake.launches()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_empty_grid_launches_nothing(c: ctypes.CDLL, fake: Fake, tmp_path: Path, axis: int) -> None:
    grid: list[Any] = [1, 1, 1]
    grid[axis] = ["sub", ["dim", "M"], 4]
    root = part_of_tree(tmp_path, TREE, "rms_norm", grid=grid)
    with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
        for _ in range(2):  # nobody would write the output
            with pytest.raises(ContractError, match=r"the grid of .* is 0 and nothing would be computed"):
                library.rms_norm(**norm(4))
        assert not fake.launches()
        library.rms_norm(**norm(5))
        assert [launch.grid for launch in fake.launches()] == [(1, 1, 1)]


def test_launch_attributes(c: ctypes.CDLL, fake: Fake, tmp_path: Path) -> None:
    changed = {"cluster": [2, 1, 1], "launch": {"pdl": True, "cooperative": True}, "shared_bytes": 100_000}
    root = part_of_tree(tmp_path, TREE, "rms_norm", **changed)
    with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
        library.rms_norm(**norm(4))
        assert "cuFuncSetAttribute" in fake.names()
        launch = fake.launches()[0]
        assert launch.attributes == ((4, 2, 1, 1), (6, 1, 0, 0), (2, 1, 0, 0))
        assert launch.shared == 100_000
    too_much = part_of_tree(tmp_path / "b", TREE, "rms_norm", shared_bytes=232_449)
    with libkiln.Library(c, too_much, "cuda", driver_path=fake.path) as library:
        with pytest.raises(
            SelectionError, match=r"needs \d+ bytes of shared memory, the device allows 232448"
        ):
            library.rms_norm(**norm(4))


def test_no_driver_no_device(c: ctypes.CDLL, fake: Fake) -> None:
    with pytest.raises(UnavailableError, match="no CUDA driver on this machine"):
        libkiln.Library(c, TREE, "cuda", driver_path="/nonexistent/libcuda.so.1")
    with pytest.raises(UnavailableError, match="has no cuInit; expected the driver"):
        libkiln.Library(c, TREE, "cuda", driver_path="libm.so.6")
    with pytest.raises(UnavailableError, match="found 1 CUDA devices, expected one with ordinal 3"):
        opened(c, fake, "cuda:3")
    fake.c.fake_fail_named(b"cuInit", 100)
    with pytest.raises(UnavailableError, match=r"CUDA cannot be used here.*no NVIDIA device"):
        opened(c, fake)
    fake.c.fake_fail_named(b"cuInit", 3)
    with pytest.raises(DriverError, match="start workers with spawn"):
        opened(c, fake)


def test_zero_rows_launch_nothing(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        library.seal()
        library.rms_norm(**norm(0))
        call = library.rms_norm.bind(**norm(0))
        call.launch()
        assert call.variant == ""
        call.free()
        assert not fake.launches()


def test_a_sealed_library_only_launches(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        assert library.prepare(["rms_norm"]) > 5
        bound = library.rms_norm.bind(**norm())
        library.seal()
        fake.reset()
        bound.launch(0x51)
        assert fake.names() == [
            "cuCtxGetCurrent",
            "cuCtxPushCurrent_v2",
            "cuLaunchKernelEx",
            "cuCtxPopCurrent_v2",
        ]
        fake.c.fake_push(0)
        fake.reset()
        bound.launch(0x51)
        assert fake.names() == ["cuCtxGetCurrent", "cuLaunchKernelEx"]
        for rows in (1, 7, 130):  # shapes that it never saw
            fake.reset()
            library.rms_norm(**norm(rows), stream=5)
            assert set(fake.names()) == {"cuCtxGetCurrent", "cuLaunchKernelEx"}
            assert fake.launches()[0].grid[0] == rows
        fake.reset()
        vectors = {"weight": tensor(256, at=BASE * 2), "bias": tensor(256, at=BASE * 3)}
        with pytest.raises(UnavailableError, match=r"layer_norm\..* is not loaded and the library is sealed"):
            library.layer_norm(x=tensor(4, 256), out=tensor(4, 256, at=BASE * 4), **vectors)
        assert "cuModuleLoadData" not in fake.names()
        fake.c.fake_pop()
        bound.free()


def test_rebound_addresses_reach_the_kernel(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        call = library.rms_norm.bind(**norm())
        library.seal()
        call.rebind(x=tensor(4, 256, at=BASE * 3), eps=0.5)
        call.launch(7)
        before, after = tensor(4, 256), fake.launches()[-1].params
        assert BASE * 3 in after
        assert before.ptr not in after
        assert 0.5 in after
        with pytest.raises(ContractError, match=r"x is not aligned to 16 bytes, which \w+ needs; bind again"):
            call.rebind(x=tensor(4, 256, at=BASE + 2))
        with pytest.raises(ContractError, match="x has a null address"):
            call.rebind(x=tensor(4, 256, at=0))
        call.launch(7)
        assert fake.launches()[-1].params == after
        call.free()


def test_written_side_is_aligned_too(c: ctypes.CDLL, fake: Fake) -> None:
    """What a variant promises of an in/out operand holds for where it is written, if that is elsewhere."""
    x, vectors = tensor(4, 5120), {"weight": tensor(5120, at=BASE * 2), "eps": 1e-6}
    residual, out = tensor(4, 5120, at=BASE * 3), tensor(4, 5120, at=BASE * 4)
    with opened(c, fake) as library:
        op = library.fused_add_rms_norm
        apart = tensor(4, 5120, at=BASE * 5)
        op(x=x, residual=residual, out=(out, apart), variant="bf16_n5120", **vectors)
        with pytest.raises(SelectionError, match="needs residual aligned to 16 bytes, found it 2 bytes off"):
            op(
                x=x,
                residual=residual,
                out=(out, apart._replace(ptr=BASE * 5 + 2)),
                variant="bf16_n5120",
                **vectors,
            )


def test_loading_during_capture_is_refused(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        fake.c.fake_capture(1)
        with pytest.raises(
            UnavailableError, match=r"rms_norm\..* is not loaded and its stream is being captured"
        ):
            library.rms_norm(**norm(), stream=7)
        assert "cuModuleLoadData" not in fake.names()
        fake.c.fake_capture(0)
        library.prepare(["rms_norm"])
        fake.c.fake_capture(1)
        library.rms_norm(**norm(), stream=7)
        assert len(fake.launches()) == 1


def test_kernels_load_once_per_context(c: ctypes.CDLL, fake: Fake) -> None:
    """The current context if it is of the library's device, else the device's primary one."""
    with opened(c, fake) as library:
        contexts = []
        for current in (None, 0, 2, 2, 1):  # none, the primary, another of device 0 (twice), one of device 1
            if current is not None:
                fake.c.fake_push(current)
            fake.reset()
            library.rms_norm(**norm(), stream=1)
            found = fake.c.fake_launched(ctypes.c_long(0)).contents.context
            contexts.append((found == fake.c.fake_context(2), "cuModuleLoadData" in fake.names()))
            if current is not None:
                fake.c.fake_pop()
        assert contexts == [(False, True), (False, False), (True, True), (True, False), (False, False)]


def scratch_call(library: libkiln.Library, rows: int) -> libkiln.Call:
    """A bound composite call that needs a temporary of `rows` rows."""
    op = library.op("silu_mul_quant_fp8")
    sig = library.signature("silu_mul_quant_fp8")
    operands: dict[str, Any] = {}
    for i, t in enumerate(sig.tensors):
        dtype = t.dtype if isinstance(t.dtype, str) else t.dtype.choices[0]
        shape = {"M": rows, "N": 256}
        sizes = tuple(shape[e[1]] if e[0] == "dim" else 512 for e in t.shape if type(e) is tuple) or (1,)
        operands[t.name] = tensor(*sizes, dtype=dtype, at=BASE + (i << 34))
    outs = tuple(operands.pop(n) for n in sig.returns)
    return op.bind(**operands, out=outs, scale=0.5, tier="composite")


def test_scratch_grows_outside_capture_only(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        small, big = scratch_call(library, 64), scratch_call(library, 1 << 14)
        assert 0 < small.scratch_bytes < 1 << 21 < big.scratch_bytes
        fake.reset()
        small.launch(7)
        assert fake.names().count("cuMemAllocAsync") == 1
        small.launch(7)
        small.launch(8)  # another stream has its own block
        assert fake.names().count("cuMemAllocAsync") == 2
        fake.c.fake_capture(1)
        with pytest.raises(
            UnavailableError,
            match=rf"scratch growth during graph capture: need {big.scratch_bytes} have {1 << 21} bytes",
        ):
            big.launch(7)
        small.launch(7)
        captured = fake.launches()[-1].params
        fake.c.fake_capture(0)
        fake.reset()
        big.launch(7)  # retired, not freed: the graph may use it
        assert "cuMemFreeAsync" not in fake.names()
        small.launch(7)
        assert fake.launches()[-1].params != captured
        assert fake.live()[0] == 3
        fake.reset()
        scratch_call(library, 1 << 15).launch(8)  # never captured: freed in the stream's order
        assert fake.names().count("cuMemFreeAsync") == 1
        library.seal()
        with pytest.raises(UnavailableError, match="scratch growth of a sealed library"):
            small.launch(9)
        library.call("kiln_set_scratch", library.handle, 9, None, small.scratch_bytes)
        small.launch(9)
        small.free()
        big.free()


def test_plans_on_one_stream_take_turns(c: ctypes.CDLL, fake: Fake) -> None:
    """No other call's kernels come between those of a plan, whose temporaries they share."""
    count, rounds = 4, 40
    with opened(c, fake) as library:
        calls = [scratch_call(library, 64) for _ in range(count)]
        calls[0].launch(7)
        pattern = [launch.entry for launch in fake.launches()]
        assert len(pattern) > 1
        library.seal()
        fake.reset()
        fake.c.fake_slow(1)

        def launches(call: libkiln.Call) -> None:
            for _ in range(rounds):
                call.launch(7)

        threads = [threading.Thread(target=launches, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [launch.entry for launch in fake.launches()] == pattern * (count * rounds)
        for call in calls:
            call.free()


def test_scratch_of_the_caller(c: ctypes.CDLL, fake: Fake) -> None:
    with opened(c, fake) as library:
        call = scratch_call(library, 64)
        mine = 1 << 45
        library.call("kiln_set_scratch", library.handle, 7, mine, call.scratch_bytes)
        fake.reset()
        call.launch(7)
        assert "cuMemAllocAsync" not in fake.names()
        assert any(mine <= v < mine + call.scratch_bytes for launch in fake.launches() for v in launch.params)
        library.call("kiln_set_scratch", library.handle, 7, mine, call.scratch_bytes - 256)
        with pytest.raises(UnavailableError, match="scratch growth of the caller's buffer"):
            call.launch(7)
        with pytest.raises(ContractError, match="not aligned to 256 bytes"):
            library.call("kiln_set_scratch", library.handle, 7, mine + 8, 1 << 20)
        call.free()


@pytest.mark.parametrize("per_call", [0, 1])
def test_scratch_poison_and_no_pool(c: ctypes.CDLL, fake: Fake, per_call: int) -> None:
    with opened(c, fake, poison_scratch=1, scratch_per_call=per_call) as library:
        call = scratch_call(library, 64)
        fake.reset()
        call.launch(7)
        assert fake.c.fake_live(3) == call.scratch_bytes
        names = fake.names()
        assert names.index("cuMemsetD8Async") < names.index("cuLaunchKernelEx")
        assert fake.live()[0] == 1 - per_call
        fake.c.fake_capture(1)
        call.launch(7)
        assert fake.c.fake_live(3) == call.scratch_bytes
        call.free()


def test_selftest_makes_a_call_for_every_kernel(c: ctypes.CDLL, fake: Fake) -> None:
    """Nothing is computed here, so that outputs stay as they were: not finite, or unlike."""
    told: list[tuple[bytes, bytes, bytes | None, bytes | None]] = []
    with opened(c, fake, tree=TREE) as library:
        seen = libkiln.SelftestSeen(lambda _, *what: told.append(what))
        failures = ctypes.c_uint32()
        library.call("kiln_selftest", library.handle, seen, None, ctypes.byref(failures))
    assert {why for *_, why in told} == {
        None,
        b"an output is not finite",
        b"they differ by more than their envelope",
    }
    assert failures.value == sum(why is not None for *_, why in told)
    kernels = {(op, variant) for op, variant, *_ in told}
    assert len(kernels) > 90
    assert {launch.sha256 for launch in fake.launches()} >= {
        k.sha256 for k, _ in fake.kernels if (k.op.encode(), k.variant.encode()) in kernels
    }


DRIVER_ERRORS = [
    ("cuDevicePrimaryCtxRetain", 2, "out of memory"),
    ("cuModuleLoadData", 209, "another architecture"),
    ("cuModuleLoadData", 200, "does not understand"),
    ("cuModuleGetFunction", 500, "no such entry"),
    ("cuLaunchKernelEx", 1, r"1 CUDA_ERROR_INVALID_VALUE"),
    ("cuLaunchKernelEx", 700, "context is lost"),
    ("cuLaunchKernelEx", 900, "prepare and seal"),
]


@pytest.mark.parametrize(("name", "code", "why"), DRIVER_ERRORS)
def test_driver_errors_are_typed(c: ctypes.CDLL, fake: Fake, name: str, code: int, why: str) -> None:
    with opened(c, fake) as library:
        fake.c.fake_fail_named(name.encode(), code)
        with pytest.raises(DriverError, match=why) as e:
            library.rms_norm(**norm(), stream=3)
        assert e.value.code == code
        fake.reset()
        library.rms_norm(**norm(), stream=3)
        assert len(fake.launches()) == 1
