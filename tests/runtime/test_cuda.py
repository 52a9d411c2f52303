"""The CUDA side against a recording driver: order of calls, parameters, limits, contexts, errors."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import proof
from kiln.runtime.arrays import View, contiguous
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import (
    ContractError,
    DriverError,
    IntegrityError,
    SelectionError,
    TargetError,
    UnavailableError,
)
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver, read_params
from kiln.tests.runtime.trees import (
    MN,
    OPS,
    dim,
    kernel,
    manifest,
    pointer,
    scalar,
    tensor,
    value,
    write_tree,
)

Json = Any
CUBIN = b"\x7fCUBIN stands for one"


class Tensor:
    """Quacks like a torch tensor on a device, without memory."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str = "bfloat16", device: str = "cuda", ptr: int = 1 << 20
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.device, self.is_cuda, self.is_cpu = device, device == "cuda", device == "cpu"
        self._ptr = ptr

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self._ptr

    def stride(self) -> tuple[int, ...]:
        return contiguous(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> "Tensor":
        return Tensor(shape, dtype, ptr=2 << 20)


class CudaArray:
    """Offers __cuda_array_interface__."""

    def __init__(self, shape: tuple[int, ...], ptr: int = 1 << 20, **more: Any) -> None:
        face = {"shape": shape, "typestr": "<f4", "data": (ptr, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**face, **more}


T = {"var": "T", "choices": ["bf16", "f32"]}
SIG = {
    **OPS["negate"],
    "operands": [
        tensor("x", "in", MN, T),
        tensor("out", "out", MN, T),
        scalar("eps", default=1e-6),
        scalar("seed", "i64", default=0),
    ],
}
HIDDEN = [{"name": "g", "kind": "null", "dtype": "ptr"}, {"name": "p", "kind": "null", "dtype": "ptr"}]


def params(align: int, dtype: str = "f32") -> list[Json]:
    """Of the test kernel: two pointers, sizes, scalars, Triton's hidden pointers."""
    return [
        pointer("x", dtype=dtype, align=align),
        pointer("out", "write", dtype=dtype, align=align),
        value("n", dim("N"), "i32"),
        value("stride", ["stride", "x"]),
        value("eps", ["arg", "eps"], "f32"),
        value("shifted", ["add", ["arg", "seed"], 5]),
        *HIDDEN,
    ]


def entry(variant: str, align: int = 16, dtype: str = "f32", **more: Any) -> Json:
    """A CUDA kernel of the op `negate`."""
    base = {"file": f"{variant}.cubin", "isa": None, "block": [128, 1, 1], "entry": "negate_kernel"}
    return kernel(
        "negate", variant, params(align, dtype), CUBIN, **{**base, "resources": {"static_shared": 0}, **more}
    )


def tree(tmp_path: Path, *entries: Json, target: str = "sm_90a", **more: Any) -> Path:
    """A tree of these kernels."""
    options = {
        "ops": {"negate": SIG},
        "recipes": [],
        "toolchain": {"ptxas": "13.4.59", "triton": "3.9.0"},
        **more,
    }
    files = {e["file"]: CUBIN for e in entries}
    return write_tree(tmp_path / "tree", {target: manifest(entries, target, **options)}, files)


@pytest.fixture(autouse=True)
def _proved(monkeypatch: pytest.MonkeyPatch) -> None:
    # The stand-in for a cubin has nothing to prove; tests of the proof itself use real ones.
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])


def opened(root: Path, driver: FakeDriver, ordinal: int = 0) -> kiln.Library:
    return kiln.load(root, device=CudaDevice(ordinal, driver))


def test_launch(tmp_path: Path) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    assert "cuModuleLoadData" not in driver.names()
    assert "cuDevicePrimaryCtxRetain" not in driver.names()
    x, out = CudaArray((4, 32)), CudaArray((4, 32), 2 << 20)
    lib.negate(x, eps=0.25, seed=7, out=out, stream=0x51)
    launch = driver.launches[-1]
    assert launch["function"] == ("function", b"negate_kernel")
    assert read_params(launch["params"], "QQiqfqQQ") == [1 << 20, 2 << 20, 32, 32, 0.25, 12, 0, 0]
    config = launch["config"]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (4, 1, 1)
    assert (config.blockDimX, config.sharedMemBytes, config.hStream, config.numAttrs) == (128, 0, 0x51, 0)
    assert driver.stack == [0]
    before = len(driver.log)
    lib.negate(x, out=out)
    # Without a current context the first launch is refused by the driver, and not recorded here.
    assert [n for n, _ in driver.log[before:]] == [
        "cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent",
    ]  # fmt: skip
    driver.stack = [0xC0]
    before = len(driver.log)
    lib.negate(x, out=out)
    assert [n for n, _ in driver.log[before:]] == ["cuLaunchKernelEx"]
    assert lib.stats() == {"negate": {"a": 3}}


