"""Candidates for scaled products of e4m3 on Hopper (sm_90a): tiles of the warp-specialized kernel of
`gemm_fp8_ws`. `gemm_fp8` lists them among the others of their ops.

Measured on an H200, medians of graph replays over random data, against the best of torch's `_scaled_mm` and
vLLM's CUTLASS kernels in the same run. 4096x7168x16384: a scale for each row and column 661 us (1456
TFLOP/s) against 605, block scales 795 us (1210) against 745. Geometric means over model shapes, of the best
candidate for each, M = 64 / 128 / 256 / 512 / 1024 / 4096: rows and columns 0.87 / 0.94 / 0.98 / 0.87 / 0.89
/ 0.86, blocks 1.20 / 1.11 / 0.99 / 0.95 / 0.96 / 0.96. The peers' row and column kernels add up all products
in the tensor cores' bits, where one-signed sums of 16384 terms are off by 0.045 (relative L2), and here by
1.7e-3. Where it loses: short sums over many tiles (4096x24576x1536 0.80), since nothing is multiplied while
both warpgroups store, and up to 64 rows, where a launch makes its tensor maps first.

Dead ends, as ratios of time to what stayed: sums promoted every 256 0.90 to 1.0, and off by 2.7e-3 where all
terms have one sign; both pieces' products in flight (128x192) 1.15; the next step's in flight as well
(128x128) 1.35; x in registers 1.12; one warpgroup a microsecond behind the other 0.97 to 1.06; tensor maps
made before the partitions 1.02 to 1.07 up to 128 rows; programs that share a tile along the inner dimension
where tiles fill the device 1.7 and more, by four 1.0 to 1.5. Block scales that a step waits for soon after
their load cost 1.15 to 1.5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import Constant, CudaPrimitive, Number, Pointer, Scratch
from kiln.backends.cuda.variants.gemm_hopper import LIMITS, MULTIPROCESSORS, SM, K, M, N
from kiln.ir.dtypes import BF16, F8E4M3, F16, F32, I32, DType
from kiln.ir.spec import Contract

Expr: TypeAlias = Any

KERNEL = "kiln.backends.cuda.kernels.gemm_fp8_ws:scaled_matmul_bt"
X_SCALE_STEP: Expr = ["min", ["sub", ["dim", "SM"], 1], 1]
WEIGHT_SCALE_STEP: Expr = ["min", ["sub", ["dim", "SN"], 1], 1]
"""How far the next row's scale is: 0 where there is one for all."""
SHORT_SUMS = Contract("envelope", rel_l2=2.0**-8, max_eps=2.0**14)
"""f32 outputs of e4m3 tensor cores, which add products in fewer bits than an output has: 2**-9 of the
largest. Measured on an H200: relative L2 1.3e-4, and 6.2e-4 where all terms have one sign."""


