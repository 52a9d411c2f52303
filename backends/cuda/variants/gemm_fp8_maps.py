"""Candidates for scaled products of e4m3 on Hopper (sm_90a): tiles of `gemm_fp8_ws`'s kernel with tensor maps
that the host makes (`gemm_fp8_maps`). Nobody has measured them, and no target ships one until somebody has.

What they are for: up to 64 rows, where a launch of `gemm_fp8_ws` makes its maps first. The trap that
`gemm_hopper_maps` tells of is one for these kernels too.
"""

from dataclasses import replace

from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.variants import gemm_fp8_ws
from kiln.backends.cuda.variants.gemm_fp8_ws import Tile
from kiln.backends.cuda.variants.gemm_hopper import K, M, N
from kiln.backends.cuda.variants.gemm_hopper_maps import DEVICE_MADE, ROWS, matrix
from kiln.ir.dtypes import BF16, F8E4M3

KERNEL = "kiln.backends.cuda.kernels.gemm_fp8_maps:scaled_matmul_bt"
OUT = BF16
"""The one output that is tried until it is known whether these are faster."""
DEPTH = 128
"""Codes of a step."""
PIECE = 128
"""Columns of a piece, at most."""


def _row(tile: Tile, made_on_device: CudaPrimitive) -> CudaPrimitive:
    piece = min(tile.n if tile.m > ROWS else tile.n // 2, PIECE)
    maps = {
        "x": matrix("x", F8E4M3, M, K, (ROWS, DEPTH)),
        "weight": matrix("weight", F8E4M3, N, K, (piece, DEPTH)),
        "out": matrix("out", OUT, M, N, (ROWS, 128 // OUT.bytes), written=True),
    }
    kept = (p for p in made_on_device.params if p.name in maps or p.name not in DEVICE_MADE)
    name = made_on_device.variant.replace("_ws_", "_maps_")
    params = tuple(maps.get(p.name, p) for p in kept)
    return replace(made_on_device, variant=name, kernel=KERNEL, params=params)


CANDIDATES: tuple[CudaPrimitive, ...] = tuple(
    _row(tile, gemm_fp8_ws._row(op, OUT, tile)) for op in gemm_fp8_ws.OPS for tile in gemm_fp8_ws.TILES
)
