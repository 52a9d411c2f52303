"""Candidates for products with few rows of x: tiles that split the inner dimension among programs, and sums
without matrix units for one row. Which call runs which is the tuning database's to say; DEFAULTS serve the
rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import Constant, CudaPrimitive, Number, Pointer, Scratch
from kiln.ir.dtypes import BF16, F8E4M3, F16, F32, I32, DType

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.gemm_skinny"
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
K: Expr = ["dim", "K"]
X_SCALE_STEP: Expr = ["min", ["sub", ["dim", "SM"], 1], 1]
WEIGHT_SCALE_STEP: Expr = ["min", ["sub", ["dim", "SN"], 1], 1]
"""How far the next row's scale is: 0 where there is one for all."""
PROMOTED = 128
"""Products of e4m3 that tensor cores of sm_90 may add up in their own 14 bits before f32 takes over: without
it sums of 16384 positive products lose a fifth."""
DEEP = (90, 119)
"""Capabilities with 227 KiB of shared memory for a block."""
ANY = (80, 999)


@dataclass(frozen=True)
class Tile:
    """A program's tile and its pipeline, with the numbers of slices of k worth trying."""

    rows: int
    """Of x: BLOCK_M."""
    features: int
    """Rows of weight: BLOCK_N."""
    step: int
    """Bytes along k of a step, which is BLOCK_K elements."""
    warps: int
    stages: int
    splits: tuple[int, ...]
    capabilities: tuple[int, int] = ANY

    def name(self, step: int, split: int) -> str:
        """Part of the variant's name: the constants; `step` in elements."""
        pipeline = f"w{self.warps}s{self.stages}x{split}"
        return f"splitk_n{self.features}_m{self.rows}_k{step}_{pipeline}"


@dataclass(frozen=True)
class OneRow:
    """How one row of x is multiplied without matrix units."""

    features: int
    """Rows of weight: BLOCK_N."""
    step: int
    """Bytes along k of a step."""
    warps: int
    stages: int


TILES = (
    Tile(8, 64, 256, 4, 4, (1, 2, 3, 4, 8, 12, 16)),
    Tile(8, 64, 256, 4, 5, (1, 2, 4)),
    Tile(8, 32, 256, 2, 6, (1, 2, 4, 8)),
    Tile(16, 64, 256, 4, 4, (1, 4, 8)),
    Tile(16, 64, 256, 4, 5, (1, 2, 4)),
    Tile(16, 64, 128, 4, 6, (1, 3)),
    Tile(16, 32, 512, 4, 5, (1, 8)),
    Tile(32, 64, 256, 4, 4, (1, 2, 4, 8)),
    Tile(32, 64, 128, 4, 6, (1, 2)),
    Tile(64, 64, 256, 4, 4, (1, 2, 4)),
    Tile(64, 64, 128, 4, 6, (1, 2)),
    Tile(64, 128, 128, 4, 4, (1,)),
)
RAGGED = ((TILES[0], 4), (TILES[4], 2), (TILES[7], 2), (TILES[9], 2))
"""Tiles and splits that take any K in multiples of 16, for shapes that nothing was measured for."""
ONE_ROW = (OneRow(16, 512, 4, 5),)


@dataclass(frozen=True)
class Kind:
    """Element types of an op's operands that candidates exist for."""

    op: str
    operand: DType
    out: DType
    capabilities: tuple[int, int] = ANY

    @property
    def name(self) -> str:
        """Start of the variant's name."""
        return self.operand.name if self.operand is self.out else f"{self.operand.name}_{self.out.name}"

    @property
    def scaled(self) -> bool:
        """Whether operands are codes with scales."""
        return self.operand is F8E4M3


KINDS = (
    Kind("matmul_bt", BF16, BF16),
    Kind("matmul_bt", BF16, F32),
    Kind("matmul_bt", F16, F16),
    Kind("scaled_matmul_bt", F8E4M3, BF16, (89, 999)),
    Kind("scaled_matmul_bt", F8E4M3, F16, (89, 999)),
)


def _needs(kind: Kind, rows: int, step: int) -> Expr:
    """What a kernel needs of a call; `step` is what must divide K."""
    types = {"x": kind.operand, "weight": kind.operand, "out": kind.out}
    when: Expr = [
        "and",
        *(["dtype", operand, dtype.name] for operand, dtype in types.items()),
        ["le", M, rows],
    ]
    when += [["divisible", e, 16] for e in (K, *(["stride", operand] for operand in types))]
    when += [["divisible", K, step]] if step > 16 else []
    return when + [["aligned", operand, 16] for operand in types]


