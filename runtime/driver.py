"""The CUDA driver with its results checked, and what its error codes mean for a user."""

import ctypes
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

from kiln.runtime.errors import ContextLostError, DriverError, UnavailableError

_HINTS = {
    1: "a value is out of range",
    2: "the device is out of memory; free some",
    3: "CUDA was initialized before this process was forked; start workers with spawn",
    4: "the process is shutting down",
    100: "no NVIDIA device; check nvidia-smi",
    101: "no such device; check the ordinal",
    200: "the driver does not understand the cubin; update the driver",
    201: "the context is gone; load the library again",
    209: "the cubin is for another architecture; build this device's target",
    222: "the driver is older than the toolchain; update it",
    214: "the device's memory has an error that cannot be corrected; the context is lost",
    400: "a function or stream of another context, or one that was destroyed; pass a stream of this device",
    500: "the cubin has no such entry; rebuild the tree",
    700: "a kernel accessed memory it may not; the context is lost, restart the process",
    709: "the context was destroyed; load the library again",
    716: "a kernel was given a misaligned address; the context is lost, restart the process",
    719: "a kernel failed; the context is lost, restart the process",
    702: "a kernel ran longer than the device allows; the context is lost, restart the process",
    710: "a kernel's assertion failed; the context is lost, restart the process",
    714: "a kernel failed in its hardware stack; the context is lost, restart the process",
    715: "a kernel ran an illegal instruction; the context is lost, restart the process",
    717: "a kernel used an address of the wrong space; the context is lost, restart the process",
    718: "a kernel's program counter left its code; the context is lost, restart the process",
    803: "the driver and its kernel module do not match; reboot or reinstall the driver",
    900: "this is not allowed while a stream is being captured; prepare and seal the library first",
}

_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
_LOST = frozenset({201, 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
"""Codes after which nothing works in the context any more."""


class Driver:
    """`cuda.bindings.driver`, or a stand-in with the same functions, with results checked."""

    def __init__(self, module: Any = None) -> None:
        """Args:
        module: a stand-in for `cuda.bindings.driver`, in tests.
        """
        self.module = module if module is not None else _import_driver()
        self.launch_address = _launch_address() if module is None else getattr(module, "launch_address", None)
        """Where cuLaunchKernelEx is, for callers in C; None where only `module`'s own function will do."""
        self._own = module is None

    @cached_property
    def encode(self) -> Callable[..., int] | None:
        """cuTensorMapEncodeTiled, with the parameters of `cuda_maps.PROTOTYPE`; None where the driver has
        none."""
        from kiln.runtime.cuda_maps import PROTOTYPE

        stand_in = getattr(self.module, "encode_address", None)
        found = _address("cuTensorMapEncodeTiled") if self._own else stand_in
        return None if found is None else PROTOTYPE(found)

    def call(self, name: str, *args: Any) -> Any:
        """Call a driver function; its results without the status: none, one value, or a tuple.

        Raises:
            ContextLostError: nothing works in this context any more.
            DriverError: any other status but success.
        """
        status, *values = getattr(self.module, name)(*args)
        if int(status) != 0:
            self.refuse(name, status)
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def refuse(self, name: str, status: Any) -> NoReturn:
        """Raise the error for a status other than success."""
        code = int(status)
        label = getattr(status, "name", str(code))
        hint = _HINTS.get(code, "see the CUDA driver's documentation of this code")
        kind = ContextLostError if code in _LOST else DriverError
        raise kind(
            f"{name} returned {code} {label}: {hint}. An earlier asynchronous call may be the cause.",
            code,
            label,
        )


def default_is_per_thread() -> bool:
    """Whether the bindings launch on a default stream per thread, by functions of other names."""
    return os.environ.get(_PER_THREAD, "0") != "0"


def _launch_address() -> int | None:
    if default_is_per_thread():
        return None
    return _address("cuLaunchKernelEx")


def _address(name: str) -> int | None:
    try:
        found = ctypes.cast(getattr(ctypes.CDLL("libcuda.so.1"), name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    return found


def _import_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise UnavailableError(
            f"the package cuda-bindings cannot be imported ({e}); install kernel-kiln[cuda]."
        ) from None
    return driver
