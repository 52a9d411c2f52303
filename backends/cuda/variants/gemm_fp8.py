"""CUDA realizations of scaled 8-bit matrix products: tiles for every target, and block-scaled kernels with
split inner dimension for few rows. Those for Hopper are in `gemm_fp8_ws`.

From sm_89 on tensor cores take e4m3. Below, codes are read as bytes and decoded to f16, exactly (`via_f16`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import Constant, CudaPrimitive, Number, Pointer, Scratch, Unit
from kiln.backends.cuda.variants.gemm_fp8_ws import (
    OUTPUTS,
    SHORT_SUMS,
    WEIGHT_SCALE_STEP,
    X_SCALE_STEP,
    ws_defaults,
    ws_rows,
)
from kiln.ir.dtypes import BF16, F8E4M3, F32, I8, I32, U8, DType
from kiln.ir.spec import Contract

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.gemm_fp8"
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
K: Expr = ["dim", "K"]
GROUP = 8
"""Row blocks that are walked together, so that weights stay in L2."""
ENDS = 128
"""Products of e4m3 that tensor cores of sm_90 may add up in their own bits before f32 takes over. If it never
does, sums of 16384 terms are off by 3.5e-3 (relative L2), and by 0.22 where all have one sign."""
SCALES = (Pointer("x_scale", "x_scale", "f32"), Pointer("weight_scale", "weight_scale", "f32"))
CODES: dict[str, tuple[str, str, int, int]] = {
    "f8e4m3": (F8E4M3.name, "", 89, 999),
    "via_f16": (U8.name, "via_f16_", 80, 88),
    "i8": (I8.name, "", 80, 999),
}
"""How codes are read -> type of the pointers, start of the variant's name, least and greatest capability."""


@dataclass(frozen=True)
class Tile:
    """Block shape and pipelining for up to `rows` rows (None: any number)."""

    rows: int | None
    block: tuple[int, int, int]
    """BLOCK_M, BLOCK_N, BLOCK_K."""
    warps: int
    stages: int
    aligned: bool = True
    """Rows and inner dimension in multiples of 16 elements, 16-byte addresses."""
    capabilities: tuple[int, int] = (80, 999)

    @property
    def name(self) -> str:
        """Part of the variant's name: the bucket."""
        bucket = "any" if self.rows is None else f"m{self.rows}"
        return bucket if self.aligned else f"{bucket}_unaligned"


FEW = (
    Tile(16, (16, 32, 128), 4, 4, capabilities=(80, 89)),
    Tile(16, (16, 32, 128), 4, 4, capabilities=(120, 999)),
    Tile(64, (64, 64, 128), 4, 3),
)
"""For few rows. Tensor cores of sm_90 to sm_11x have no tile of 16 rows of e4m3."""
MANY = (
    Tile(None, (128, 128, 128), 8, 3, capabilities=(89, 999)),
    Tile(None, (128, 128, 64), 8, 3, capabilities=(80, 88)),
    Tile(None, (32, 64, 64), 8, 1, aligned=False),
)
INTEGER_MANY = (
    Tile(None, (128, 128, 128), 8, 3, capabilities=(80, 90)),
    Tile(None, (128, 64, 128), 8, 3, capabilities=(100, 999)),
    MANY[-1],
)
"""Without tensor memory for i8, 128 x 128 sums spill from sm_100 on."""
BLOCK_MANY = (
    Tile(None, (128, 128, 128), 8, 3, capabilities=(89, 999)),
    Tile(None, (64, 64, 128), 4, 3, capabilities=(80, 88)),
    Tile(None, (32, 64, 128), 8, 1, aligned=False),
)
SPLIT_TILES = (
    ((16, 64), (1, 2, 4, 8, 16), 4, 6),
    ((16, 64), (1, 4, 8), 4, 8),
    ((16, 128), (1, 2, 4, 8), 4, 5),
    ((32, 64), (2, 4, 8), 4, 6),
    ((32, 128), (1, 2, 4), 4, 4),
    ((64, 64), (1, 2, 4, 8), 4, 5),
    ((64, 128), (1, 2, 4), 4, 4),
)
"""Rows of x and of weight of a block, numbers of splits, warps, stages: candidates for few rows."""


def _aligned(*scales: str) -> list[Expr]:
    needs: list[Expr] = [["divisible", e, 16] for e in (["stride", t] for t in ("x", "weight", "out"))]
    return [*needs, *(["aligned", operand, 16] for operand in ("x", "weight", "out", *scales))]


