"""Candidates for dense products on Hopper (sm_90a): blocks of the warp-specialized kernel of
`gemm_hopper`, for matmul_bt of 16-bit types.

Measured on an H200, medians of graph replays over random data, against cuBLAS through torch in the same run;
geometric means over (N, K) = (4096, 4096), (6144, 4096), (28672, 4096), (5120, 17408), (2112, 7168) and
(576, 7168), of the fastest candidate for each. Before: maps made one after another, whole blocks, stream-K.
    M         64    128    256    512   1024
    before  0.97   0.80   0.73   0.76   0.82
    now     0.97   0.94   0.89   0.92   0.89
What equal shares gain most: 512x5120x17408 198 -> 131 us (cuBLAS 134), 128x576x7168 16.5 -> 10.5 (10.4),
1024x576x7168 26.5 -> 23.5 (18). More rows were measured little: 2048x5120x17408 457 us (444),
4096x4096x4096 195 (186); the kernel before made 797 TFLOP/s at 8192^3.
Where it loses: blocks are powers of two wide, so that 256x6144x4096 has 96 for 132 multiprocessors (0.80) and
1024x2112x7168 has 136 (0.83); and a launch that does nothing else takes 4.8 us where cuBLAS takes 2.4. With
maps from the host 128x7168x2048 took 14.5 us instead of 16.5: `gemm_hopper_maps` has such candidates.

Dead ends, measured on the same machines:
* Clusters of two with weight by multicast hang on the device, for a reason not found; clusters along N do
  not compile. Steps of 128 along K hang too. (Forms of the scaled product hung for the trap that
  `gemm_hopper_maps` tells of, which was not known then: these may have, too.)
* One warp for both maps and all loads: 0.1 to 0.5 us slower than two; all maps before all else: 0.5 to 1.
* Asking L2 ahead (prefetch) for the first stages while the maps are made: 1 to 2 us slower throughout.
* Launching dependents early (PDL): 0.5 to 1 us less at few blocks (128x4096x4096, 128x576x7168), up to 3 us
  more elsewhere. Maps lie in scratch that launches share, so that they cannot be made before the wait.
* Shares of any number of steps (stream-K) read x and weight at as many places of K as there are programs, out
  of step with L2, and as many parts in turn: 20.8 us at 128x576x7168, where equal shares take 10.5.
* Three stages and a buffer for the whole output in place of four stages: 0.83 to 1.03 of it.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import Constant, CudaPrimitive, Number, Pointer, Scratch
from kiln.ir.dtypes import BF16, F16, F32, I32, DType

Expr: TypeAlias = Any

KERNEL = "kiln.backends.cuda.kernels.gemm_hopper:matmul_bt"
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
K: Expr = ["dim", "K"]
SM = 90
MULTIPROCESSORS = 132
"""Of an H100 or H200, and programs of a launch: each has one, and may find nothing to do. On fewer, some
wait for their turn; no block is lost."""
SHARED = 232448
"""Bytes that a CTA may have."""
LIMITS = (["le", M, 2**20], ["le", N, 2**20], ["ge", K, 1], ["le", K, 2**16])
"""Within which numbers of blocks and steps fit in 32 bits. K = 0 has no tensor map."""


@dataclass(frozen=True)
class Block:
    """What a program takes of the output at a time."""

    m: int
    """128: warpgroups lie above each other; 64: side by side, since a wgmma has 64 rows."""
    n: int
    stages: int
    group: int = 16
    """Blocks along M that are walked together."""

    @property
    def name(self) -> str:
        """Part of the variant's name."""
        return f"ws_m{self.m}_n{self.n}_s{self.stages}_g{self.group}"

    @property
    def columns(self) -> int:
        """Of a warpgroup."""
        return self.n if self.m > 64 else self.n // 2

    def buffers(self, out: DType) -> int:
        """For the output of a warpgroup, each of 128 bytes of every row: two, if it has as many."""
        return min(2, -(-self.columns * out.bytes // 128))

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """What programs that share blocks leave for each other: a part each, at most."""
        parts = MULTIPROCESSORS * self.m * self.n * F32.bytes
        return Scratch("parts", parts), Scratch("counters", MULTIPROCESSORS * 2 * I32.bytes, zeroed=True)


BLOCKS = (
    Block(128, 256, 4),
    Block(128, 128, 6),
    Block(128, 64, 8),
    Block(64, 256, 4),
    Block(64, 128, 8),
    Block(64, 64, 12),
)
TYPES = ((BF16, BF16), (BF16, F32), (F16, F16), (F16, F32))
"""Of x and weight, and of the output."""


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
    constants: dict[str, Constant | None] = {
        "BLOCK_M": block.m, "BLOCK_N": block.n, "BLOCK_K": 128 // kind.bytes, "STAGES": block.stages,
        "GROUP": block.group, "BUFFERS": block.buffers(out), "EPILOGUE": None, "extra": None,
    }  # fmt: skip
    pointers = (
        Pointer("x", "x", kind.name, align=16),
        Pointer("weight", "weight", kind.name, align=16),
        Pointer("out", "out", out.name, "write", align=16),
        Pointer("parts", "scratch:parts", F32.name, "write", align=16),
        Pointer("counters", "scratch:counters", I32.name, "write"),
    )
    numbers = (Number("M", "i32", M), Number("N", "i32", N), Number("K", "i32", K))
    strides = (Number(f"{t}_stride", "i64", ["stride", t]) for t in ("x", "weight", "out"))
    types = kind.name if kind is out else f"{kind.name}_{out.name}"
    return CudaPrimitive(
        op="matmul_bt",
        variant=f"{types}_{block.name}",
        kernel=KERNEL,
        params=(*pointers, *numbers, *strides),
        constants=constants,
        grid=(MULTIPROCESSORS, 1, 1),
        when=_when(kind, out),
        num_warps=4,
        num_stages=block.stages,
        scratch=block.scratch,
        min_sm=SM,
        max_sm=SM,
    )


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(_row(*types, block) for block in BLOCKS for types in TYPES)
