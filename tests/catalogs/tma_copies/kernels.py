"""Copies that need more than the parameters they declare: Triton's device-side tensor maps, and Gluon."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def mapped(x, out, M, N, x_stride, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program a tile, through two tensor maps that it makes itself."""
    source = tl.make_tensor_descriptor(x, [M, N], [x_stride, 1], [ROWS, COLS])
    target = tl.make_tensor_descriptor(out, [M, N], [out_stride, 1], [ROWS, COLS])
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLS]
    target.store(at, source.load(at))


@gluon.jit
def spelled_out(x, out, N, x_stride, out_stride, COLS: gl.constexpr):
    """One program a row and block of columns, its layout in registers spelled out."""
    layout: gl.constexpr = gl.BlockedLayout([COLS // 128], [32], [4], [0])
    row = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * COLS + gl.arange(0, COLS, layout=layout)
    value = gl.load(x + row * x_stride + column, mask=column < N)
    gl.store(out + row * out_stride + column, value, mask=column < N)
