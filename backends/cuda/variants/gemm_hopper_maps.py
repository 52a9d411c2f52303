"""Candidates for dense products on Hopper (sm_90a): blocks of `gemm_hopper`'s kernel with tensor maps that
the host makes (`gemm_hopper_maps`). Nobody has measured them, and no target ships one until somebody has.

What they are for: a launch of `gemm_hopper` that does nothing else takes 4.8 us where cuBLAS takes 2.4, and
128x7168x2048 took 14.5 us instead of 16.5 with maps from the host, before a launch could hand them over.

A trap for forms of these kernels: a name that starts a loop as a plain copy of another, and is copied from it
again in the loop, is not carried by it, so that a ring's stage is given back for ever and its producer waits
(`before = stage`; it starts as 0). tests/backends/cuda/test_carried.py finds it.
"""

from dataclasses import replace
from typing import Literal

from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.tensor_map import TensorMap
from kiln.backends.cuda.variants import gemm_hopper
from kiln.backends.cuda.variants.gemm_hopper import BLOCKS, TYPES, Block, Expr, K, M, N
from kiln.ir.dtypes import DType

KERNEL = "kiln.backends.cuda.kernels.gemm_hopper_maps:matmul_bt"
ROWS = 64
"""Of a warpgroup's half of a block."""
DEVICE_MADE = frozenset({"x", "weight", "out", "x_stride", "weight_stride", "out_stride"})
"""What a kernel that makes its own maps takes in place of them."""


def swizzle_of(width: int, kind: DType) -> Literal[32, 64, 128]:
    """Bytes of the swizzle of boxes that are so many elements wide: as many as they have, up to 128."""
    found = width * kind.bytes
    return 128 if found >= 128 else 64 if found >= 64 else 32


def matrix(
    name: str, kind: DType, rows: Expr, columns: Expr, box: tuple[int, int], written: bool = False
) -> TensorMap:
    """The map of a matrix with dense rows."""
    return TensorMap(
        name, name, kind.name, "write" if written else "read", align=16,
        shape=(rows, columns), strides=(["stride", name],), box=box, swizzle=swizzle_of(box[1], kind),
    )  # fmt: skip


def _row(kind: DType, out: DType, block: Block, made_on_device: CudaPrimitive) -> CudaPrimitive:
    depth = 128 // kind.bytes
    columns = block.n if block.m > ROWS else block.n // 2
    maps = (
        matrix("x", kind, M, K, (ROWS, depth)),
        matrix("weight", kind, N, K, (columns, depth)),
        matrix("out", out, M, N, (ROWS, min(128 // out.bytes, columns)), written=True),
    )
    others = tuple(p for p in made_on_device.params if p.name not in DEVICE_MADE)
    name = made_on_device.variant.replace("_ws_", "_maps_")
    return replace(made_on_device, variant=name, kernel=KERNEL, params=(*maps, *others))


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(
    _row(*types, block, gemm_hopper._row(*types, block)) for block in BLOCKS for types in TYPES
)
