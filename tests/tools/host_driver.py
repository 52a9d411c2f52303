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


class Captured(list[tuple[str, Any]]):
    """A graph: (entry, copy of the parameters) of each launch."""


class GraphDriver(HostDriver):
    """A device whose streams can be captured into graphs that run later."""

    def __init__(self, launch: Hook = _idle) -> None:
        super().__init__(launch)
        self._handles = itertools.count(0x1000)
        self._graphs: dict[int, Captured] = {}
        self.lost = 0
        """Bytes that vanish at each launch."""
        self._free_bytes = 1 << 36

    def cuStreamCreate(self, flags: int) -> Any:
        return self._result("cuStreamCreate", (flags,), next(self._handles))

    def cuCtxSynchronize(self) -> Any:
        return self._result("cuCtxSynchronize", ())

    def cuCtxCreate(self, flags: int, device: int) -> Any:
        context = next(self._handles)
        self.stack.append(context)
        return self._result("cuCtxCreate", (flags, device), context)

    def cuCtxDestroy(self, context: int) -> Any:
        return self._result("cuCtxDestroy", (context,))

    def cuMemGetInfo(self) -> Any:
        return self._result("cuMemGetInfo", (), self._free_bytes, 1 << 37)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Any:
        self.capturing.add(stream)
        self._graphs[stream] = Captured()
        return self._result("cuStreamBeginCapture", (stream, mode))

    def cuStreamEndCapture(self, stream: int) -> Any:
        self.capturing.remove(stream)
        return self._result("cuStreamEndCapture", (stream,), self._graphs.pop(stream))

    def cuGraphInstantiate(self, graph: Captured, flags: int) -> Any:
        return self._result("cuGraphInstantiate", (flags,), graph)

    def cuGraphLaunch(self, graph: Captured, stream: int) -> Any:
        for entry, params in graph:
            self.launch(entry, ctypes.addressof(params))
        return self._result("cuGraphLaunch", (stream,))

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        self._free_bytes -= self.lost
        if config.hStream not in self.capturing:
            return super().cuLaunchKernelEx(config, function, params, extra)
        status = FakeDriver.cuLaunchKernelEx(self, config, function, params, extra)
        if status[0] == CUresult.CUDA_SUCCESS:
            self._graphs[config.hStream].append((function[1].decode(), _copied(params)))
        return status


def _copied(params: int) -> Any:
    """The table of parameter addresses and the parameters behind it, elsewhere."""
    count = (ctypes.c_uint64.from_address(params).value - params) // 8
    copy = (ctypes.c_uint64 * (2 * count)).from_buffer_copy(ctypes.string_at(params, 16 * count))
    for i in range(count):
        copy[i] = ctypes.addressof(copy) + 8 * (count + i)
    return copy