def _operands(codes: str, out: str, unit: Unit) -> tuple[Pointer, ...]:
    return (
        Pointer("x", "x", codes, align=unit),
        Pointer("weight", "weight", codes, align=unit),
        Pointer("bias", "bias", out),
        Pointer("out", "out", out, "write", align=unit),
    )


def _sizes(unit: Unit, inner: Unit | None = None) -> tuple[Number, ...]:
    return (
        Number("M", "i32", M),
        Number("N", "i32", N),
        Number("K", "i32", K, unit if inner is None else inner),
        Number("x_stride", "i64", ["stride", "x"], unit),
        Number("weight_stride", "i64", ["stride", "weight"], unit),
        Number("out_stride", "i64", ["stride", "out"], unit),
    )


def _when(out: str, tile: Tile) -> Expr:
    when: Expr = ["and", ["dtype", "out", out]]
    if tile.rows is not None:
        when += [["le", M, tile.rows]]
    return when + ([["divisible", K, 16], *_aligned()] if tile.aligned else [])


def _contract(codes: str, out: str) -> Contract | None:
    return SHORT_SUMS if out == F32.name and codes == F8E4M3.name else None


def _tile(op: str, kind: str, out: str, tile: Tile) -> CudaPrimitive | None:
    """A row of scaled_matmul_bt, its alpha form or its i8 form; None where no target has it."""
    codes, prefix, least, most = CODES[kind]
    least, most = max(least, tile.capabilities[0]), min(most, tile.capabilities[1])
    if least > most:
        return None
    unit: Unit = 16 if tile.aligned else 1
    x, weight, bias, destination = _operands(codes, out, unit)
    constants: dict[str, Constant | None] = dict(
        zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile.block, strict=True)
    )
    constants |= {"GROUP": GROUP, "IMPRECISE": min(ENDS, tile.block[2])}
    scales: tuple[Pointer, ...] = (
        Pointer("x_scale", "x_scale", "f32"),
        Pointer("weight_scale", "weight_scale", "f32"),
    )
    steps: tuple[Number, ...] = (
        Number("x_scale_step", "i32", X_SCALE_STEP), Number("weight_scale_step", "i32", WEIGHT_SCALE_STEP),
    )  # fmt: skip
    if op == "scaled_matmul_bt_alpha":
        scales, steps = (Pointer("weight_scale", "alpha", "f32"),), ()
        constants |= {"x_scale": None, "x_scale_step": 0, "weight_scale_step": 1}
    zero: tuple[Pointer, ...] = ()
    if codes == I8.name:
        zero = (Pointer("azp", "azp", I32.name), Pointer("azp_adj", "azp_adj", I32.name))
    else:
        constants |= {"azp": None, "azp_adj": None}
    part = f"_sm{tile.capabilities[0]}" if tile.rows == 16 else ""
    return CudaPrimitive(
        op=op,
        variant=f"{prefix}{out}_{tile.name}{part}",
        kernel=f"{KERNELS}:scaled_matmul_bt",
        params=(x, weight, *scales, *zero, bias, destination, *_sizes(unit), *steps),
        constants=constants,
        grid=(["mul", ["cdiv", M, tile.block[0]], ["cdiv", N, tile.block[1]]], 1, 1),
        when=_when(out, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        min_sm=least,
        max_sm=most,
        contract=_contract(codes, out),
    )


def _strides(dtype: Any) -> tuple[Number, ...]:
    return tuple(
        Number(f"{t}_{s}", dtype, [s, t])
        for t in ("x_scale", "weight_scale")
        for s in ("stride", "colstride")
    )


FUSED = {"enable_fp_fusion": True}
"""A block's products are scaled and added by one instruction, as the contract allows."""


def _block(kind: str, out: str, tile: Tile) -> CudaPrimitive | None:
    """A row of scaled_matmul_bt_block, one program a tile; None where no target has it."""
    codes, prefix, least, most = CODES[kind]
    least, most = max(least, tile.capabilities[0]), min(most, tile.capabilities[1])
    if least > most:
        return None
    unit: Unit = 16 if tile.aligned else 1
    x, weight, bias, destination = _operands(codes, out, unit)
    return CudaPrimitive(
        op="scaled_matmul_bt_block",
        variant=f"{prefix}{out}_{tile.name}",
        kernel=f"{KERNELS}:scaled_matmul_bt_block",
        params=(x, weight, *SCALES, bias, destination, *_sizes(unit), *_strides("i64")),
        constants={**dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile.block, strict=True)), "GROUP": GROUP},
        grid=(["mul", ["cdiv", M, tile.block[0]], ["cdiv", N, tile.block[1]]], 1, 1),
        when=_when(out, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        options=FUSED,
        min_sm=least,
        max_sm=most,
        contract=_contract(codes, out),
    )


