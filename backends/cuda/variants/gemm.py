"""CUDA realizations of matmul_bt and matmul for every shape: one schedule per bucket of rows, and one for
operands without 16-byte alignment."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer, Unit
from kiln.ir.dtypes import BF16, F16, F32, DType

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
    """N, K and rows in multiples of 16 elements, 16-byte addresses: what masks leave whole are vectors."""
    hosts: Literal["none", "short", "any"] = "none"
    """An activation of the 64 elements that a thread has of 128x128 is 50 to 90 KB of code, with spills
    (tanh): such calls of many rows run the product and then the rest."""

    @property
    def name(self) -> str:
        """Part of the variant's name: the bucket."""
        bucket = "any" if self.rows is None else f"m{self.rows}"
        return bucket if self.aligned else f"{bucket}_unaligned"


HALF = (
    Schedule(16, (16, 32, 128), 4, 4, hosts="any"),
    Schedule(64, (64, 64, 64), 4, 4, hosts="any"),
    Schedule(None, (128, 128, 64), 8, 3, hosts="short"),
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
HOST = ("matmul_bt", BF16, F32)
"""Whose kernels epilogues are inlined into."""
Row: TypeAlias = tuple[str, DType, DType, tuple[Schedule, ...]]
"""An op, the type of x and weight, the output's type, and schedules in the order in which they are tried."""
SHIPPED: tuple[Row, ...] = (
    ("matmul_bt", BF16, BF16, HALF),
    ("matmul_bt", BF16, F32, HALF),
    ("matmul_bt", F16, F16, HALF[2:]),
    ("matmul_bt", F16, F32, HALF[2:]),
    ("matmul_bt", F32, F32, SINGLE),
    ("matmul", BF16, BF16, HALF[2:]),
    ("matmul", BF16, F32, HALF[3:]),
    ("matmul", F16, F16, HALF[3:]),
    ("matmul", F32, F32, SINGLE[1:]),
)


def _name(kind: DType, out: DType, schedule: Schedule) -> str:
    return f"{kind.name}{'' if kind is out else f'_{out.name}'}_{schedule.name}"


def _when(kind: DType, out: DType, schedule: Schedule) -> Expr:
    types = {"x": kind, "weight": kind, "out": out}
    when: Expr = ["and", *(["dtype", operand, dtype.name] for operand, dtype in types.items())]
    if schedule.rows is not None:
        when += [["le", M, schedule.rows]]
    if schedule.aligned:
        when += [["divisible", e, 16] for e in (N, K, *(["stride", operand] for operand in types))]
        when += [["aligned", operand, 16] for operand in types]
    return when


def row(op: str, kind: DType, out: DType, schedule: Schedule, priority: int) -> CudaPrimitive:
    """The kernel of one schedule; `kind` is the type of x and weight."""
    block_m, block_n, block_k = schedule.block
    unit: Unit = 16 if schedule.aligned else 1
    return CudaPrimitive(
        op=op,
        variant=_name(kind, out, schedule),
        kernel="kiln.backends.cuda.kernels.gemm:matmul",
        params=(
            Pointer("x", "x", kind.name, align=unit),
            Pointer("weight", "weight", kind.name, align=unit),
            Pointer("out", "out", out.name, "write", align=unit),
            Number("M", "i32", M),
            Number("N", "i32", N, unit),
            Number("K", "i32", K, unit),
            Number("x_stride", "i64", ["stride", "x"], unit),
            Number("weight_stride", "i64", ["stride", "weight"], unit),
            Number("out_stride", "i64", ["stride", "out"], unit),
        ),
        constants={
            "extra": None, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": GROUP,
            "BT": op == "matmul_bt", "EPILOGUE": None,
        },
        grid=(["mul", ["cdiv", M, block_m], ["cdiv", N, block_n]], 1, 1),
        when=_when(kind, out, schedule),
        priority=priority,
        num_warps=schedule.warps,
        num_stages=schedule.stages,
        hosts=schedule.hosts if (op, kind, out) == HOST else "none",
    )  # fmt: skip


def _rows(wanted: str) -> Iterator[CudaPrimitive]:
    for op, kind, out, schedules in SHIPPED:
        for rank, schedule in enumerate(schedules if op == wanted else ()):
            yield row(op, kind, out, schedule, len(schedules) - 1 - rank)


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(_rows("matmul_bt"))
DEFAULTS = tuple(candidate.variant for candidate in CANDIDATES)
"""What runs shapes that nothing was measured for: all of them, those for few rows first."""
PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(_rows("matmul"))
"""Weights by columns: one kernel for aligned operands and one for others, nothing to choose among."""
