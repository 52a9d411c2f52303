"""A CUDA device for tuning, through the driver alone: operands in rotation, graphs, events."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kiln.runtime.arrays import View, contiguous
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.dtypes import DTYPES, numpy_dtype
from kiln.runtime.entities import Signature, Tensor
from kiln.runtime.expr import Env, compile_expr

Array: TypeAlias = np.ndarray[Any, Any]

BLOCK = (1 << 23) - 40
"""Random elements that are made on the host; device memory repeats them. No power of two, so that rows
differ."""
ALIGN = 256
POISON = 0xFF
"""NaN in every float type."""
NON_BLOCKING = 1
GLOBAL = 0
L2_COVER = 3
"""Operands rotate over so many times the L2 cache."""
MOST_SETS = 48


def random_block(dtype: str, positive: bool, count: int = BLOCK) -> Array:
    """Values of one element type: normal floats, codes without NaN, small integers; `positive` for scales."""
    rng = np.random.default_rng(20260101)
    kind = numpy_dtype(dtype)
    if dtype in ("f8e4m3", "f8e5m2", "bf16", "f16", "f32", "f64"):
        values = rng.random(count, np.float32) + 0.5 if positive else rng.standard_normal(count, np.float32)
        return values.astype(kind)
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(kind)
    low, high = (-8, 8) if dtype == "i8" else (0, 119)
    return rng.integers(low, high, count).astype(kind)


class Arena:
    """Device memory full of random elements of one type, handed out in turn."""

    def __init__(self, device: CudaDevice, block: Array, size: int) -> None:
        self._call = device.driver.call
        self.size = max(size, block.nbytes)
        self.base = int(self._call("cuMemAlloc", self.size))
        self._call("cuMemcpyHtoD", self.base, np.ascontiguousarray(block).ctypes.data, block.nbytes)
        filled = block.nbytes
        while filled < self.size:
            more = min(filled, self.size - filled)
            self._call("cuMemcpyDtoD", self.base + filled, self.base, more)
            filled += more
        self._call("cuCtxSynchronize")  # these copies are on another stream, and not awaited
        self._at = 0

    def take(self, size: int) -> int:
        """The next `size` bytes; from the start again at the end."""
        if self._at + size > self.size:
            self._at = 0
        address = self.base + self._at
        self._at += -(-size // ALIGN) * ALIGN
        return address

    def free(self) -> None:
        """Give the memory back."""
        self._call("cuMemFree", self.base)


class Bench:
    """Operands, graphs and clocks of one device; everything runs on one stream."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.call = device.driver.call
        attribute = device.driver.module.CUdevice_attribute
        query = device._query
        self.l2 = query(attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        self._clocks = (
            query(attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE) // 1000,
            query(attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) // 1000,
        )
        with device.current():
            self.stream = int(self.call("cuStreamCreate", NON_BLOCKING))
            self._events = [self.call("cuEventCreate", 0) for _ in range(2)]
        self._arenas: dict[tuple[str, bool], Arena] = {}
        self._out = self._out_size = 0

    def clocks(self) -> str:
        """The most that the clocks reach, and what they are now where nvidia-smi says it."""
        most = f"at most {self._clocks[0]} MHz, memory {self._clocks[1]} MHz"
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return most
        command = [
            tool, f"--id={self.device.ordinal}", "--format=csv,noheader",
            "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu",
        ]  # fmt: skip
        made = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        lines = made.stdout.strip().splitlines()
        return f"{most}; at the start {lines[0]}" if made.returncode == 0 and lines else most

    def operands(
        self, sig: Signature, types: Mapping[str, str], shape: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """Sets of inputs and poisoned outputs, as many as launches rotate over."""
        env = Env()
        env.dims = dict(shape)
        layouts = {t.name: _layout(t, types[t.name], env) for t in sig.tensors if t.name in types}
        coded = any(DTYPES[types[t.name]] == 1 for t in sig.tensors if t.name in types)
        reads = {t.name: t for t in sig.tensors if t.role == "in" and t.name in types}
        size = sum(_bytes(layouts[n]) for n in reads)
        count = max(1, min(MOST_SETS, -(-L2_COVER * self.l2 // max(size, 1))))
        outs = {t.name: layouts[t.name] for t in sig.tensors if t.role != "in" and t.name in types}
        keys = {n: (layouts[n][1], coded and layouts[n][1] == "f32") for n in reads}
        for key in dict.fromkeys(keys.values()):
            self._ensure(key, sum(_bytes(layouts[n]) + ALIGN for n in reads if keys[n] == key))
        made = []
        for _ in range(count):
            found: dict[str, Any] = {t.name: None for t in sig.tensors if t.role == "in"}
            found |= {name: self._random(layouts[name], keys[name]) for name in reads}
            made.append(found)
        self._outputs(outs, made)
        return made

    def _ensure(self, key: tuple[str, bool], size: int) -> None:
        """Random memory of at least so many bytes; before any of it is handed out, as the old is freed."""
        arena = self._arenas.get(key)
        if arena is not None and arena.size >= size:
            return
        if arena is not None:
            self.settle()
            arena.free()
        whole = size + (L2_COVER + 1) * self.l2
        self._arenas[key] = Arena(self.device, random_block(*key), whole)

    def _random(self, layout: tuple[tuple[int, ...], str], key: tuple[str, bool]) -> View:
        shape, dtype = layout
        arena = self._arenas[key]
        at = arena.take(_bytes(layout))
        return View(at, shape, contiguous(shape), dtype, self.device.ordinal, False, arena)

    def _outputs(
        self, outs: Mapping[str, tuple[tuple[int, ...], str]], made: Sequence[dict[str, Any]]
    ) -> None:
        total = sum(-(-_bytes(layout) // ALIGN) * ALIGN for layout in outs.values())
        if total > self._out_size:
            if self._out:
                self.settle()
                self.call("cuMemFree", self._out)
            self._out, self._out_size = int(self.call("cuMemAlloc", max(total, 1))), total
        at, views = self._out, []
        for shape, dtype in outs.values():
            views.append(View(at, shape, contiguous(shape), dtype, self.device.ordinal, False, self))
            at += -(-_bytes((shape, dtype)) // ALIGN) * ALIGN
        for found in made:
            found["out"] = tuple(views)

    def poison(self) -> None:
        """Fill every output with NaN."""
        self.call("cuMemsetD8Async", self._out, POISON, self._out_size, self.stream)

    def rows(self, view: View, wanted: Sequence[int]) -> Array:
        """Some rows of an array, on the host."""
        self.settle()
        width = view.strides[0] if len(view.shape) > 1 else 1
        kind = numpy_dtype(view.dtype)
        found = np.empty((len(wanted), width), kind)
        for i, row in enumerate(wanted):
            at = view.ptr + row * width * kind.itemsize
            self.call("cuMemcpyDtoH", found[i:].ctypes.data, at, width * kind.itemsize)
        return found

    def whole(self, view: View) -> Array:
        """All of an array, on the host."""
        self.settle()
        found = np.empty(view.shape, self.kind(view))
        self.call("cuMemcpyDtoH", found.ctypes.data, view.ptr, found.nbytes)
        return found

    def kind(self, view: View) -> Any:
        """The array's NumPy type."""
        return numpy_dtype(view.dtype)

    def settle(self) -> None:
        """Wait for everything."""
        self.call("cuStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], Any]) -> Any:
        """A graph of what `work` queues on the stream."""
        module = self.device.driver.module
        mode = getattr(module, "CUstreamCaptureMode", lambda value: value)(GLOBAL)
        self.call("cuStreamBeginCapture", self.stream, mode)
        try:
            work()
        finally:
            graph = self.call("cuStreamEndCapture", self.stream)
        ready = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        return ready

    def drop(self, graph: Any) -> None:
        """Forget a graph."""
        self.call("cuGraphExecDestroy", graph)

    def replay_us(self, graph: Any) -> float:
        """Microseconds of one replay."""
        begin, end = self._events
        self.call("cuEventRecord", begin, self.stream)
        self.call("cuGraphLaunch", graph, self.stream)
        self.call("cuEventRecord", end, self.stream)
        self.call("cuEventSynchronize", end)
        return float(self.call("cuEventElapsedTime", begin, end)) * 1e3


def _layout(tensor: Tensor, dtype: str, env: Env) -> tuple[tuple[int, ...], str]:
    return tuple(int(compile_expr(e)(env)) for e in tensor.shape), dtype


def _bytes(layout: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = layout
    size = DTYPES[dtype]
    for extent in shape:
        size *= extent
    return size


def summary(samples: Sequence[float]) -> tuple[float, float]:
    """Median and spread (of the middle half) in microseconds, to a nanosecond."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    spread = ordered[-1 - quarter] - ordered[quarter]
    return round(statistics.median(ordered), 3), round(spread, 3)
