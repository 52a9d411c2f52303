"""Running kernels on an NVIDIA device through its driver: contexts, modules, launches, stream-ordered memory.

The driver is reached through `cuda.bindings.driver`, imported when the first CUDA library is loaded.
Everything that can be known
to fail is refused by name before the driver sees it: a launch error can poison the whole context.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kiln.runtime.arrays import is_torch, torch_maker
from kiln.runtime.cuda_launch import CudaLauncher
from kiln.runtime.cuda_memory import CudaMemory, DeviceArray
from kiln.runtime.driver import Driver
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import (
    ContextLostError,
    ContractError,
    DriverError,
    TargetError,
    UnavailableError,
)
from kiln.runtime.providers import Capabilities
from kiln.runtime.recipe import Recipe
from kiln.runtime.release import every
from kiln.runtime.scratch import ScratchPolicy, ScratchPool
from kiln.runtime.targets import legal_targets

_MAX_GRID = (2**31 - 1, 65535, 65535)
_DEFAULT_SHARED = 48 << 10
_devices: "weakref.WeakSet[CudaDevice]" = weakref.WeakSet()


def _after_fork() -> None:
    for device in _devices:
        device.gone = device.forked = True


# Asking for the process id costs as much as packing a launch; a forked child is told instead.
os.register_at_fork(after_in_child=_after_fork)


class CudaDevice:
    """One CUDA device through one context; libraries for several contexts take a device each.

    Attributes:
        gone: closed, or in a forked child: nothing can be launched.
        forked: this process is a child of the one that made it.
        scratch: the memory that calls take for the time they run.
        launch: the driver's cuLaunchKernelEx, unchecked.
    """

    unified_memory = False
    """Not even where memory is shared: what cuMemAlloc returns is the device's own."""

    def __init__(
        self,
        ordinal: int = 0,
        driver: Any = None,
        *,
        context: Any = None,
        scratch: ScratchPolicy | None = None,
    ) -> None:
        """Nothing is loaded, and no context made, before it is needed.

        Args:
            ordinal: which device.
            driver: a stand-in for `cuda.bindings.driver`, in tests.
            context: a CUcontext of that device, the caller's to keep alive; its primary context by default.
            scratch: how scratch memory is handed out.

        Raises:
            UnavailableError: no bindings, no driver or no such device.
            DriverError: the driver refuses.
        """
        self.driver = Driver(driver)
        self.ordinal = ordinal
        self.gone = self.forked = False
        self.memory = CudaMemory(self)
        self.scratch = ScratchPool(self.memory, scratch or ScratchPolicy())
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
        self._context: Any = context
        self._context_id = 0 if context is None else int(context)
        self._primary = context is None
        self.launch: Callable[..., Any] = self.driver.module.cuLaunchKernelEx
        self._current_stream: Callable[[], int] | None = None
        _devices.add(self)

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
        """Shared memory that this device does not have, or tensor maps that its driver cannot make."""
        need = kernel.shared_bytes + kernel.resources.get("static_shared", 0)
        if need > self.shared_limit:
            return f"needs {need} bytes of shared memory, the device allows {self.shared_limit}"
        if any(p.map is not None for p in kernel.params) and self.driver.encode is None:
            return "takes tensor maps, and libcuda has no cuTensorMapEncodeTiled; update the driver"
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
        """Make the device's context current in this thread for a while, whatever happens inside."""
        self._check_process()
        with self._lock:
            if self._primary and not self._retained:
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

    def launch_in_context(self, config: Any, function: Any, address: int) -> Any:
        """The status of a launch with the device's context current.

        A launch itself asks for no context: a function belongs to one, and the driver refuses it, without
        queueing anything, where another or none is current.
        """
        with self.current():
            (status,) = self.launch(config, function, address, 0)
        return status

    def check_usable(self) -> None:
        """Refuse a device that is gone.

        Raises:
            UnavailableError: it was closed, or this is a child of the process that made it.
        """
        self._check_process()
        raise UnavailableError("this library was closed; load the tree again.")

    def _check_process(self) -> None:
        if self.forked:
            raise UnavailableError(
                "this library was loaded before the process was forked, and CUDA does not survive that; "
                "load it in the child, and start workers with spawn."
            )

    def check_capture(self, kernel: Kernel, stream: int) -> None:
        """Refuse to load a kernel while the stream of the call that needs it is being captured.

        Raises:
            UnavailableError: it is.
        """
        if self.memory.capturing(stream):
            raise UnavailableError(
                f"{kernel.op}: variant {kernel.op}.{kernel.variant} was not prepared before graph capture; "
                f'call prepare(["{kernel.op}"]) first.'
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
            current = self.default_stream(example)
            return 0 if current is None else int(current())
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

    def default_stream(self, example: Any) -> Callable[[], int] | None:
        """What tells the stream of calls that name none: torch for its tensors, else the default one."""
        if not is_torch(example):
            return None
        if self._current_stream is None:
            self._current_stream = _torch_stream(self.ordinal)
        return self._current_stream

    def synchronize(self, stream: int) -> None:
        """Wait for what was queued on a stream."""
        with self.current():
            self.driver.call("cuStreamSynchronize", stream)

    def maker(self, example: Any, shape: tuple[int, ...], dtype: str) -> Callable[..., Any]:
        """See Device: a DeviceArray where the example is not torch's."""
        if is_torch(example):
            return torch_maker(example, shape, dtype)
        return lambda _, stream: DeviceArray(self, shape, dtype, stream)

    def allocates(self, example: Any) -> bool:
        """Whether making an output asks the driver for memory, and not the caller's framework."""
        return not is_torch(example)

    def close(self) -> None:
        """Unload modules, free scratch and release the context; nothing is done in a forked child, at
        shutdown or once the context is lost."""
        with self._lock:
            was_gone, self.gone = self.gone, True
            modules, self._modules = list(self._modules.values()), {}
        if was_gone or self._context is None:
            return
        try:
            self._give_back(modules)
        except ContextLostError:
            return
        except DriverError as e:
            if e.code != 4:
                raise

    def _give_back(self, modules: list[Any]) -> None:
        every((partial(self._empty_context, modules), self.release_if_gone))

    def _empty_context(self, modules: list[Any]) -> None:
        self.driver.call("cuCtxPushCurrent", self._context)
        unload = (partial(self.driver.call, "cuModuleUnload", m) for m in modules)
        every((self.scratch.close, *unload, partial(self.driver.call, "cuCtxPopCurrent")))

    def release_if_gone(self) -> None:
        """Release the primary context of a closed device, of which an array may have outlived it.

        Raises:
            DriverError: the driver refuses.
        """
        with self._lock:
            retained, self._retained = self._retained and self.gone, self._retained and not self.gone
        if retained:
            self.driver.call("cuDevicePrimaryCtxRelease", self.device)


def _torch_stream(ordinal: int) -> Callable[[], int]:
    torch: Any = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return partial(raw, ordinal)
    return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)
