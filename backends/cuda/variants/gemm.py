"""CUDA realizations of matmul_bt: one schedule per bucket of rows, and one for operands without 16-byte
alignment."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer, Unit
from kiln.ir.dtypes import BF16, F16, F32

Expr: TypeAlias = Any

M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
K: Expr = ["dim", "K"]


@dataclass(frozen=True)
class Schedule:
    """Block shape and pipelining for up to `rows` rows (None: any number)."""

    rows: int | None
    block: tuple[int, int, int]
    """BLOCK_M, BLOCK_N, BLOCK_K."""
    warps: int
    stages: int
    aligned: bool = True
    """Rows and inner dimension in multiples of 16 elements, 16-byte addresses."""

    @property
    def name(self) -> str:
        """Part of the variant's name: the bucket."""
        bucket = "any" if self.rows is None else f"m{self.rows}"
        return bucket if self.aligned else f"{bucket}_unaligned"


HALF = (
    Schedule(16, (16, 32, 128), 4, 4),
    Schedule(64, (64, 64, 64), 4, 4),
    Schedule(None, (128, 128, 64), 8, 3),
    Schedule(None, (32, 32, 32), 4, 2, aligned=False),
)
"""bf16; f16 has the last two. The largest keeps 96 KiB in flight, within the 99 KiB of sm_86, sm_89 and
sm_12x."""
SINGLE = (
    Schedule(None, (64, 64, 16), 4, 2),
    Schedule(None, (32, 32, 16), 4, 2, aligned=False),
)
"""f32 in IEEE arithmetic, without tensor cores."""
GROUP = 8


def _when(dtype: str, schedule: Schedule) -> Expr:
    when: Expr = ["and", ["dtype", "x", dtype]]
    if schedule.rows is not None:
        when += [["le", M, schedule.rows]]
    if schedule.aligned:
        when += [["divisible", e, 16] for e in (K, ["stride", "x"], ["stride", "weight"], ["stride", "out"])]
        when += [["aligned", operand, 16] for operand in ("x", "weight", "out")]
    return when


def _matmul_bt(dtype: str, schedule: Schedule, priority: int) -> CudaPrimitive:
    block_m, block_n, block_k = schedule.block
    unit: Unit = 16 if schedule.aligned else 1
    return CudaPrimitive(
        op="matmul_bt",
        variant=f"{dtype}_{schedule.name}",
        kernel="kiln.backends.cuda.kernels.gemm:matmul_bt",
        params=(
            Pointer("x", "x", dtype, align=unit),
            Pointer("weight", "weight", dtype, align=unit),
            Pointer("out", "out", dtype, "write", align=unit),
            Number("M", "i32", M),
            Number("N", "i32", N),
            Number("K", "i32", K, unit),
            Number("x_stride", "i64", ["stride", "x"], unit),
            Number("weight_stride", "i64", ["stride", "weight"], unit),
            Number("out_stride", "i64", ["stride", "out"], unit),
        ),
        constants={"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": GROUP},
        grid=(["mul", ["cdiv", M, block_m], ["cdiv", N, block_n]], 1, 1),
        when=_when(dtype, schedule),
        priority=priority,
        num_warps=schedule.warps,
        num_stages=schedule.stages,
    )


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(
    _matmul_bt(dtype, schedule, len(table) - 1 - rank)
    for dtype, table in ((BF16.name, HALF), (F16.name, HALF[2:3]), (F32.name, SINGLE))
    for rank, schedule in enumerate(table)
)
DEFAULTS = tuple(candidate.variant for candidate in CANDIDATES)
"""What runs shapes that nothing was measured for: all of them, those for few rows first."""
