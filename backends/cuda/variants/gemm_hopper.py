"""Candidates for dense products on Hopper (sm_90a): blocks of the warp-specialized kernel of
`gemm_hopper`, for matmul_bt of 16-bit types.

Measured on an H200, medians of graph replays over random data, against the best of cuBLAS in the same run:
bf16 1380 us (797 TFLOP/s) against 1376 at 8192^3, 1.10 of cuBLAS at 4096^3; geometric means over 19 model
shapes, of the best candidate for each: M = 64 0.81, 128 0.85, 256 0.86, 512 0.92, 1024 0.93, 2048 1.00,
4096 1.01, 8192 1.02. Where it loses: N = 2112 and 576,
which fill the multiprocessors badly (0.4 to 0.9), and few rows, where the three tensor maps that a launch
makes cost 2 us (maps from the host: 16.5 -> 14.5 us at 128x7168x2048).

Dead ends: products of e4m3, which the same kernel makes as fast as its peers at many rows, keep too few
bits of sums over thousands of terms (relative L2 0.0040 at K = 16384, where 0.0039 is promised), since
nothing moves them to f32 along the way. Steps shared over all programs (split) read x and weight at as many
places of K as there are programs, out of step with L2: 0.68 of cuBLAS where the arithmetic would give 0.95
(2048x2112x7168), so that they pay only where weight is read once. Clusters of two with multicast, two
producer warps and warpgroups that take whole blocks in turn hang on the device, for a reason not found; so
does this kernel with its parts in files of their own and its scales read before the steps. Launching
dependents early (PDL) gains 0.8 us at 64x7168x2048 and nothing elsewhere. Three stages and a buffer for the
whole output in place of four stages: 0.83 to 1.03 of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import Constant, CudaPrimitive, Number, Pointer, Scratch
from kiln.ir.dtypes import BF16, F16, F32, DType

Expr: TypeAlias = Any

KERNEL = "kiln.backends.cuda.kernels.gemm_hopper:matmul_bt"
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
K: Expr = ["dim", "K"]
SM = 90
MULTIPROCESSORS = 132
"""Of an H100 or H200. With fewer, CTAs wait for their turn; no block is lost."""
SHARED = 232448
"""Bytes that a CTA may have."""
LIMITS = (["le", M, 2**20], ["le", N, 2**20], ["ge", K, 1], ["le", K, 2**16])
"""Within which numbers of blocks and steps fit in 32 bits. K = 0 has no tensor map."""


@dataclass(frozen=True)
class Block:
    """How a program takes the output apart."""

    m: int
    n: int
    stages: int
    group: int
    """Blocks along M that are walked together."""
    split: bool = False
    """Blocks that do not come out even over the programs are shared along K."""
    buffers: int = 2
    """For the output: each of 128 bytes of every row of a warpgroup."""

    @property
    def along_n(self) -> bool:
        """Whether warpgroups halve the block along N: a wgmma has 64 rows."""
        return self.m == 64

    @property
    def name(self) -> str:
        """Part of the variant's name."""
        return f"ws_m{self.m}_n{self.n}_s{self.stages}_g{self.group}{'_split' if self.split else ''}"


BLOCKS = (
    Block(128, 256, 4, group=16),
    Block(128, 256, 4, group=8),
    Block(128, 128, 6, group=16),
    Block(128, 64, 8, group=16),
    Block(64, 256, 4, group=16),
    Block(128, 256, 4, group=16, split=True),
    Block(128, 128, 6, group=16, split=True),
    Block(128, 64, 8, group=16, split=True),
    Block(64, 128, 8, group=16, split=True),
)
TYPES = ((BF16, BF16), (BF16, F32), (F16, F16), (F16, F32))
"""Of x and weight, and of the output."""


def _programs(block: Block, depth: int) -> Expr:
    tiles: Expr = ["mul", ["cdiv", M, block.m], ["cdiv", N, block.n]]
    work = ["mul", tiles, ["cdiv", K, depth]] if block.split else tiles
    return ["min", MULTIPROCESSORS, work]


def _scratch(block: Block) -> tuple[Scratch, ...]:
    if not block.split:
        return ()
    parts = 2 * MULTIPROCESSORS * block.m * block.n * F32.bytes
    return (Scratch("parts", parts), Scratch("counters", 4 * MULTIPROCESSORS * 4, zeroed=True))


def _when(kind: DType, out: DType) -> Expr:
    types = {"x": kind, "weight": kind, "out": out}
    return [
        "and",
        *(["dtype", operand, dtype.name] for operand, dtype in types.items()),
        *LIMITS,
        # The copy engine stores whole pieces of 16 bytes, whatever the extent of a row.
        ["divisible", N, 16 // out.bytes],
        *(["divisible", ["stride", operand], 16 // dtype.bytes] for operand, dtype in types.items()),
        *(["aligned", operand, 16] for operand in types),
    ]


def _row(kind: DType, out: DType, block: Block) -> CudaPrimitive:
    depth = 128 // kind.bytes
    constants: dict[str, Constant | None] = {
        "BLOCK_M": block.m, "BLOCK_N": block.n, "BLOCK_K": depth, "STAGES": block.stages,
        "GROUP": block.group, "ALONG_N": block.along_n, "BUFFERS": block.buffers, "PDL": False,
        "EPILOGUE": None, "extra": None,
    }  # fmt: skip
    pointers: list[Pointer] = [
        Pointer("x", "x", kind.name, align=16),
        Pointer("weight", "weight", kind.name, align=16),
        Pointer("out", "out", out.name, "write", align=16),
    ]
    constants |= dict.fromkeys(("x_scale", "weight_scale", "bias"))
    constants |= dict.fromkeys(("x_scale_step", "weight_scale_step"), 0)
    if block.split:
        pointers += [
            Pointer("parts", "scratch:parts", F32.name, "write", align=16),
            Pointer("counters", "scratch:counters", "i32", "write"),
        ]
    else:
        constants |= {"parts": None, "counters": None}
    numbers = (Number("M", "i32", M), Number("N", "i32", N), Number("K", "i32", K))
    strides = (Number(f"{t}_stride", "i64", ["stride", t]) for t in ("x", "weight", "out"))
    types = kind.name if kind is out else f"{kind.name}_{out.name}"
    return CudaPrimitive(
        op="matmul_bt",
        variant=f"{types}_{block.name}",
        kernel=KERNEL,
        params=(*pointers, *numbers, *strides),
        constants=constants,
        grid=(_programs(block, depth), 1, 1),
        when=_when(kind, out),
        num_warps=4,
        num_stages=block.stages,
        scratch=_scratch(block),
        min_sm=SM,
        max_sm=SM,
    )


def _rows() -> Iterator[CudaPrimitive]:
    for block in BLOCKS:
        # The widest shared block spills 24 bytes when it writes f32.
        for kind, out in TYPES if not block.split or block.n < 256 else TYPES[::2]:
            yield _row(kind, out, block)


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(_rows())