def test_verified_before_the_driver_sees_a_byte(tmp_path: Path) -> None:
    driver = FakeDriver()
    root = tree(tmp_path, entry("a"))
    path = root / "sm_90a" / "a.cubin"
    path.write_bytes(CUBIN[:-1] + b"x")
    lib = opened(root, driver)
    with pytest.raises(IntegrityError, match="sha256"):
        lib.negate(CudaArray((4, 32)))
    assert "cuModuleLoadData" not in driver.names()
    path.write_bytes(CUBIN)
    lib.negate(CudaArray((4, 32)), out=CudaArray((4, 32), 2 << 20))
    assert ("cuModuleLoadData", (CUBIN,)) in driver.log


def test_launch_proof_is_part_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    with pytest.raises(IntegrityError, match=r"is not what negate\.a promises"):
        lib.negate(CudaArray((4, 32)))
    assert "cuModuleLoadData" not in driver.names()


def test_launch_attributes_and_shared_memory(tmp_path: Path) -> None:
    driver = FakeDriver()
    special = entry("a", cluster=[2, 1, 1], launch={"pdl": True, "cooperative": True}, shared_bytes=100_000)
    lib = opened(tree(tmp_path, special), driver)
    assert lib.prepare() == 1
    assert ("cuFuncSetAttribute", (("function", b"negate_kernel"), 8, 100_000)) in driver.log
    assert "cuFuncLoad" in driver.names()
    lib.seal()
    before = len(driver.log)
    lib.negate(CudaArray((4, 32)), out=CudaArray((4, 32), 2 << 20))
    assert "cuModuleLoadData" not in [n for n, _ in driver.log[before:]]
    config = driver.launches[-1]["config"]
    assert [a.id for a in config.attrs] == [4, 6, 2]
    assert vars(config.attrs[0].value.clusterDim) == {"x": 2, "y": 1, "z": 1}
    assert config.sharedMemBytes == 100_000
    small = entry("b", shared_bytes=40_000)
    other = FakeDriver()
    opened(tree(tmp_path / "s", small), other).prepare()
    assert "cuFuncSetAttribute" not in other.names()


def test_too_much_shared_memory_is_passed_over(tmp_path: Path) -> None:
    big = entry("a", shared_bytes=232_448, resources={"static_shared": 16})
    with pytest.raises(SelectionError, match="needs 232464 bytes of shared memory, the device allows 232448"):
        opened(tree(tmp_path, big), FakeDriver()).negate(CudaArray((4, 32)))


def test_alignment_chooses_the_variant(tmp_path: Path) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("aligned", tier="fast"), entry("plain", align=4)), driver)
    out = CudaArray((4, 32), 2 << 20)
    for ptr, variant in ((1 << 20, "aligned"), ((1 << 20) + 4, "plain"), ((1 << 20) + 16, "aligned")):
        assert lib.bind("negate", CudaArray((4, 32), ptr), out=out).variant == variant
    with pytest.raises(
        SelectionError, match=r"aligned to 16 bytes, found it 2 bytes off.*aligned to 4 bytes"
    ):
        lib.negate(CudaArray((4, 32), (1 << 20) + 2), out=out)


def test_torch_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(
        bfloat16="bfloat16",
        empty_like=lambda x: x.new_empty(x.shape, x.dtype),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda d: 0x77 + d),
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a", dtype="bf16")), driver)
    out = lib.negate(Tensor((2, 3, 32)))
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((2, 3, 32), "bfloat16")
    assert driver.launches[-1]["config"].hStream == 0x77
    assert driver.launches[-1]["config"].gridDimX == 6
    assert read_params(driver.launches[-1]["params"], "QQ") == [1 << 20, 2 << 20]
    for stream in (SimpleNamespace(cuda_stream=5), SimpleNamespace(ptr=5), 5):
        lib.negate(Tensor((2, 32)), stream=stream)
        assert driver.launches[-1]["config"].hStream == 5
    with pytest.raises(ContractError, match="stream of type str"):
        lib.negate(Tensor((2, 32)), stream="x")


def test_owned_outputs(tmp_path: Path) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    out = lib.negate(CudaArray((4, 32)), stream=3)
    face = out.__cuda_array_interface__
    assert (face["shape"], face["typestr"], face["strides"], face["stream"]) == ((4, 32), "<f4", None, 3)
    assert driver.allocated == {face["data"][0]: 512}
    again = lib.negate(out)
    assert read_params(driver.launches[-1]["params"], "Q") == [face["data"][0]]
    del out, again
    assert driver.allocated == {}


