"""Running kernels on an NVIDIA device through its driver: contexts, modules, launches, stream-ordered memory.

The driver is reached through `cuda.bindings.driver`, imported when the first CUDA library is loaded.
Everything that can be known
to fail is refused by name before the driver sees it: a launch error can poison the whole context.
"""

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kiln.runtime.arrays import View, contiguous, is_torch, torch_empty
from kiln.runtime.driver import Driver
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import ContractError, DriverError, TargetError, UnavailableError
from kiln.runtime.providers import Capabilities
from kiln.runtime.recipe import Recipe
from kiln.runtime.targets import legal_targets

_MAX_GRID = (2**31 - 1, 65535, 65535)
_DEFAULT_SHARED = 48 << 10
_FORMATS = {"ptr": "Q", "i32": "i4x", "i64": "q", "f32": "f4x", "f64": "d"}


class CudaDevice:
    """One CUDA device through its primary context."""

    unified_memory = False
    """Not even where memory is shared: what cuMemAlloc returns is the device's own."""

    def __init__(self, ordinal: int = 0, driver: Any = None) -> None:
        """Retain the primary context of a device.

        Raises:
            UnavailableError: no bindings, no driver or no such device.
            DriverError: the driver refuses.
        """
        self.driver = Driver(driver)
        self.ordinal = ordinal
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._retained = False
        self.device = self._find(ordinal)
        attribute = self.driver.module.CUdevice_attribute
        self.cc = (
            self._query(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._query(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.shared_limit = self._query(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.driver_version: int = self.driver.call("cuDriverGetVersion")
        self._context: Any = None
        self._context_id = 0

    def _find(self, ordinal: int) -> Any:
        try:
            self.driver.call("cuInit", 0)
        except DriverError as e:
            if e.code in (34, 100):
                raise UnavailableError(f"CUDA cannot be used here: {e}") from None
            raise
        except (RuntimeError, OSError) as e:
            # cuda-bindings raises its own kinds where libcuda is not installed.
            raise UnavailableError(
                f"no CUDA driver on this machine ({e}); install one, or use the CPU."
            ) from None
        count = self.driver.call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise UnavailableError(f"found {count} CUDA devices, expected one with ordinal {ordinal}.")
        return self.driver.call("cuDeviceGet", ordinal)

    def _query(self, attribute: Any) -> int:
        return int(self.driver.call("cuDeviceGetAttribute", attribute, self.device))

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"cuda:{self.ordinal} (compute capability {self.cc[0]}.{self.cc[1]})"

    def capabilities(self) -> Capabilities:
        """Its compute capability and multiprocessors."""
        units = self._query(self.driver.module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        return Capabilities(True, *self.cc, units)

    def targets(self, available: Iterable[str]) -> list[str]:
        """The CUDA targets this device may run, best first."""
        return legal_targets(self.cc, available)

    def refusal(self, kernel: Kernel) -> str | None:
        """Shared memory that this device does not have."""
        need = kernel.shared_bytes + kernel.resources.get("static_shared", 0)
        if need > self.shared_limit:
            return f"needs {need} bytes of shared memory, the device allows {self.shared_limit}"
        return None

    def check_toolchain(self, versions: Iterable[str]) -> None:
        """Refuse cubins of a CUDA major release that the driver does not know.

        Raises:
            TargetError: naming both versions.
        """
        for version in versions:
            major = version.split(".")[0]
            if major.isdigit() and int(major) > self.driver_version // 1000:
                have = f"{self.driver_version // 1000}.{self.driver_version % 1000 // 10}"
                raise TargetError(
                    f"the tree was assembled by ptxas {version}, the driver supports CUDA {have}; "
                    "update the driver."
                )

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the primary context current in this thread for a while, whatever happens inside."""
        self._alive()
        with self._lock:
            if not self._retained:
                self._context = self.driver.call("cuDevicePrimaryCtxRetain", self.device)
                self._context_id = int(self._context)
                self._retained = True
        if int(self.driver.call("cuCtxGetCurrent")) == self._context_id:
            yield
            return
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def _alive(self) -> None:
        if os.getpid() != self._pid:
            raise UnavailableError(
                "this library was loaded before the process was forked, and CUDA does not survive that; "
                "load it in the child, and start workers with spawn."
            )

    def load(self, kernel: Kernel, data: bytes) -> Any:
        """The function of a kernel; kernels of one file share the module. Verified bytes only."""
        with self.current():
            with self._lock:
                module = self._modules.get(kernel.sha256)
                if module is None:
                    module = self._modules[kernel.sha256] = self.driver.call("cuModuleLoadData", data)
            function = self.driver.call("cuModuleGetFunction", module, kernel.entry.encode())
            if kernel.shared_bytes + kernel.resources.get("static_shared", 0) > _DEFAULT_SHARED:
                attribute = (
                    self.driver.module.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                )
                self.driver.call("cuFuncSetAttribute", function, attribute, kernel.shared_bytes)
            if hasattr(self.driver.module, "cuFuncLoad") and self.driver_version >= 12040:
                # Lazy loading would otherwise do it inside the first launch, which may be under capture.
                self.driver.call("cuFuncLoad", function)
        return function

    def launcher(self, kernel: Kernel, function: Any, recipe: Recipe) -> "CudaLauncher":
        """A launcher of a loaded function."""
        for axis, (n, most) in enumerate(zip(recipe.grid, _MAX_GRID, strict=True)):
            if n > most:
                raise ContractError(
                    f"{kernel.op}.{kernel.variant}: grid axis {axis} would be {n}, a device takes "
                    f"{most}; split the call."
                )
        return CudaLauncher(self, kernel, function, recipe)

    def stream(self, stream: Any, example: Any) -> int:
        """The handle of a stream object or integer; torch's current stream for torch tensors; else the
        default one."""
        if stream is None:
            return _torch_stream(self.ordinal) if is_torch(example) else 0
        if type(stream) is int:
            return stream
        for name in ("cuda_stream", "ptr", "handle"):
            value = getattr(stream, name, None)
            if value is not None:
                return int(value)
        if hasattr(stream, "__cuda_stream__"):
            face = stream.__cuda_stream__
            return int((face() if callable(face) else face)[1])
        try:
            return int(stream)
        except (TypeError, ValueError):
            raise ContractError(
                f"found a stream of type {type(stream).__name__}, expected an integer handle or a "
                "stream object."
            ) from None

    def allocate(self, example: Any, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
        """An array of the example's framework where it is torch, else a DeviceArray."""
        if is_torch(example):
            return torch_empty(example, shape, dtype)
        return DeviceArray(self, shape, dtype, stream)

    def synchronize(self, stream: int) -> None:
        """Wait for what was queued on a stream."""
        with self.current():
            self.driver.call("cuStreamSynchronize", stream)

    def reserve(self, sizes: list[int], stream: int) -> "CudaTemporaries":
        """Stream-ordered memory."""
        return CudaTemporaries(self, sizes, stream)

    def close(self) -> None:
        """Unload modules and release the context; nothing is done in a forked child or at shutdown."""
        with self._lock:
            modules, self._modules = list(self._modules.values()), {}
            retained, self._retained = self._retained, False
        if not retained or os.getpid() != self._pid:
            return
        try:
            self.driver.call("cuCtxPushCurrent", self._context)
            try:
                for module in modules:
                    self.driver.call("cuModuleUnload", module)
            finally:
                self.driver.call("cuCtxPopCurrent")
            self.driver.call("cuDevicePrimaryCtxRelease", self.device)
        except DriverError as e:
            if e.code != 4:
                raise


class _Record(NamedTuple):
    """One launch: the table of parameter addresses followed by the parameters, and the configuration."""

    buffer: Any
    values: Any
    address: int
    config: Any


class CudaLauncher:
    """A function with everything of one call's shape fixed: a launch packs addresses and scalars and goes.

    Launch records are kept for reuse, one per launch in flight in this process: `list.pop` and `append` are
    atomic.
    """

    def __init__(self, device: CudaDevice, kernel: Kernel, function: Any, recipe: Recipe) -> None:
        self._device = device
        self._kernel = kernel
        self._function = function
        self._recipe = recipe
        self._sizes = [n for _, n in recipe.scratch]
        self._free: list[_Record] = []
        self._empty = 0 in recipe.grid
        # Where each per-call value goes: the values follow the table of their addresses, eight bytes each.
        first, packers = (
            8 * len(recipe.dtypes),
            [struct.Struct("=" + _FORMATS[d]).pack_into for d in recipe.dtypes],
        )
        self._args = [(packers[at], first + 8 * at, i) for at, i in recipe.args]
        self._computed = [(packers[at], first + 8 * at, f) for at, f in recipe.computed]

    def run(self, pointers: list[int], args: tuple[int | float, ...], stream: int) -> None:
        """Queue the kernel on a stream.

        Raises:
            DriverError: the driver refuses the launch.
            UnavailableError: in a child of the process that loaded the library.
        """
        if self._empty:
            return
        if not self._sizes:
            self._launch(pointers, args, stream, ())
            return
        temporaries = self._device.reserve(self._sizes, stream)
        try:
            self._launch(pointers, args, stream, temporaries.pointers)
        finally:
            temporaries.release()

    def _launch(
        self, pointers: list[int], args: tuple[int | float, ...], stream: int, scratch: Sequence[int]
    ) -> None:
        device, recipe = self._device, self._recipe
        if os.getpid() != device._pid:
            device._alive()
        try:
            record = self._free.pop()
        except IndexError:
            record = self._record()
        buffer, values, address, config = record
        for at, i in recipe.pointers:
            values[at] = pointers[i]
        for pack, where, i in self._args:
            pack(buffer, where, args[i])
        for pack, where, compute in self._computed:
            pack(buffer, where, compute(args))
        for (at, _), pointer in zip(recipe.scratch, scratch, strict=True):
            values[at] = pointer
        config.hStream = stream
        module = device.driver.module
        status, context = module.cuCtxGetCurrent()
        if int(context) == device._context_id and int(status) == 0:
            (status,) = module.cuLaunchKernelEx(config, self._function, address, 0)
        else:
            with device.current():
                (status,) = module.cuLaunchKernelEx(config, self._function, address, 0)
        self._free.append(record)
        if int(status) != 0:
            k = self._kernel
            device.driver.refuse(f"{k.op}.{k.variant}: cuLaunchKernelEx", status)

    def _record(self) -> "_Record":
        recipe = self._recipe
        count = len(recipe.dtypes)
        buffer = (ctypes.c_char * max(16 * count, 8))()
        address = ctypes.addressof(buffer)
        struct.pack_into(f"={count}Q", buffer, 0, *(address + 8 * (count + i) for i in range(count)))
        formats = "".join(_FORMATS[d] for d in recipe.dtypes)
        struct.pack_into(f"={formats}", buffer, 8 * count, *recipe.template)
        values = (ctypes.c_uint64 * count).from_buffer(buffer, 8 * count) if count else None
        return _Record(buffer, values, address, self._config())

    def _config(self) -> Any:
        module, k = self._device.driver.module, self._kernel
        config = module.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._recipe.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = k.block
        config.sharedMemBytes = k.shared_bytes
        attributes = []
        ids = module.CUlaunchAttributeID
        if k.cluster != (1, 1, 1):
            a = module.CUlaunchAttribute()
            a.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = k.cluster
            attributes.append(a)
        if k.launch.get("pdl"):
            a = module.CUlaunchAttribute()
            a.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = 1
            attributes.append(a)
        if k.launch.get("cooperative"):
            a = module.CUlaunchAttribute()
            a.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            a.value.cooperative = 1
            attributes.append(a)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class CudaTemporaries:
    """Memory of one call, taken and given back in the order of its stream, also while it is captured."""

    def __init__(self, device: CudaDevice, sizes: list[int], stream: int) -> None:
        self._device, self._stream = device, stream
        self.pointers: list[int] = []
        with device.current():
            try:
                for n in sizes:
                    self.pointers.append(int(device.driver.call("cuMemAllocAsync", max(n, 1), stream)))
            except DriverError:
                self.release()
                raise

    def release(self) -> None:
        """Give it back once the work queued so far is done."""
        with self._device.current():
            while self.pointers:
                self._device.driver.call("cuMemFreeAsync", self.pointers.pop(), self._stream)


class DeviceArray:
    """Device memory that the runtime owns, for callers whose arrays belong to no framework that can be asked
    for one.

    It offers `__cuda_array_interface__`; types that the interface cannot name (bf16, FP8) are told as raw
    bytes of their size.
    """

    def __init__(self, device: CudaDevice, shape: tuple[int, ...], dtype: str, stream: int) -> None:
        self.shape, self.dtype = shape, dtype
        self._device, self._stream = device, stream
        count = DTYPES[dtype]
        for n in shape:
            count *= n
        with device.current():
            self.pointer = int(device.driver.call("cuMemAllocAsync", max(count, 1), stream))

    def __kiln_view__(self) -> View:
        """The view that this runtime's own calls take."""
        return View(self.pointer, self.shape, self.strides, self.dtype, self._device.ordinal, False, self)

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major, in elements."""
        return contiguous(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        codes = {
            "f64": "<f8",
            "f32": "<f4",
            "f16": "<f2",
            "i64": "<i8",
            "i32": "<i4",
            "i16": "<i2",
            "bool": "|b1",
        }
        raw = {"i8": "|i1", "u8": "|u1", "u32": "<u4", "bf16": "<V2"}
        return {
            "shape": self.shape,
            "typestr": codes.get(self.dtype) or raw.get(self.dtype, "|V1"),
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
            "stream": self._stream or 1,
        }

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing():
            # The driver goes down with the process, and so do the names used below.
            return
        pointer, self.pointer = getattr(self, "pointer", 0), 0
        if pointer and os.getpid() == self._device._pid:
            try:
                with self._device.current():
                    self._device.driver.call("cuMemFreeAsync", pointer, self._stream)
            except (DriverError, UnavailableError):
                # The process is shutting down or the context is lost: the memory went with it.
                return


def _torch_stream(ordinal: int) -> int:
    torch: Any = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(ordinal)) if raw is not None else int(torch.cuda.current_stream(ordinal).cuda_stream)
