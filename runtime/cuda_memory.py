"""Memory of a CUDA device: what scratch pools take, and the arrays that the runtime owns."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kiln.runtime.arrays import View, contiguous
from kiln.runtime.driver import default_is_per_thread
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.errors import DriverError, UnavailableError

if TYPE_CHECKING:
    from kiln.runtime.cuda import CudaDevice

_CAPTURE_IMPLICIT = 906
"""Asking about the legacy stream while another one is being captured."""
PER_THREAD = 2
"""The handle CU_STREAM_PER_THREAD."""


class CudaMemory:
    """Stream-ordered memory in the device's context."""

    deferred = True

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device

    def _call(self, name: str, *args: Any) -> Any:
        with self._device.current():
            return self._device.driver.call(name, *args)

    def allocate(self, size: int, stream: int, zeroed: bool = False) -> int:
        """See Memory."""
        # A graph that is captured here may be replayed on a stream that knows nothing of this one's order.
        return self._allocated(size, stream, zeroed, wait=True)

    def _allocated(self, size: int, stream: int, zeroed: bool, wait: bool) -> int:
        address = 0
        try:
            with self._device.current():
                address = int(self._device.driver.call("cuMemAllocAsync", size, stream))
                if zeroed:
                    self._device.driver.call("cuMemsetD8Async", address, 0, size, stream)
                if wait:
                    self._device.driver.call("cuStreamSynchronize", stream)
        except DriverError:
            if address:
                with suppress(DriverError):
                    self.free(address)
            raise
        return address

    def free(self, address: int) -> None:
        """See Memory."""
        self._call("cuMemFree", address)

    def allocate_ordered(self, size: int, stream: int, zeroed: bool = False) -> int:
        """See Memory."""
        return self._allocated(size, stream, zeroed, wait=False)

    def free_ordered(self, address: int, stream: int) -> None:
        """See Memory."""
        self._call("cuMemFreeAsync", address, stream)

    def fill(self, address: int, size: int, stream: int) -> None:
        """See Memory."""
        self._call("cuMemsetD8Async", address, 0xFF, size, stream)

    def capturing(self, stream: int) -> bool:
        """See Memory; also while another stream is captured that the legacy stream would wait for."""
        try:
            return int(self._call("cuStreamIsCapturing", stream)) != 0
        except DriverError as e:
            if e.code == _CAPTURE_IMPLICIT:
                return True
            raise

    def synchronize(self, stream: int) -> None:
        """See Memory."""
        self._call("cuStreamSynchronize", stream)

    def check_shared(self, stream: int) -> None:
        """See Memory."""
        if stream == PER_THREAD or (stream == 0 and default_is_per_thread()):
            raise UnavailableError(
                f"found stream {stream}, which is another one in each thread; scratch is handed on along one "
                "stream: make one and pass it."
            )


class DeviceArray:
    """Device memory that the runtime owns, for callers whose arrays belong to no framework that can be asked
    for one.

    It offers `__cuda_array_interface__`; types that the interface cannot name (bf16, FP8) are told as raw
    bytes of their size. An array without elements has no memory and the address 0.
    """

    def __init__(self, device: "CudaDevice", shape: tuple[int, ...], dtype: str, stream: int) -> None:
        self.shape, self.dtype = shape, dtype
        self.strides = contiguous(shape)
        """Row-major, in elements."""
        self._device, self._stream = device, stream
        count = DTYPES[dtype]
        for n in shape:
            count *= n
        self.pointer = device.memory.allocate_ordered(count, stream) if count else 0

    def __kiln_view__(self) -> View:
        """The view that this runtime's own calls take."""
        return View(self.pointer, self.shape, self.strides, self.dtype, self._device.ordinal, False, self)

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
        if pointer and not self._device.forked:
            # The process is shutting down or the context is lost: the memory went with it.
            with suppress(DriverError, UnavailableError):
                self._device.memory.free_ordered(pointer, self._stream)
            with suppress(DriverError):
                self._device.release_if_gone()
