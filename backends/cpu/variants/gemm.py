"""CPU realization of matmul_bt: sums over k in order, one output block a tile, per element type."""

from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.ir.dtypes import BF16, F16, F32, DType

Expr: TypeAlias = Any

ROWS, COLS, DEPTH, GROUP_ROWS = 64, 32, 256, 4
"""A tile's rows and columns; columns of the inner dimension transposed at once (32 KiB of f32); rows whose
sums stay in registers."""
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]


def _matmul_bt(dtype: DType, out: DType) -> CpuPrimitive:
    name = dtype.name if out is dtype else f"{dtype.name}_{out.name}"
    strides = tuple(CpuNumber(f"{t}_stride", "i64", ["stride", t]) for t in ("x", "weight", "out"))
    return CpuPrimitive(
        op="matmul_bt",
        variant=name,
        template="gemm.c.j2",
        entry=f"matmul_bt_{name}",
        params=(
            CpuPointer("x", "x", dtype.name, dtype.bytes),
            CpuPointer("weight", "weight", dtype.name, dtype.bytes),
            CpuPointer("out", "out", out.name, out.bytes, "write"),
            CpuNumber("M", "i64", M),
            CpuNumber("N", "i64", N),
            CpuNumber("K", "i64", ["dim", "K"]),
            *strides,
        ),
        grid=["mul", ["cdiv", M, ROWS], ["cdiv", N, COLS]],
        when=["and", ["dtype", "x", dtype.name], ["dtype", "out", out.name]],
        constants={
            "dtype": dtype.name, "out": out.name, "rows": ROWS, "cols": COLS, "depth": DEPTH,
            "group_rows": GROUP_ROWS,
        },
    )  # fmt: skip


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(
    _matmul_bt(d, out) for d, out in ((BF16, BF16), (BF16, F32), (F16, F16), (F16, F32), (F32, F32))
)
