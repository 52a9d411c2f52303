"""Candidates for products with few rows of x: tiles that split the inner dimension among programs, and sums
without matrix units for one row. Which call runs which is the tuning database's to say; DEFAULTS serve the
rest. Within one candidate a row's bits do not depend on M; among candidates they do, as slices of k differ.

Measured on an H200 (copy 4.22 TB/s; cuBLAS through torch 2.11 in the same run; us, bf16):
    M x N x K       best  cuBLAS     M x N x K        best  cuBLAS
    1x4096x4096     10.2  12.7       1x34816x5120     81.9  85.5
    16x4096x4096    11.2  12.9       16x34816x5120    85.7  86.6
    32x4096x4096    12.2  13.1       16x7168x16384    55.7  63.4
    64x4096x4096    13.6  12.2       64x7168x16384    61.7  61.8
    16x2112x7168    10.4  13.0       16x10240x8192    41.5  45.8
    16x256x7168      5.2   6.7       16x151936x4096    277   291
Weights over 64 MB are read at 96 to 108 % of the copy's speed up to M = 16, but for 4096x12288: 92 %.
From M = 64 on cuBLAS is ahead, up to twice: every program reads all of x, at the weight's own rate.
e4m3, promoted: 16x4096x4096 8.2, fast 7.3 (CUTLASS 7.6); 16x7168x16384 32.6, fast 29.8 (CUTLASS 30.5).
Another H200 was 5 % slower throughout, cuBLAS less so.

Dead ends, on the same machines:
* Four rows without matrix units: 16.1 us at 2x4096x4096, against 10.8.
* A persistent grid whose programs share all steps evenly (stream-K): slower, by 1 to 40 %.
* Warps that share the k of a step (a batched product of 16 to 64 features): 12.6 us at 16x4096x4096.
* Weights from memory straight to the registers of the matrix instruction (Gluon, k width 8): 2 % ahead at
  8x10240x8192 and 1 % at 4x4096x4096, else 1 to 12 % behind; blocks of a cluster that add through each
  other's shared memory were no better. Only 8x64x2048 gains: 2.9 us against 3.4.
* Programmatic dependent launch: 0.1 to 0.4 us less where it gains (16x2112x7168: 10.31 against 10.44).
* Eviction hints: Triton's asynchronous copies drop them. Nine stages, steps of 512 bytes: even.
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
"""Products of e4m3 that matrix units of sm_90 may add up in their own 14 bits before f32 takes over. Without
it sums of 16384 positive products are off by 25 %, as torch's fast accumulation is."""
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
    Tile(8, 64, 256, 4, 4, (1, 4, 12, 16)),
    Tile(8, 64, 256, 4, 5, (2, 4, 8)),
    Tile(8, 32, 256, 2, 6, (1, 2, 4)),
    Tile(8, 32, 512, 4, 6, (1,), DEEP),
    Tile(16, 64, 256, 4, 5, (1, 2, 4, 6, 8)),
    Tile(16, 64, 256, 4, 7, (1,), DEEP),
    Tile(16, 32, 512, 4, 5, (1, 8)),
    Tile(32, 64, 256, 4, 4, (1, 2, 4, 6)),
    Tile(32, 64, 256, 4, 7, (1, 2), DEEP),
    Tile(64, 64, 256, 4, 4, (2,)),
    Tile(64, 64, 256, 4, 5, (1, 2), DEEP),
    Tile(64, 64, 128, 4, 6, (1, 2), (80, 99)),
)
"""One of them is within 2 % of the fastest tried for 271 of 276 calls measured (H200, 23 shapes, six M)."""
ONE_ROW = (OneRow(16, 512, 4, 5), OneRow(8, 1024, 4, 6), OneRow(32, 512, 4, 4))
RAGGED = ((TILES[0], 4), (TILES[4], 2), (TILES[7], 2), (TILES[9], 2))
"""Tiles and splits that take any K in multiples of 16, for shapes that nothing was measured for. The mask
costs nothing that can be measured (16x4096x4096: 11.88 us, 11.95 without)."""


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


FEW_BYTES = {"spill_stores": 16, "spill_loads": 16, "stack": 16}
"""What kernels that write another type than they read may spill: some tiles take 8 bytes from sm_100 on."""


def _split_k(kind: Kind, tile: Tile, split: int, even: bool = True) -> CudaPrimitive:
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
        budget={} if kind.scaled or kind.out is kind.operand else FEW_BYTES,
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
            yield from (_split_k(kind, tile, split) for split in tile.splits)
        yield from (_split_k(kind, tile, split, even=False) for tile, split in RAGGED)


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(_candidates())
DEFAULTS: tuple[str, ...] = tuple(
    c.variant for c in CANDIDATES if c.kernel.endswith(":one_row") or not c.constants["EVEN_K"]
)
"""What runs few rows of a shape that nothing was measured for."""
GENERAL: tuple[str, ...] = (
    "bf16_onerow_n16_k256_w4s5",
    "bf16_splitk_n64_m8_k128_w4s4x4_ragged",
    "bf16_splitk_n64_m16_k128_w4s5x2_ragged",
    "f16_splitk_n64_m16_k128_w4s5x2_ragged",
    "f8e4m3_bf16_splitk_n64_m8_k256_w4s4x4_ragged",
    "f8e4m3_bf16_splitk_n64_m16_k256_w4s5x2_ragged",
    "f8e4m3_f16_splitk_n64_m16_k256_w4s5x2_ragged",
)
"""Of these, what ships where nothing was measured."""
