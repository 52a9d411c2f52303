"""A stand-in for `cuda.bindings.driver` that records every call and can be told to fail."""

import ctypes
import itertools
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from kiln.runtime.cuda_maps import PROTOTYPE


class CUresult(IntEnum):
    """The results the tests use."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


class Function(tuple[Any, ...]):
    """A function handle; `context` is the one it was loaded in. As a number, it is its own address."""

    context: int

    def __int__(self) -> int:
        return id(self)


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((f"{part}Dim{axis}", ctypes.c_uint32) for part in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint32),
        ("hStream", ctypes.c_uint64),
        ("attrs", ctypes.c_uint64),
        ("numAttrs", ctypes.c_uint32),
    ]


Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64
)
"""cuLaunchKernelEx, for callers in C."""


class FakeDriver:
    """One or more devices of one compute capability."""

    CUresult = CUresult

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=97,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
    )

    def __init__(self, cc: tuple[int, int] = (9, 0), version: int = 13000, devices: int = 1) -> None:
        self.cc, self.version, self.devices = cc, version, devices
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: dict[str, CUresult] = {}
        self.allowed: set[str] | None = None
        """The only functions that may be called; None for all."""
        self.capturing: set[int] = set()
        """Streams that are being captured."""
        self.stack = [0]
        self.launches: list[dict[str, Any]] = []
        self.allocated: dict[int, int] = {}
        self._addresses = itertools.count(0x7F0000000000, 1 << 20)
        self._functions: dict[int, Function] = {}
        self._entry = Launch(self._launched_by_c)
        self.launch_address = ctypes.cast(self._entry, ctypes.c_void_p).value
        """Where callers in C find cuLaunchKernelEx."""
        self.launched_by_c = 0
        self.needs_context = False
        """Whether a tensor map is made only where a context is current."""
        self.maps: list[TensorMap] = []
        """Tensor maps that were made."""
        self._encode = PROTOTYPE(self._encoded)
        self.encode_address: int | None = ctypes.cast(self._encode, ctypes.c_void_p).value
        """Where cuTensorMapEncodeTiled is; None where the driver has none."""

    @staticmethod
    def CUlaunchConfig() -> Any:
        """A launch configuration."""
        return SimpleNamespace()

    @staticmethod
    def CUlaunchAttribute() -> Any:
        """A launch attribute."""
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def names(self) -> list[str]:
        """The driver functions that were called, in order."""
        return [name for name, _ in self.log]

    def _result(self, name: str, args: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        if self.allowed is not None and name not in self.allowed:
            raise AssertionError(f"{name}{args} was called, allowed are {sorted(self.allowed)}")
        self.log.append((name, args))
        status = self.fail.get(name, CUresult.CUDA_SUCCESS)
        return (status, *values) if status == 0 else (status, *(0 for _ in values))

    def cuInit(self, flags: int) -> Any:
        return self._result("cuInit", (flags,))

    def cuDriverGetVersion(self) -> Any:
        return self._result("cuDriverGetVersion", (), self.version)

    def cuDeviceGetCount(self) -> Any:
        return self._result("cuDeviceGetCount", (), self.devices)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._result("cuDeviceGet", (ordinal,), ordinal)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        value = {75: self.cc[0], 76: self.cc[1], 97: 232448, 16: 132}[attribute]
        return self._result("cuDeviceGetAttribute", (attribute, device), value)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return self._result("cuDevicePrimaryCtxRetain", (device,), 0xC0 + device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        return self._result("cuDevicePrimaryCtxRelease", (device,))

    def cuCtxGetCurrent(self) -> Any:
        return self._result("cuCtxGetCurrent", (), self.stack[-1])

    def cuCtxPushCurrent(self, context: int) -> Any:
        result = self._result("cuCtxPushCurrent", (context,))
        if result[0] == 0:
            self.stack.append(context)
        return result

    def cuCtxPopCurrent(self) -> Any:
        return self._result("cuCtxPopCurrent", (), self.stack.pop())

    def cuModuleLoadData(self, data: bytes) -> Any:
        return self._result("cuModuleLoadData", (data,), ("module", data))

    def cuModuleUnload(self, module: Any) -> Any:
        return self._result("cuModuleUnload", (module,))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        function = Function(("function", name))
        function.context = self.stack[-1]
        self._functions[id(function)] = function
        return self._result("cuModuleGetFunction", (module, name), function)

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> Any:
        return self._result("cuFuncSetAttribute", (function, attribute, value))

    def cuFuncLoad(self, function: Any) -> Any:
        return self._result("cuFuncLoad", (function,))

    def cuMemAllocAsync(self, size: int, stream: int) -> Any:
        address = next(self._addresses)
        result = self._result("cuMemAllocAsync", (size, stream), address)
        if result[0] == 0:
            self.allocated[address] = size
        return result

    def cuMemFreeAsync(self, address: int, stream: int) -> Any:
        self.allocated.pop(address)
        return self._result("cuMemFreeAsync", (address, stream))

    def cuMemFree(self, address: int) -> Any:
        self.allocated.pop(address)
        return self._result("cuMemFree", (address,))

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> Any:
        return self._result("cuMemsetD8Async", (address, value, count, stream))

    def cuStreamIsCapturing(self, stream: int) -> Any:
        return self._result("cuStreamIsCapturing", (stream,), int(stream in self.capturing))

    def cuStreamSynchronize(self, stream: int) -> Any:
        return self._result("cuStreamSynchronize", (stream,))

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        if not self.stack[-1]:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self.stack[-1] != function.context:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        self.launches.append(
            {"config": SimpleNamespace(**vars(config)), "function": function, "params": params}
        )
        return self._result("cuLaunchKernelEx", (function,))

    def _encoded(self, where: int, element: int, rank: int, address: int, *rest: Any) -> int:
        """cuTensorMapEncodeTiled; the map's words are all ones, and its first the address."""
        arrays, how = rest[:4], rest[4:]
        words = zip(arrays, (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32), strict=True)
        given = [tuple((kind * rank).from_address(at)) for at, kind in words]
        extents, pitches, box, steps = given
        made = TensorMap(where, element, address, extents, pitches[: rank - 1], box, steps, how)
        (status, *_) = self._result("cuTensorMapEncodeTiled", made)
        if not self.stack[-1] and self.needs_context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        if where % 64:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        if status == 0:
            self.maps.append(made)
            (ctypes.c_uint64 * 16).from_address(where)[:] = [address, *(15 * [(1 << 64) - 1])]
        return int(status)

    def _launched_by_c(self, config: Any, function: int, params: int, extra: int) -> int:
        """The same, as bindings would be called; parameters are kept, for C's are gone when this returns."""
        self.launched_by_c += 1
        c = config.contents
        fields = {name: getattr(c, name) for name, _ in Config._fields_}
        fields["attrs"] = [_attribute(c.attrs + 72 * i) for i in range(c.numAttrs)]
        count = len(self.launches)
        found = self.cuLaunchKernelEx(SimpleNamespace(**fields), self._functions[function], params, extra)
        if len(self.launches) > count:
            kept = _copied(params)
            self.launches[-1] |= {"params": ctypes.addressof(kept), "kept": kept}
        return int(found[0])