def _sizes() -> tuple[Number, ...]:
    return (
        Number("M", "i32", M),
        Number("N", "i32", N),
        Number("K", "i32", K, 16),
        *(Number(f"{t}_stride", "i64", ["stride", t], 16) for t in ("x", "weight", "out")),
    )


def _split_k(kind: Kind, tile: Tile, split: int, even: bool) -> CudaPrimitive:
    step = tile.step // kind.operand.bytes
    tiles: Expr = ["mul", ["cdiv", M, tile.rows], ["cdiv", N, tile.features]]
    scales: tuple[Pointer, ...] = ()
    steps: tuple[Number, ...] = ()
    shared: tuple[Pointer, ...] = ()
    scratch: tuple[Scratch, ...] = ()
    constants: dict[str, Constant | None] = {"extra": None, "EPILOGUE": None}
    constants |= {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.features,
        "BLOCK_K": step,
        "SPLIT": split,
        "EVEN_K": even,
    }
    if kind.scaled:
        scales = (
            Pointer("x_scale", "x_scale", F32.name),
            Pointer("weight_scale", "weight_scale", F32.name),
            Pointer("bias", "bias", kind.out.name),
        )
        steps = (
            Number("x_scale_step", "i32", X_SCALE_STEP),
            Number("weight_scale_step", "i32", WEIGHT_SCALE_STEP),
        )
        constants |= {"IMPRECISE": PROMOTED}
    else:
        absent = ("x_scale", "weight_scale", "bias", "x_scale_step", "weight_scale_step", "IMPRECISE")
        constants |= dict.fromkeys(absent)
    if split > 1:
        shared = (
            Pointer("partials", "scratch:partials", F32.name, "write", align=16),
            Pointer("arrivals", "scratch:arrivals", I32.name, "write", align=16),
        )
        area = 4 * tile.rows * tile.features * split
        scratch = (
            Scratch("partials", ["mul", tiles, area]),
            Scratch("arrivals", ["mul", tiles, 4], zeroed=True),
        )
    else:
        constants |= {"partials": None, "arrivals": None}
    least = max(kind.capabilities[0], tile.capabilities[0])
    return CudaPrimitive(
        op=kind.op,
        variant=f"{kind.name}_{tile.name(step, split)}{'' if even else '_ragged'}",
        kernel=f"{KERNELS}:split_k",
        params=(
            Pointer("x", "x", kind.operand.name, align=16),
            Pointer("weight", "weight", kind.operand.name, align=16),
            *scales,
            Pointer("out", "out", kind.out.name, "write", align=16),
            *shared,
            *_sizes(),
            *steps,
        ),
        constants=constants,
        grid=(tiles if split == 1 else ["mul", tiles, split], 1, 1),
        when=_needs(kind, 2 * tile.rows if even else tile.rows, step if even else 16),
        num_warps=tile.warps,
        num_stages=tile.stages,
        scratch=scratch,
        min_sm=least,
        max_sm=min(kind.capabilities[1], tile.capabilities[1]),
    )


def _one_row(kind: Kind, row: OneRow) -> CudaPrimitive:
    step = row.step // kind.operand.bytes
    return CudaPrimitive(
        op=kind.op,
        variant=f"{kind.name}_onerow_n{row.features}_k{step}_w{row.warps}s{row.stages}",
        kernel=f"{KERNELS}:one_row",
        params=(
            Pointer("x", "x", kind.operand.name, align=16),
            Pointer("weight", "weight", kind.operand.name, align=16),
            Pointer("out", "out", kind.out.name, "write", align=16),
            *_sizes(),
        ),
        constants={
            "extra": None, "BLOCK_N": row.features, "BLOCK_K": step, "STAGES": row.stages, "EPILOGUE": None,
        },
        grid=(["cdiv", N, row.features], M, 1),
        when=_needs(kind, 1, 16),
        num_warps=row.warps,
        min_sm=kind.capabilities[0],
        max_sm=kind.capabilities[1],
    )  # fmt: skip


def _candidates() -> Iterator[CudaPrimitive]:
    for kind in KINDS:
        if not kind.scaled:
            yield from (_one_row(kind, row) for row in ONE_ROW)
        for tile in TILES:
            yield from (_split_k(kind, tile, split, even=True) for split in tile.splits)
        yield from (_split_k(kind, tile, split, even=False) for tile, split in RAGGED)


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(_candidates())
DEFAULTS: tuple[str, ...] = tuple(
    c.variant for c in CANDIDATES if c.kernel.endswith(":one_row") or not c.constants["EVEN_K"]
)
"""What runs few rows of a shape that nothing was measured for."""
