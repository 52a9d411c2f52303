"""CPU realizations of scaled 8-bit matrix products: one entry an op, told the output type by number."""

from typing import Any, Literal, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.ir.dtypes import BF16, F8E4M3, F16, F32, I8, I32, DType
from kiln.recipes.gemm_fp8 import BLOCK

Expr: TypeAlias = Any
Scaling: TypeAlias = Literal["scaled", "alpha", "block", "int8"]

ROWS, COLS, DEPTH = 64, 64, 256
"""A tile's rows and columns; steps of k that are widened at once, where no scale says otherwise. A tile's
columns lie in one block of scales."""
TYPE_CODES = {F32: 0, BF16: 1, F16: 2}
"""The template's TYPE_F32 …"""
SCALINGS: dict[str, Scaling] = {
    "scaled_matmul_bt": "scaled",
    "scaled_matmul_bt_alpha": "alpha",
    "scaled_matmul_bt_block": "block",
    "scaled_matmul_bt_int8": "int8",
}
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
STEPS: dict[str, Expr] = {
    "x_scale": ["min", ["sub", ["dim", "SM"], 1], 1],
    "weight_scale": ["min", ["sub", ["dim", "SN"], 1], 1],
}
"""How far the next row's scale is: 0 where there is one for all."""


def _scales(scaling: Scaling) -> tuple[tuple[CpuPointer, ...], tuple[CpuNumber, ...]]:
    """Pointers and strides of an op's scales."""
    if scaling == "alpha":
        one = CpuPointer("weight_scale", "alpha", F32.name, F32.bytes)
        return (one,), (CpuNumber("weight_scale_stride", "i64", 1),)
    both = tuple(CpuPointer(name, name, F32.name, F32.bytes) for name in STEPS)
    if scaling == "block":
        kinds = ("stride", "colstride")
        return both, tuple(CpuNumber(f"{t}_{kind}", "i64", [kind, t]) for t in STEPS for kind in kinds)
    zero = ("azp", "azp_adj") if scaling == "int8" else ()
    points = tuple(CpuPointer(name, name, I32.name, I32.bytes) for name in zero)
    return (*both, *points), tuple(CpuNumber(f"{t}_stride", "i64", step) for t, step in STEPS.items())


def _row(op: str, out: DType) -> CpuPrimitive:
    scaling = SCALINGS[op]
    codes = I8 if scaling == "int8" else F8E4M3
    pointers, strides = _scales(scaling)
    return CpuPrimitive(
        op=op,
        variant=out.name,
        template="gemm_fp8.c.j2",
        entry=f"kiln_{op}",
        params=(
            CpuPointer("x", "x", codes.name, codes.bytes),
            CpuPointer("weight", "weight", codes.name, codes.bytes),
            *pointers,
            CpuPointer("bias", "bias", out.name, out.bytes),
            CpuPointer("out", "out", out.name, out.bytes, "write"),
            CpuNumber("M", "i64", M),
            CpuNumber("N", "i64", N),
            CpuNumber("K", "i64", ["dim", "K"]),
            *(CpuNumber(f"{t}_stride", "i64", ["stride", t]) for t in ("x", "weight", "out")),
            *strides,
            CpuNumber("out_type", "i64", TYPE_CODES[out]),
        ),
        grid=["mul", ["cdiv", M, ROWS], ["cdiv", N, COLS]],
        when=["dtype", "out", out.name],
        constants={
            "scaling": scaling, "rows": ROWS, "cols": COLS, "depth": BLOCK if scaling == "block" else DEPTH,
        },
    )  # fmt: skip


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(_row(op, out) for op in SCALINGS for out in TYPE_CODES)