class TensorMap(NamedTuple):
    """What a tensor map was made of, and where; innermost dimension first."""

    where: int
    element: int
    address: int
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    how: tuple[int, int, int, int]
    """Interleave, swizzle, promotion, fill."""


def _copied(table: int) -> Any:
    """Parameters like those of a table that ends with 0."""
    addresses = list(itertools.takewhile(bool, map(_word, itertools.count(table, 8))))
    kept = (ctypes.c_uint64 * (2 * len(addresses)))()
    for i, address in enumerate(addresses):
        kept[len(addresses) + i] = _word(address)
        kept[i] = ctypes.addressof(kept) + 8 * (len(addresses) + i)
    return kept


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _attribute(address: int) -> Any:
    """A launch attribute as the bindings show it."""
    number, _, x, y, z = (ctypes.c_uint32 * 5).from_address(address)
    return SimpleNamespace(id=number, value=SimpleNamespace(clusterDim=SimpleNamespace(x=x, y=y, z=z)))


def read_params(address: int, formats: str) -> list[Any]:
    """What a kernel would see: Q pointer, i 32-bit and q 64-bit integer, f and d floats, M tensor map."""
    kinds: dict[str, Any] = {
        "Q": ctypes.c_uint64,
        "i": ctypes.c_int32,
        "q": ctypes.c_int64,
        "f": ctypes.c_float,
        "d": ctypes.c_double,
        "M": ctypes.c_char * 128,
    }
    table = (ctypes.c_uint64 * len(formats)).from_address(address)
    found = [(f, kinds[f].from_address(p)) for f, p in zip(formats, table, strict=True)]
    return [bytes(v) if f == "M" else v.value for f, v in found]
