"""CUDA realizations of batches of matrix products: the schedules of one product, with a program axis for the
batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Unit
from kiln.backends.cuda.variants.gemm import HALF, SINGLE, M, N, Schedule, row
from kiln.ir.dtypes import BF16, F32, DType

Expr: TypeAlias = Any

B: Expr = ["dim", "B"]
X, WEIGHT, OUT = (["stride", operand] for operand in ("x", "weight", "out"))
STRIDES: Mapping[str, Mapping[str, Expr]] = {
    "matmul_bt_batched": {
        "x_stride": X,
        "out_stride": OUT,
        "x_batch": ["mul", M, X],
        "out_batch": ["mul", M, OUT],
    },
    "matmul_bt_heads": {
        "x_stride": ["mul", B, X],
        "out_stride": ["mul", B, OUT],
        "x_batch": X,
        "out_batch": OUT,
    },
}
"""By op: from one row of a product to the next, and from one product to the next."""
SHIPPED: tuple[tuple[str, DType, tuple[Schedule, ...]], ...] = (
    ("matmul_bt_batched", BF16, HALF[2:]),
    ("matmul_bt_batched", F32, SINGLE[1:]),
    ("matmul_bt_heads", BF16, (HALF[0], *HALF[2:])),
)


def _row(op: str, kind: DType, schedule: Schedule, priority: int) -> CudaPrimitive:
    one = row("matmul_bt", kind, kind, schedule, priority)
    values = {**STRIDES[op], "weight_batch": ["mul", N, WEIGHT]}
    unit: Unit = 16 if schedule.aligned else 1
    kept = (replace(p, value=values.get(p.name, p.value)) if isinstance(p, Number) else p for p in one.params)
    batch = (Number(name, "i64", values[name], unit) for name in ("x_batch", "weight_batch", "out_batch"))
    return replace(
        one,
        op=op,
        kernel="kiln.backends.cuda.kernels.gemm:matmul_batched",
        params=(*kept, *batch),
        constants={k: v for k, v in one.constants.items() if k.startswith("BLOCK") or k == "GROUP"},
        grid=(one.grid[0], B, 1),
    )


PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(
    _row(op, kind, schedule, len(schedules) - 1 - rank)
    for op, kind, schedules in SHIPPED
    for rank, schedule in enumerate(schedules)
)
