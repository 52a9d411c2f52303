"""Products of e4m3 codes with a scale for every 128 of the inner dimension, for Hopper: one warp copies tiles
to shared memory, two groups of four warps multiply 64 rows each.

A group's tile is two pieces side by side. While the products of one are scaled and added to their total, the
tensor cores are busy with the other's: that is why a piece is 128 columns at most, and both together 192
(totals and products of two pieces of 128 do not fit into the registers).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS: gl.constexpr = gl.constexpr(64)
"""Rows of a group's tile."""
SCALED: gl.constexpr = gl.constexpr(128)
"""Codes along the inner dimension, and rows of weight, that share a block scale."""


@gluon.jit
def _tile(pid, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """First row and column of a tile, and whether its number along columns is odd: GROUP row blocks are
    walked column by column."""
    across = gl.cdiv(N, BLOCK_N)
    span = GROUP * across
    first = pid // span * GROUP
    size = gl.minimum(gl.cdiv(M, BLOCK_M) - first, GROUP)
    block = pid % span // size
    return (first + pid % span % size) * BLOCK_M, block * BLOCK_N, block % 2


@gluon.jit
def _pieces(n, odd, side, BLOCK_M: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr):
    """First columns of a group's two pieces. Groups lie above each other (128 rows) or side by side (64). Of
    pieces of 128 and 64 columns every other tile has the narrow one first, so that none lies in two scale
    blocks."""
    if BLOCK_M == ROWS:
        n += side * (W0 + W1)
    if W0 == W1:
        return n, n + W0
    else:
        return n + odd * W1, n + (1 - odd) * W0


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _copy(
    x, weight0, weight1, a, b, full, empty, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: every tile of this program, 128 of the inner dimension at a time. a and b hold the
    buffers of both groups: theirs alone, or one twice."""
    W0: gl.constexpr = weight0.block_shape[0]
    W1: gl.constexpr = weight1.block_shape[0]
    stage = 0
    phase = 1
    for pid in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n, odd = _tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP)
        for k in range(0, K, SCALED):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * SCALED)
            tma.async_load(x, [m, k], bar, a[0].index(stage))
            n0, n1 = _pieces(n, odd, 0, BLOCK_M, W0, W1)
            tma.async_load(weight0, [n0, k], bar, b[0].index(stage))
            tma.async_load(weight1, [n1, k], bar, b[1].index(stage))
            if BLOCK_M == ROWS:
                n0, n1 = _pieces(n, odd, 1, BLOCK_M, W0, W1)
                tma.async_load(weight0, [n0, k], bar, b[2].index(stage))
                tma.async_load(weight1, [n1, k], bar, b[3].index(stage))
            else:
                tma.async_load(x, [m + ROWS, k], bar, a[1].index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _store(total, m, n, bias, out, M, N, out_stride):
    """Add the bias, round once, store what lies inside. An absent bias is a null pointer; adding -0 instead
    changes no bit."""
    given = (bias.to(gl.int64) != 0) & (n < N)
    total += gl.load(bias + n, mask=given, other=-0.0).to(gl.float32)[None, :]
    where = out + m[:, None] * out_stride + n[None, :]
    gl.store(where, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def _here(value):
    """The value, computed before what follows: the compiler would put it behind the wait for the other
    piece."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], value.dtype, is_pure=False, pack=1)


@gluon.jit
def _multiply(
    a, b0, b1, full, empty, x_scale, weight_scale, bias, out, M, N, K, out_stride,
    x_scale_stride, x_scale_colstride, weight_scale_stride,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A multiplying group, the first or the second: its part of every tile of this program."""
    W0: gl.constexpr = b0.shape[1]
    W1: gl.constexpr = b1.shape[1]
    FIRST: gl.constexpr = SIDE * (BLOCK_M - ROWS)
    layout0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W0, 32])
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W1, 32])
    rows0: gl.constexpr = gl.SliceLayout(1, layout0)
    rows1: gl.constexpr = gl.SliceLayout(1, layout1)
    zeros0 = gl.zeros([ROWS, W0], gl.float32, layout0)
    zeros1 = gl.zeros([ROWS, W1], gl.float32, layout1)
    last_scale = gl.cdiv(N, SCALED) - 1
    stage = 0
    phase = 0
    for pid in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        first, n, odd = _tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP)
        n0, n1 = _pieces(n, odd, SIDE, BLOCK_M, W0, W1)
        m = first.to(gl.int64) + FIRST + gl.arange(0, ROWS, layout=rows0)
        row_scale = x_scale + gl.where(m < M, m, 0) * x_scale_stride
        scales0 = weight_scale + gl.minimum(n0 // SCALED, last_scale) * weight_scale_stride
        scales1 = weight_scale + gl.minimum(n1 // SCALED, last_scale) * weight_scale_stride
        total0 = zeros0
        total1 = zeros1
        scale = gl.load(row_scale, mask=(m >= 0) & (K > 0), other=0.0)
        scale0 = gl.load(scales0, mask=K > 0, other=0.0)
        scale1 = gl.load(scales1, mask=K > 0, other=0.0)
        for k in range(0, K, SCALED):
            mbarrier.wait(full.index(stage), phase)
            left = a.index(stage)
            right0 = b0.index(stage).permute([1, 0])
            right1 = b1.index(stage).permute([1, 0])
            part0 = warpgroup_mma(left, right0, zeros0, use_acc=False, is_async=True)
            part1 = warpgroup_mma(left, right1, zeros1, use_acc=False, is_async=True)
            # The next block's scales, before anyone waits.
            row_scale += x_scale_colstride
            scales0 += 1
            scales1 += 1
            more = k + SCALED < K
            later = gl.load(row_scale, mask=(m >= 0) & more, other=0.0)
            later0 = gl.load(scales0, mask=more, other=0.0)
            later1 = gl.load(scales1, mask=more, other=0.0)
            part0 = warpgroup_mma_wait(1, deps=[part0])
            total0 = _here(total0 + part0 * (scale * scale0)[:, None])
            part1 = warpgroup_mma_wait(0, deps=[part1])
            mbarrier.arrive(empty.index(stage))
            total1 += part1 * gl.convert_layout(scale * scale1, rows1)[:, None]
            scale = later
            scale0 = later0
            scale1 = later1
            stage, phase = _next(stage, phase, STAGES)
        columns = n0 + gl.arange(0, W0, layout=gl.SliceLayout(0, layout0))
        _store(total0, m, columns, bias, out, M, N, out_stride)
        columns = n1 + gl.arange(0, W1, layout=gl.SliceLayout(0, layout1))
        _store(total1, gl.convert_layout(m, rows1), columns, bias, out, M, N, out_stride)


@gluon.jit
def scaled_matmul_bt_block(
    x, weight, x_scale, weight_scale, bias, out, M, N, K, x_stride, weight_stride, out_stride,
    x_scale_stride, x_scale_colstride, weight_scale_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Programs take tiles in turn; each 128 of k is scaled and added to an f32 total. Tiles are 128 x 128,
    128 x 192 (one group above the other) or 64 x 256 (side by side). Scales of weight are dense along k."""
    gl.static_assert(BLOCK_K == SCALED)
    dtype: gl.constexpr = x.dtype.element_ty
    W1: gl.constexpr = 64
    W0: gl.constexpr = BLOCK_N - W1 if BLOCK_M > ROWS else BLOCK_N // 2 - W1
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SCALED], dtype)
    long: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W0, SCALED], dtype)
    short: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W1, SCALED], dtype)
    x_tiles = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [ROWS, SCALED], tall)
    weight0 = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [W0, SCALED], long)
    weight1 = weight0
    if W0 != W1:
        weight1 = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [W1, SCALED], short)
    a0 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SCALED], tall)
    b0 = gl.allocate_shared_memory(dtype, [STAGES, W0, SCALED], long)
    b1 = gl.allocate_shared_memory(dtype, [STAGES, W1, SCALED], short)
    a1 = a0
    b2 = b0
    b3 = b1
    if BLOCK_M > ROWS:
        a1 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SCALED], tall)
    else:
        b2 = gl.allocate_shared_memory(dtype, [STAGES, W0, SCALED], long)
        b3 = gl.allocate_shared_memory(dtype, [STAGES, W1, SCALED], short)
    full = mbarrier.allocate_mbarrier(STAGES)
    empty = mbarrier.allocate_mbarrier(STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), 1)
        mbarrier.init(empty.index(s), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                a0, b0, b1, full, empty, x_scale, weight_scale, bias, out, M, N, K, out_stride,
                x_scale_stride, x_scale_colstride, weight_scale_stride,
                0, BLOCK_M, BLOCK_N, GROUP, STAGES,
            )),
            (_multiply, (
                a1, b2, b3, full, empty, x_scale, weight_scale, bias, out, M, N, K, out_stride,
                x_scale_stride, x_scale_colstride, weight_scale_stride,
                1, BLOCK_M, BLOCK_N, GROUP, STAGES,
            )),
            (_copy, (
                x_tiles, weight0, weight1, (a0, a1), (b0, b1, b2, b3), full, empty, M, N, K,
                BLOCK_M, BLOCK_N, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
