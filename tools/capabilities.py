"""What the capabilities of the matrix are proved by: the kernels that exercise them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kiln.runtime.manifest import Kernel

Exercises = Callable[[str, Kernel], bool]
"""Whether loading and launching this kernel on this target goes through the capability."""

PRODUCTS = ("matmul", "matmul_bt", "matmul_packed")
BASELINE = "x86-64"
"""The ISA tier that every x86-64 CPU has; all others are wider."""


def _merged_gates(_target: str, kernel: Kernel) -> bool:
    """Whether b and a are read with row strides of their own: as views of one product."""
    return {("stride", "a"), ("stride", "b")} <= {p.value for p in kernel.params if p.kind == "scalar"}


def _one_type(_target: str, kernel: Kernel) -> bool:
    """Whether it gates and normalizes in one element type."""
    of = {p.operand: p.dtype for p in kernel.params if p.operand is not None}
    gated = ("x", "gate", "weight", "out")
    return of.keys() >= set(gated) and len({of[n] for n in gated}) == 1


EXERCISES: Mapping[str, Exercises] = {
    # Selected by its manifest, proved, loaded into a context and launched on a stream.
    "cuda_dispatch": lambda target, _: _on_cuda(target),
    # One of several candidates of its op, taken by the one order of providers.
    "provider_selection": lambda target, kernel: True,
    # What the launches of the chunked delta rule leave for each other lies in the stream's pool.
    "scratch": lambda target, kernel: _on_cuda(target) and kernel.op.startswith("gated_delta_rule_chunk_"),
    # Took both as columns of one product, where a model has a merged projection.
    "packed_ba": _merged_gates,
    # Took what the recurrence wrote, its gate and the norm's weight in the model's type, and wrote it.
    "model_dtype": _one_type,
    # Timed as replays of a CUDA graph: chosen from the manifest alone, launched while a stream was captured.
    "capture": lambda target, kernel: _on_cuda(target) and kernel.op.startswith("scaled_matmul_bt"),
    "cpu_products": lambda target, kernel: target.startswith("cpu-") and kernel.op in PRODUCTS,
    "wide_x86_products": lambda target, kernel: (
        target == "cpu-x86_64" and kernel.op in PRODUCTS and _tier(kernel) != BASELINE
    ),
}


def _on_cuda(target: str) -> bool:
    return target.startswith("sm_")


def _tier(kernel: Kernel) -> str | None:
    return None if kernel.isa is None else kernel.isa.tier