@dataclass(frozen=True)
class Tile:
    """How programs take the output apart."""

    m: int
    n: int
    stages: int
    split: int = 1
    """Programs that share a tile along the inner dimension."""
    rows: int | None = None
    """Up to how many rows of x it is for; None: any number."""
    buffers: int = 2
    """For the output: each of 128 bytes of every row of a warpgroup."""

    @property
    def name(self) -> str:
        """Part of the variant's name."""
        return f"ws_m{self.m}_n{self.n}_s{self.stages}" + (f"_x{self.split}" if self.split > 1 else "")

    @property
    def tiles(self) -> Expr:
        """How many there are."""
        return ["mul", ["cdiv", M, self.m], ["cdiv", N, self.n]]

    def chunks(self, out: DType) -> int:
        """Of 128 bytes of every row, in a warpgroup's half."""
        return (self.n if self.m == 128 else self.n // 2) * out.bytes // 128


WIDE = Tile(128, 256, 3, buffers=4)
SQUARE = Tile(128, 128, 6)
FLAT = Tile(64, 128, 8, rows=256)
TILES = (
    WIDE,
    Tile(128, 256, 4),
    SQUARE,
    Tile(64, 256, 4, rows=1024),
    FLAT,
    Tile(64, 128, 8, split=2, rows=256),
)
GROUP = 16
"""Row blocks that are walked together, so that weights stay in L2."""
OUTPUTS = (BF16, F16, F32)
OPS = ("scaled_matmul_bt", "scaled_matmul_bt_alpha", "scaled_matmul_bt_block")


def _scales(op: str) -> tuple[list[Pointer | Number], list[Number], dict[str, Constant | None]]:
    """Pointers to an op's scales, how far they are apart, and what is constant about them."""
    names = ("x_scale", "weight_scale")
    if op == "scaled_matmul_bt_alpha":
        constants = {"x_scale": None, "x_scale_stride": 0, "weight_scale_stride": 1}
        return [Pointer("weight_scale", "alpha", F32.name)], [], {**constants, **dict.fromkeys(COLUMNS, 0)}
    pointers: list[Pointer | Number] = [Pointer(name, name, F32.name) for name in names]
    if op == "scaled_matmul_bt_block":
        strides = [Number(f"{t}_{s}", "i64", [s, t]) for t in names for s in ("stride", "colstride")]
        return pointers, strides, {}
    steps = zip(names, (X_SCALE_STEP, WEIGHT_SCALE_STEP), strict=True)
    return pointers, [Number(f"{t}_stride", "i32", step) for t, step in steps], dict.fromkeys(COLUMNS, 0)


COLUMNS = ("x_scale_colstride", "weight_scale_colstride")


def _scratch(tile: Tile) -> tuple[tuple[Scratch, ...], list[Pointer | Number]]:
    """Memory for the parts of shared tiles, and its parameters."""
    if tile.split == 1:
        return (), []
    parts = ["mul", tile.tiles, tile.split * tile.m * tile.n * F32.bytes]
    counters = ["mul", tile.tiles, 2 * I32.bytes]
    return (Scratch("parts", parts), Scratch("counters", counters, zeroed=True)), [
        Pointer("parts", "scratch:parts", F32.name, "write", align=16),
        Pointer("counters", "scratch:counters", I32.name, "write"),
    ]


def _when(tile: Tile, out: DType) -> Expr:
    types = {"x": F8E4M3, "weight": F8E4M3, "out": out}
    rows = [] if tile.rows is None else [["le", M, tile.rows]]
    return [
        "and", ["dtype", "out", out.name], *rows, *LIMITS,
        # The copy engine stores whole pieces of 16 bytes, whatever the extent of a row.
        ["divisible", N, 16 // out.bytes], ["divisible", K, 16],
        *(["divisible", ["stride", operand], 16 // dtype.bytes] for operand, dtype in types.items()),
        *(["aligned", operand, 16] for operand in types),
    ]  # fmt: skip


def _row(op: str, out: DType, tile: Tile) -> CudaPrimitive:
    scales, distances, constants = _scales(op)
    scratch, shared = _scratch(tile)
    blocks = op == "scaled_matmul_bt_block"
    constants |= {
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": 128, "STAGES": tile.stages, "GROUP": GROUP,
        "BUFFERS": min(tile.buffers, tile.chunks(out)), "SPLIT": tile.split, "BLOCKS": blocks,
    }  # fmt: skip
    if not shared:
        constants |= {"parts": None, "counters": None}
    return CudaPrimitive(
        op=op,
        variant=f"{out.name}_{tile.name}",
        kernel=KERNEL,
        params=(
            Pointer("x", "x", F8E4M3.name, align=16), Pointer("weight", "weight", F8E4M3.name, align=16),
            *scales, Pointer("bias", "bias", out.name),
            Pointer("out", "out", out.name, "write", align=16), *shared,
            Number("M", "i32", M), Number("N", "i32", N), Number("K", "i32", K),
            *(Number(f"{t}_stride", "i64", ["stride", t]) for t in ("x", "weight", "out")), *distances,
        ),
        constants=constants,
        grid=(["min", MULTIPROCESSORS, ["mul", tile.tiles, tile.split]], 1, 1),
        when=_when(tile, out),
        num_stages=tile.stages,
        # A block's products are scaled and added by one instruction, as the contract allows.
        options={"enable_fp_fusion": True} if blocks else {},
        scratch=scratch,
        min_sm=SM,
        max_sm=SM,
        contract=SHORT_SUMS if out is F32 else None,
    )  # fmt: skip


MANY = {BF16: WIDE, F16: WIDE, F32: SQUARE}
"""By output, for any number of rows. With block scales, the wide tile of f32 spills 52 bytes."""


def ws_rows() -> Iterator[CudaPrimitive]:
    """The candidates: every tile for bf16, two for other outputs."""
    for op in OPS:
        for out in OUTPUTS:
            for tile in TILES if out is BF16 else (MANY[out], FLAT):
                yield _row(op, out, tile)


def ws_defaults() -> tuple[str, ...]:
    """Those for calls that nothing was measured for, up to 256 rows first."""
    return tuple(f"{out.name}_{tile.name}" for out in OUTPUTS for tile in (FLAT, MANY[out]))
