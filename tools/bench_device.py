"""How `kiln bench` makes operands and takes time on each kind of device."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from kiln.runtime.load import Library
from kiln.tools.console import UsageError
from kiln.tools.machine import describe

CACHE = 180_000_000
"""Bytes of operands that launches rotate over: three times the 60 MB of an H200's L2."""
NUMPY = {
    "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "u8": np.uint8, "f8e4m3": ml_dtypes.float8_e4m3fn, "i32": np.int32, "i64": np.int64,
}  # fmt: skip


class Bench(Protocol):
    """A device to time on."""

    device: str
    driver: str
    stream: Any
    bandwidth: float
    """Bytes a second of a copy, read and written; 0 if not measured."""
    limit_from: str
    copy_version: str
    """What copies the same bytes beside each op."""

    def random(self, shape: Sequence[int], dtype: str) -> Any:
        """A random operand."""
        ...

    def poisoned(self, shape: Sequence[int], dtype: str) -> Any:
        """An output full of 0xff bytes."""
        ...

    def bytes(self, array: Any) -> int:
        """Size of an operand."""
        ...

    def copies(self, size: int) -> int:
        """Operand sets to rotate over."""
        ...

    def copy(self, size: int) -> Sequence[Callable[[], Any]]:
        """Runs that copy `size` bytes, read and written together, over as many inputs as an op has."""
        ...

    def settle(self) -> None:
        """Wait until operands are as they were made."""
        ...

    def check_written(self, outputs: Sequence[Any]) -> None:
        """Refuse a call that left an output as it was poisoned."""
        ...

    def time(self, runs: Sequence[Callable[[], Any]]) -> tuple[float, float]:
        """Median and spread of one run, in microseconds."""
        ...


def _values(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype in ("i32", "i64"):
        return rng.integers(0, 1000, shape).astype(NUMPY[dtype])
    if dtype == "u8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    return rng.standard_normal(shape, dtype=np.float32).astype(NUMPY[dtype])


class CpuBench:
    """One thread, its CPU time."""

    def __init__(self, library: Library) -> None:
        self.device, self.driver = describe(library.device)
        self.stream = None
        self.limit_from = "copy of 256 MB by NumPy, one thread"
        self.copy_version = f"NumPy {np.__version__}"
        a = np.zeros(128_000_000, np.uint8)
        b = np.empty_like(a)
        median, _ = self.time([lambda: np.copyto(b, a)])
        self.bandwidth = 2 * a.nbytes / median * 1e6

    def random(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """See Bench."""
        return _values(shape, dtype)

    def poisoned(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """See Bench."""
        array = np.empty(shape, NUMPY[dtype])
        array.view(np.uint8).fill(0xFF)
        return array

    def bytes(self, array: Any) -> int:
        """See Bench."""
        return int(array.nbytes)

    def copies(self, size: int) -> int:
        """Rotation is left out: sizes beyond the cache are given by the shape."""
        return 1

    def copy(self, size: int) -> Sequence[Callable[[], Any]]:
        """See Bench."""
        a = np.zeros(max(size // 2, 1), np.uint8)
        b = np.empty_like(a)
        return [lambda: np.copyto(b, a)]

    def settle(self) -> None:
        """See Bench."""

    def check_written(self, outputs: Sequence[Any]) -> None:
        """See Bench."""
        for array in outputs:
            if array.size > 8 and bool((array.view(np.uint8) == 0xFF).all()):
                raise UsageError("an output was not written; the tree is wrong: run kiln test")

    def time(self, runs: Sequence[Callable[[], Any]]) -> tuple[float, float]:
        """See Bench."""
        for run in runs:
            run()
        samples: list[float] = []
        while len(samples) < 5 or (sum(samples) < 4e5 and len(samples) < 200):
            start = time.thread_time_ns()
            for run in runs:
                run()
            samples.append((time.thread_time_ns() - start) / 1e3 / len(runs))
        return statistics.median(samples), max(samples) - min(samples)


class CudaBench:
    """Replays of a CUDA graph, timed with events; PyTorch allocates and captures."""

    def __init__(self, library: Library) -> None:
        try:
            self.torch = importlib.import_module("torch")
        except ImportError:
            raise UsageError(
                "timing on CUDA takes its operands and graphs from PyTorch; install kernel-kiln[torch]"
            ) from None
        t = self.torch
        self.types = {
            "bf16": t.bfloat16, "f16": t.float16, "f32": t.float32, "f64": t.float64,
            "u8": t.uint8, "i32": t.int32, "i64": t.int64,
        }  # fmt: skip
        self.where = f"cuda:{getattr(library.device, 'ordinal', 0) or 0}"
        self.device, self.driver = describe(library.device)
        self.stream = t.cuda.Stream(self.where)
        self.limit_from = "copy kernel over 2 GiB in the same run"
        self.copy_version = f"PyTorch {t.__version__}"
        self.bandwidth = 0.0
        a, b = (t.empty(1 << 28, dtype=t.int32, device=self.where).random_() for _ in range(2))
        median, _ = self.time([lambda: t.add(a, 0, out=b)])
        self.bandwidth = 2 * a.nbytes / median * 1e6

    def random(self, shape: Sequence[int], dtype: str) -> Any:
        """See Bench."""
        t = self.torch
        if dtype in ("i32", "i64", "u8"):
            return t.randint(0, 200, tuple(shape), device=self.where, dtype=self.types[dtype])
        return t.randn(tuple(shape), device=self.where).to(self.types[dtype])

    def poisoned(self, shape: Sequence[int], dtype: str) -> Any:
        """See Bench."""
        array = self.torch.empty(tuple(shape), device=self.where, dtype=self.types[dtype])
        array.view(self.torch.uint8).fill_(0xFF)
        return array

    def bytes(self, array: Any) -> int:
        """See Bench."""
        return int(array.nbytes)

    def copies(self, size: int) -> int:
        """See Bench."""
        return max(1, min(48, CACHE // max(size, 1) + 1))

    def copy(self, size: int) -> Sequence[Callable[[], Any]]:
        """See Bench."""
        t, words = self.torch, max(size // 8, 1)
        out = t.empty(words, dtype=t.int32, device=self.where)
        sources = [t.empty_like(out).random_() for _ in range(self.copies(size))]
        return [partial(t.add, source, 0, out=out) for source in sources]

    def settle(self) -> None:
        """See Bench."""
        self.torch.cuda.synchronize(self.where)

    def check_written(self, outputs: Sequence[Any]) -> None:
        """See Bench."""
        self.settle()
        for array in outputs:
            if array.numel() > 8 and bool((array.view(self.torch.uint8) == 0xFF).all()):
                raise UsageError("an output was not written; the tree is wrong: run kiln test --device cuda")

    def time(self, runs: Sequence[Callable[[], Any]]) -> tuple[float, float]:
        """See Bench."""
        t = self.torch
        with t.cuda.stream(self.stream):
            for run in runs[:3]:
                run()
        t.cuda.synchronize(self.where)
        count = max(len(runs), 12)
        graph = t.cuda.CUDAGraph()
        with t.cuda.graph(graph, stream=self.stream):
            for i in range(count):
                runs[i % len(runs)]()
        samples: list[float] = []
        for _ in range(14):
            start, end = (t.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / count)
        kept = samples[3:]
        return statistics.median(kept), max(kept) - min(kept)
