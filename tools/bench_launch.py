"""What a launch costs the host: a bare driver call, bound calls, ordinary calls, and what peers need.

Every way is timed in batches that the device's queue holds, from a settled device; figures are medians over
the batches, in microseconds a call.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from kiln.runtime.bound import BoundCall
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.cuda_launch import CudaCall
from kiln.runtime.cuda_memory import DeviceArray
from kiln.runtime.dtypes import numpy_dtype
from kiln.runtime.load import Library, load
from kiln.tools.console import UsageError, emit, note, table
from kiln.tools.graphs import Stage
from kiln.tools.machine import describe
from kiln.tools.trees import default_tree

BATCH = 400
"""Calls of one batch: fewer than a stream's queue holds."""
BATCHES = 61
NODES = 100
"""Launches of the replayed graph."""
CUDA_SHAPE = (16, 5120)
CPU_SHAPE = (1, 16)
"""So little work that the call is what is timed."""

Way = tuple[str, Callable[[], Any], int]
"""(name, what is timed, launches of one run)."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch's host time."""

    name: str
    median_us: float
    least_us: float
    to_bare: float | None
    """Ratio of the median to that of the bare driver call."""


def timed(run: Callable[[], Any], settle: Callable[[], None], calls: int = 1) -> tuple[float, float]:
    """Median and least microseconds of one of the `calls` that a run makes."""
    samples = []
    count = max(BATCH // calls, 1)
    for _ in range(BATCHES):
        settle()
        start = time.perf_counter_ns()
        for _ in range(count):
            run()
        samples.append((time.perf_counter_ns() - start) / 1e3 / count / calls)
    settle()
    # The first batches load, allocate and warm up.
    kept = samples[BATCHES // 6 :]
    return statistics.median(kept), min(kept)


def optional(name: str) -> Any:
    """A package, or None where it cannot be imported."""
    try:
        return import_module(name)
    except (ImportError, OSError):
        return None


def run(args: argparse.Namespace) -> int:
    """Time every way and print a table."""
    with load(
        args.tree or default_tree(), args.device, threads=1 if args.device == "cpu" else None
    ) as library:
        if "rms_norm" not in library.ops or "fused_add_rms_norm" not in library.ops:
            raise UsageError("launches are timed with rms_norm and fused_add_rms_norm; the tree has them not")
        device = library.device
        if isinstance(device, CudaDevice):
            stage = Stage(device)
            ways, settle = cuda_ways(library, device, stage), stage.settle
        else:
            ways, settle = cpu_ways(library), _nothing
        timings = measure(ways, settle)
        label = describe(device)
    document = {
        "device": label[0],
        "driver": label[1],
        "python": platform.python_version(),
        "batch": BATCH,
        "launches": [asdict(t) for t in timings],
    }
    emit(args, document, lambda: listing(timings))
    return 0


def _nothing() -> None:
    return None


def measure(ways: Iterator[Way], settle: Callable[[], None]) -> list[Timing]:
    """Time each way; garbage is not collected meanwhile."""
    timings: list[Timing] = []
    bare: float | None = None
    gc.collect()
    gc.disable()
    try:
        for name, work, calls in ways:
            median, least = timed(work, settle, calls)
            bare = median if name == BARE else bare
            ratio = None if bare is None else round(median / bare, 3)
            timings.append(Timing(name, round(median, 3), round(least, 3), ratio))
            note(f"{name}: {median:.2f} us")
    finally:
        gc.enable()
    return timings


BARE = "bare cuLaunchKernelEx, prepacked"


def cuda_ways(library: Library, device: CudaDevice, stage: Stage) -> Iterator[Way]:
    """Every way to launch on a GPU that can be tried here."""
    m, n = CUDA_SHAPE
    x, out, weight = (
        DeviceArray(device, s, "bf16", stage.stream) for s in (CUDA_SHAPE, CUDA_SHAPE, CUDA_SHAPE[1:])
    )
    residual = DeviceArray(device, CUDA_SHAPE, "bf16", stage.stream)
    norm, fused = library.op("rms_norm"), library.op("fused_add_rms_norm")
    bound = norm.bind(x, weight, out=out, stream=stage.stream)
    yield from _bare(device, bound)
    yield "bound call", bound, 1
    yield "call, DeviceArrays, out=", lambda: norm(x, weight, out=out, stream=stage.stream), 1
    yield "call, DeviceArrays, output allocated", lambda: norm(x, weight, stream=stage.stream), 1
    given = {"out": (out, residual), "stream": stage.stream}
    yield "fused call, DeviceArrays, out=", lambda: fused(x, weight, residual, **given), 1
    graph = stage.capture(lambda: [bound() for _ in range(NODES)])
    yield f"graph of {NODES} launches", lambda: stage.replay(graph), NODES
    torch = optional("torch")
    if torch is not None and torch.cuda.is_available():
        yield from torch_ways(library, torch, f"cuda:{device.ordinal}", (m, n))
        triton = optional("kiln.tools.bench_triton")
        if triton is not None:
            yield from triton.ways(torch, f"cuda:{device.ordinal}")


def _bare(device: CudaDevice, bound: BoundCall) -> Iterator[Way]:
    """The call that every launch ends in, with everything ready: the measure of the others."""
    call = bound.call
    assert isinstance(call, CudaCall)
    launch, record = device.driver.module.cuLaunchKernelEx, call.record
    yield BARE, partial(launch, record.config, call.function, record.address, 0), 1
    config, function, address = record.config, call.function, record.address
    yield "the same inside a function", lambda: launch(config, function, address, 0), 1
    yield "bare cuCtxGetCurrent", device.driver.module.cuCtxGetCurrent, 1


def torch_ways(library: Library, torch: Any, where: str, shape: tuple[int, int]) -> Iterator[Way]:
    """Calls with torch tensors, and what torch itself needs."""
    kind = torch.bfloat16
    x, residual, out = (torch.zeros(shape, dtype=kind, device=where) for _ in range(3))
    weight = torch.ones(shape[1], dtype=kind, device=where)
    norm, fused = library.op("rms_norm"), library.op("fused_add_rms_norm")
    yield "call, torch tensors, output allocated", lambda: norm(x, weight), 1
    yield "call, torch tensors, out=", lambda: norm(x, weight, out=out), 1
    yield "call, torch tensors, eps=", lambda: norm(x, weight, eps=1e-6), 1
    yield "fused call, torch tensors", lambda: fused(x, weight, residual), 1
    yield "bound call, torch tensors", norm.bind(x, weight, out=out), 1
    yield "torch.empty_like", lambda: torch.empty_like(x), 1
    yield "torch.add(out=)", lambda: torch.add(x, residual, out=out), 1
    functional = torch.nn.functional
    if hasattr(functional, "rms_norm"):
        width = (shape[1],)
        yield "torch.nn.functional.rms_norm", lambda: functional.rms_norm(x, width, weight, 1e-6), 1


def cpu_ways(library: Library) -> Iterator[Way]:
    """The ways that make sense on a CPU; the kernel's own work is in all of them."""
    kind = numpy_dtype("bf16")
    x, residual, out = (np.zeros(CPU_SHAPE, kind) for _ in range(3))
    weight = np.ones(CPU_SHAPE[1], kind)
    norm, fused = library.op("rms_norm"), library.op("fused_add_rms_norm")
    yield "bound call", norm.bind(x, weight, out=out), 1
    yield "call, NumPy arrays, out=", lambda: norm(x, weight, out=out), 1
    yield "call, NumPy arrays, output allocated", lambda: norm(x, weight), 1
    yield "fused call, NumPy arrays", lambda: fused(x, weight, residual), 1
    torch = optional("torch")
    if torch is not None:
        yield from torch_ways(library, torch, "cpu", CPU_SHAPE)


def listing(timings: list[Timing]) -> str:
    """One line a way."""
    rows = [(t.name, f"{t.median_us:.2f}", f"{t.least_us:.2f}", _ratio(t)) for t in timings]
    return table(("host time of a launch", "median us", "least us", "to bare"), rows)


def _ratio(t: Timing) -> str:
    return "" if t.to_bare is None else f"{t.to_bare:.2f}"
