"""A stand-in for the CUDA driver: device memory is host memory, kernels are Python functions."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from kiln.tests.runtime.fake_driver import CUresult, FakeDriver

Hook = Callable[[str, int], None]
"""What a launch does: (entry, address of the table of parameter addresses)."""


def _idle(entry: str, params: int) -> None:
    return None


class HostDriver(FakeDriver):
    """One sm_90 device. `launch` is called for every launch."""

    def __init__(self, launch: Hook = _idle) -> None:
        super().__init__()
        self.launch = launch
        self._held: dict[int, Any] = {}
        self._serial = itertools.count()

    def _take(self, size: int) -> int:
        # Room for kernels that write beyond their operands on purpose.
        buffer = (ctypes.c_char * (size + (1 << 20)))()
        address = (ctypes.addressof(buffer) + 511) // 512 * 512
        self._held[address] = buffer
        return address

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return self._result("cuDeviceGetName", (length, device), b"Host H200\0\0")

    def cuMemAlloc(self, size: int) -> Any:
        return self._result("cuMemAlloc", (size,), self._take(size))

    def cuMemFree(self, address: int) -> Any:
        del self._held[address]
        return self._result("cuMemFree", (address,))

    def cuMemAllocAsync(self, size: int, stream: int) -> Any:
        return self._result("cuMemAllocAsync", (size, stream), self._take(size))

    def cuMemFreeAsync(self, address: int, stream: int) -> Any:
        del self._held[address]
        return self._result("cuMemFreeAsync", (address, stream))

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> Any:
        ctypes.memset(address, value, count)
        return super().cuMemsetD8Async(address, value, count, stream)

    def cuMemcpyHtoD(self, to: int, source: int, size: int) -> Any:
        ctypes.memmove(to, source, size)
        return self._result("cuMemcpyHtoD", (to, source, size))

    def cuMemcpyDtoH(self, to: int, source: int, size: int) -> Any:
        ctypes.memmove(to, source, size)
        return self._result("cuMemcpyDtoH", (to, source, size))

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        status = super().cuLaunchKernelEx(config, function, params, extra)
        if status[0] == CUresult.CUDA_SUCCESS:
            self.launch(function[1].decode(), params)
        return status