class Picky:
    """Offers __cuda_array_interface__ for the types it can name and DLPack for all, as JAX does."""

    def __init__(self, x: Any, named: bool) -> None:
        self._x, self._named = x, named

    @property
    def __cuda_array_interface__(self) -> Any:
        if not self._named:
            raise AttributeError("not supported for this type")
        face = self._x.__array_interface__
        return {"shape": face["shape"], "typestr": face["typestr"], "data": face["data"], "version": 3}

    def __dlpack__(self, stream: int) -> Any:
        assert stream == 1
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_interface_that_depends_on_the_type(tmp_path: Path, order: tuple[bool, bool]) -> None:
    """What one array of a class offers says nothing of the next; outputs are always on the device."""
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    for named in order:
        x = np.ones((4, 32), np.float32)
        out = lib.negate(Picky(x, named))
        assert read_params(driver.launches[-1]["params"], "QQ") == [x.ctypes.data, out.pointer]
        assert out.pointer in driver.allocated


MISUSE: dict[str, tuple[Callable[[kiln.Library], Any], str]] = {
    "NumPy array": (lambda lib: lib.negate(np.ones((4, 32), np.float32)), "x is on the CPU, expected cuda:0"),
    "null pointer": (lambda lib: lib.negate(CudaArray((4, 32), 0)), "null address"),
    "masked": (lambda lib: lib.negate(CudaArray((4, 32), mask=1)), "masked array"),
    "unknown type": (lambda lib: lib.negate(CudaArray((4, 32), typestr="<c8")), "array of complex64"),
    "no type": (lambda lib: lib.negate(CudaArray((4, 32), typestr="zz")), "element type 'zz'"),
    "read-only out": (
        lambda lib: lib.negate(CudaArray((4, 32)), out=CudaArray((4, 32), data=(2 << 20, True))),
        "read-only",
    ),
    "overlap": (
        lambda lib: lib.negate(CudaArray((4, 32)), out=CudaArray((4, 32), (1 << 20) + 16)),
        "overlaps",
    ),
    "huge grid": (
        lambda lib: lib.negate(CudaArray((1 << 31, 32)), out=CudaArray((1 << 31, 32), 1 << 40)),
        "grid axis 0 would be 2147483648, a device takes 2147483647",
    ),
    "huge output": (lambda lib: lib.negate(CudaArray((1 << 40, 1 << 30))), "would have shape"),
    "int64 overflow": (
        lambda lib: lib.negate(CudaArray((4, 32)), seed=1 << 63),
        "seed is 9223372036854775808",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_never_reaches_a_launch(tmp_path: Path, name: str) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    call, why = MISUSE[name]
    with pytest.raises(ContractError, match=why):
        call(lib)
    assert driver.launches == []


def test_tensor_of_another_device(tmp_path: Path) -> None:
    lib = opened(tree(tmp_path, entry("a", dtype="bf16")), FakeDriver(devices=2), 1)
    with pytest.raises(ContractError, match="x is on cuda:0, expected cuda:1"):
        lib.negate(Tensor((2, 32)))
    with pytest.raises(ContractError, match="device meta"):
        lib.negate(Tensor((2, 32), device="meta"))


def test_grid_axis_limits(tmp_path: Path) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a", grid=[1, dim("M"), 1])), driver)
    lib.negate(CudaArray((65535, 32)), out=CudaArray((65535, 32), 1 << 30))
    with pytest.raises(ContractError, match="grid axis 1 would be 65536, a device takes 65535"):
        lib.negate(CudaArray((65536, 32)), out=CudaArray((65536, 32), 1 << 30))
    lib = opened(tree(tmp_path / "b", entry("a", grid=[["sub", dim("M"), 4], 1, 1])), driver)
    count = len(driver.launches)
    for _ in range(2):  # nobody would write the output
        with pytest.raises(ContractError, match="the grid of a is 0 and nothing would be computed"):
            lib.negate(CudaArray((4, 32)), out=CudaArray((4, 32), 1 << 30))
    assert len(driver.launches) == count
    with pytest.raises(ContractError, match="a grid extent of -1"):
        lib.negate(CudaArray((3, 32)), out=CudaArray((3, 32), 1 << 30))


@pytest.mark.parametrize(("cc", "fine"), [((9, 0), True), ((8, 0), False), ((10, 0), False), ((9, 1), False)])
def test_exact_architecture(tmp_path: Path, cc: tuple[int, int], fine: bool) -> None:
    root = tree(tmp_path, entry("a"))
    if fine:
        assert opened(root, FakeDriver(cc)).targets == ("sm_90a",)
        return
    driver = FakeDriver(cc)
    with pytest.raises(TargetError, match=rf"compute capability {cc[0]}\.{cc[1]}.*it holds sm_90a"):
        opened(root, driver)
    assert "cuModuleLoadData" not in driver.names()


def test_second_device_takes_its_own_target(tmp_path: Path) -> None:
    documents = {
        t: manifest([entry("a")], t, ops={"negate": SIG}, recipes=[], toolchain={})
        for t in ("sm_120a", "sm_121a")
    }
    root = write_tree(tmp_path / "t", documents, {"a.cubin": CUBIN})
    assert opened(root, FakeDriver((12, 0))).targets == ("sm_120a",)
    assert opened(root, FakeDriver((12, 1))).targets == ("sm_121a",)


def test_old_driver(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"ptxas 13\.4\.59, the driver supports CUDA 12\.8"):
        opened(tree(tmp_path, entry("a")), FakeDriver(version=12080))
    opened(tree(tmp_path / "b", entry("a"), toolchain={"ptxas": "12.9.86"}), FakeDriver(version=12020))


FAILURES = [
    ("cuInit", CUresult.CUDA_ERROR_NO_DEVICE, UnavailableError, "no NVIDIA device"),
    ("cuInit", CUresult.CUDA_ERROR_NOT_INITIALIZED, DriverError, "start workers with spawn"),
    ("cuDevicePrimaryCtxRetain", CUresult.CUDA_ERROR_OUT_OF_MEMORY, DriverError, "out of memory"),
    ("cuModuleLoadData", CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, DriverError, "another architecture"),
    ("cuModuleLoadData", CUresult.CUDA_ERROR_INVALID_IMAGE, DriverError, "does not understand"),
    ("cuModuleGetFunction", CUresult.CUDA_ERROR_NOT_FOUND, DriverError, "no such entry"),
    ("cuLaunchKernelEx", CUresult.CUDA_ERROR_INVALID_CONTEXT, DriverError, "context is gone"),
    ("cuLaunchKernelEx", CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, DriverError, "prepare and seal"),
]


@pytest.mark.parametrize(("function", "code", "kind", "why"), FAILURES)
def test_driver_errors_are_typed(
    tmp_path: Path, function: str, code: CUresult, kind: type[Exception], why: str
) -> None:
    driver = FakeDriver()
    driver.fail[function] = code
    with pytest.raises(kind, match=why) as e:
        opened(tree(tmp_path, entry("a")), driver).negate(CudaArray((4, 32)), out=CudaArray((4, 32), 2 << 20))
    if isinstance(e.value, DriverError):
        assert (e.value.code, e.value.name) == (int(code), code.name)
    assert driver.stack == [0]


def test_no_such_device() -> None:
    with pytest.raises(UnavailableError, match="found 1 CUDA devices"):
        CudaDevice(1, FakeDriver())


def test_no_bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(UnavailableError, match="install kernel-kiln"):
        kiln.load(tree(tmp_path, entry("a")), device="cuda")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_fork(tmp_path: Path) -> None:
    lib = opened(tree(tmp_path, entry("a")), FakeDriver())
    x, out = CudaArray((4, 32)), CudaArray((4, 32), 2 << 20)
    lib.negate(x, out=out)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            lib.negate(x, out=out)
        except UnavailableError as e:
            os.write(write, str(e).encode())
        lib.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"before the process was forked" in os.read(read, 4096)


def test_close_unloads_and_tolerates_shutdown(tmp_path: Path) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    lib.prepare()
    lib.close()
    lib.close()
    assert driver.names().count("cuModuleUnload") == 1
    assert driver.names().count("cuDevicePrimaryCtxRelease") == 1
    dying = FakeDriver()
    lib = opened(tree(tmp_path / "b", entry("a")), dying)
    lib.prepare()
    dying.fail["cuModuleUnload"] = CUresult.CUDA_ERROR_DEINITIALIZED
    lib.close()


def test_bound_launches(tmp_path: Path) -> None:
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    ready = lib.bind("negate", CudaArray((4, 32)), out=CudaArray((4, 32), 2 << 20), stream=4)
    assert driver.launches == []
    ready()
    ready()
    assert len(driver.launches) == 2
    assert ready.pointers == (1 << 20, 0, 0, 2 << 20)


def test_pretended_device_explains(tmp_path: Path) -> None:
    root = tree(tmp_path, entry("aligned", tier="fast"), entry("plain", align=4))
    with kiln.load(root, device="sm_90a") as lib:
        x = View(0, (4, 32), (32, 1), "f32", 0, False, None)
        told = lib.explain("negate", x)
        assert told.chosen is not None
        assert told.chosen.variant == "aligned"
        off = lib.explain("negate", x._replace(ptr=4)).chosen
        assert off is not None
        assert off.variant == "plain"
        with pytest.raises(UnavailableError, match=r"cannot run kernels|no memory"):
            lib.negate(x._replace(ptr=1 << 20))