def _split(kind: str, out: str, block: tuple[int, int], split: int, warps: int, stages: int) -> CudaPrimitive:
    """A candidate of scaled_matmul_bt_block for few rows, whose inner dimension is cut into `split` parts."""
    codes, prefix, least, most = CODES[kind]
    x, weight, bias, destination = _operands(codes, out, 16)
    tiles: Expr = ["mul", ["cdiv", M, block[0]], ["cdiv", N, block[1]]]
    scratch = (
        Scratch("partials", ["mul", tiles, 4 * split * block[0] * block[1]]),
        Scratch("arrivals", ["mul", tiles, 4], zeroed=True),
    )
    memory = (
        Pointer("partials", "scratch:partials", "f32", "write", align=16),
        Pointer("arrivals", "scratch:arrivals", I32.name, "write", align=16),
    )
    return CudaPrimitive(
        op="scaled_matmul_bt_block",
        variant=f"{prefix}{out}_split{split}_m{block[0]}_n{block[1]}_w{warps}_s{stages}",
        kernel=f"{KERNELS}:scaled_matmul_bt_block_split",
        params=(x, weight, *SCALES, bias, destination, *memory, *_sizes(16), *_strides("i64")),
        constants={"BLOCK_M": block[0], "BLOCK_N": block[1], "BLOCK_K": 128, "SPLIT": split},
        grid=(tiles, split, 1),
        when=["and", ["dtype", "out", out], ["le", M, block[0]], ["divisible", K, 16], *_aligned()],
        num_warps=warps,
        num_stages=stages,
        options=FUSED,
        scratch=scratch,
        min_sm=least,
        # With mma.sync of sm_120 the largest tile spills 20 bytes.
        max_sm=min(most, 119) if block == (64, 128) else most,
        contract=_contract(codes, out),
    )


def _tiles_for(out: DType, many: tuple[Tile, ...], few: tuple[Tile, ...] = FEW) -> tuple[Tile, ...]:
    """bf16 outputs have kernels for few rows, and one for operands that are no multiples of 16: peers take
    such operands for no output."""
    return (*few, *many) if out is BF16 else tuple(t for t in many if t.aligned)


def _tiles() -> Iterator[CudaPrimitive | None]:
    """Tiles of every op that has no block scales."""
    ops = {"scaled_matmul_bt": ("f8e4m3", "via_f16"), "scaled_matmul_bt_alpha": ("f8e4m3", "via_f16")}
    for op, kinds in {**ops, "scaled_matmul_bt_int8": ("i8",)}.items():
        for kind in kinds:
            for out in OUTPUTS:
                many = INTEGER_MANY if kind == "i8" else MANY
                for tile in _tiles_for(out, many):
                    yield _tile(op, kind, out.name, tile)


def _blocks() -> Iterator[CudaPrimitive | None]:
    for out in OUTPUTS:
        for kind in ("f8e4m3", "via_f16"):
            for block, splits, warps, stages in SPLIT_TILES if out is BF16 and kind == "f8e4m3" else ():
                for split in splits:
                    yield _split(kind, out.name, block, split, warps, stages)
            for tile in _tiles_for(out, BLOCK_MANY, FEW[2:]):
                yield _block(kind, out.name, tile)


CANDIDATES: tuple[CudaPrimitive, ...] = (
    *(row for row in (*_tiles(), *_blocks()) if row is not None), *ws_rows(),
)  # fmt: skip
FIRST = (
    "bf16_split4_m16_n128_w4_s5", "bf16_split4_m32_n64_w4_s6", "bf16_split2_m64_n64_w4_s5", "bf16_m64",
    *ws_defaults(),
)  # fmt: skip
"""On an H200: 16x4096x7168 14.7 us, the best candidate 14.0."""
DEFAULTS: tuple[str, ...] = tuple(
    dict.fromkeys(
        (*FIRST, *(r.variant for r in CANDIDATES if "_split" not in r.variant and "_ws_" not in r.variant))
    )
)
"""What runs shapes that nothing was measured for: what is for few rows first."""
GENERAL = tuple(name for name in DEFAULTS if name != "bf16_split4_m32_n64_w4_s6")
"""Of these, what ships where nothing was measured."""
