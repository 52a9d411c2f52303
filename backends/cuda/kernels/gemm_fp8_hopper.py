"""Products of e4m3 codes with a scale for every 128 of the inner dimension, for Hopper: one warp copies tiles
to shared memory, two groups of four warps multiply 64 rows each.

While one group scales its products and adds them to its total, the other's keep the tensor cores busy. A tile
is 128 columns, or a piece of 128 and one of 64: pieces are multiplied one after another, so that their
products fit into the registers beside all totals (two pieces of 128 spill).
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
WIDE: gl.constexpr = gl.constexpr(128)
"""Columns of a tile's wide piece."""


@gluon.jit
def _tile(pid, M, N, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """First row of a tile, and first columns of its wide and its narrow piece: GROUP row blocks are walked
    column by column. Every other tile has its narrow piece first, so that no piece lies in two scale blocks.
    """
    across = gl.cdiv(N, BLOCK_N)
    span = GROUP * across
    first = pid // span * GROUP
    size = gl.minimum(gl.cdiv(M, 2 * ROWS) - first, GROUP)
    block = pid % span // size
    odd = block % 2 if BLOCK_N > WIDE else 0
    n = block * BLOCK_N
    return (first + pid % span % size) * (2 * ROWS), n + odd * (BLOCK_N - WIDE), n + (1 - odd) * WIDE


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _copy(
    x, wide, narrow, a0, a1, b0, b1, full, empty, M, N, K,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: every tile of this program, 128 of the inner dimension at a time."""
    stage = 0
    phase = 1
    for pid in range(gl.program_id(0), gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        m, n, beside = _tile(pid, M, N, BLOCK_N, GROUP)
        for k in range(0, K, SCALED):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (2 * ROWS + BLOCK_N) * SCALED)
            tma.async_load(x, [m, k], bar, a0.index(stage))
            tma.async_load(x, [m + ROWS, k], bar, a1.index(stage))
            tma.async_load(wide, [n, k], bar, b0.index(stage))
            if BLOCK_N > WIDE:
                tma.async_load(narrow, [beside, k], bar, b1.index(stage))
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
def _multiply(
    a, b0, b1, full, empty, x_scale, weight_scale, bias, out, M, N, K, out_stride,
    x_scale_stride, x_scale_colstride, weight_scale_stride,
    FIRST: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A multiplying group: rows FIRST to FIRST + 63 of every tile of this program."""
    NARROW: gl.constexpr = b1.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 32])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    beside_rows: gl.constexpr = gl.SliceLayout(1, narrow)
    zeros0 = gl.zeros([ROWS, WIDE], gl.float32, wide)
    zeros1 = gl.zeros([ROWS, NARROW], gl.float32, narrow)
    last = gl.cdiv(N, SCALED) - 1
    stage = 0
    phase = 0
    for pid in range(gl.program_id(0), gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        first, n, beside = _tile(pid, M, N, BLOCK_N, GROUP)
        m = first.to(gl.int64) + FIRST + gl.arange(0, ROWS, layout=rows)
        row_scale = x_scale + gl.where(m < M, m, 0) * x_scale_stride
        scales0 = weight_scale + gl.minimum(n // SCALED, last) * weight_scale_stride
        scales1 = weight_scale + gl.minimum(beside // SCALED, last) * weight_scale_stride
        total0 = zeros0
        total1 = zeros1
        scale = gl.load(row_scale, mask=(m >= 0) & (K > 0), other=0.0)
        scale0 = gl.load(scales0, mask=K > 0, other=0.0)
        scale1 = gl.load(scales1, mask=K > 0, other=0.0)
        for k in range(0, K, SCALED):
            mbarrier.wait(full.index(stage), phase)
            left = a.index(stage)
            right = b0.index(stage).permute([1, 0])
            part = warpgroup_mma(left, right, zeros0, use_acc=False, is_async=True)
            # The next block's scales, before anyone waits.
            row_scale += x_scale_colstride
            scales0 += 1
            scales1 += 1
            more = k + SCALED < K
            later = gl.load(row_scale, mask=(m >= 0) & more, other=0.0)
            later0 = gl.load(scales0, mask=more, other=0.0)
            later1 = gl.load(scales1, mask=more, other=0.0)
            part = warpgroup_mma_wait(0, deps=[part])
            if BLOCK_N > WIDE:
                total0 += part * (scale * scale0)[:, None]
                right = b1.index(stage).permute([1, 0])
                part = warpgroup_mma(left, right, zeros1, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage))
                total1 += part * gl.convert_layout(scale * scale1, beside_rows)[:, None]
            else:
                mbarrier.arrive(empty.index(stage))
                total0 += part * (scale * scale0)[:, None]
            scale = later
            scale0 = later0
            scale1 = later1
            stage, phase = _next(stage, phase, STAGES)
        _store(total0, m, n + gl.arange(0, WIDE, layout=gl.SliceLayout(0, wide)), bias, out, M, N, out_stride)
        if BLOCK_N > WIDE:
            m = gl.convert_layout(m, beside_rows)
            columns = beside + gl.arange(0, NARROW, layout=gl.SliceLayout(0, narrow))
            _store(total1, m, columns, bias, out, M, N, out_stride)


@gluon.jit
def scaled_matmul_bt_block(
    x, weight, x_scale, weight_scale, bias, out, M, N, K, x_stride, weight_stride, out_stride,
    x_scale_stride, x_scale_colstride, weight_scale_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Programs take tiles of 128 x BLOCK_N (128 or 192) in turn; each 128 of k is scaled and added to an f32
    total. weight_scale's columns are neighbours."""
    gl.static_assert(BLOCK_M == 2 * ROWS)
    gl.static_assert(BLOCK_K == SCALED)
    dtype: gl.constexpr = x.dtype.element_ty
    NARROW: gl.constexpr = BLOCK_N - WIDE if BLOCK_N > WIDE else WIDE
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SCALED], dtype)
    long: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDE, SCALED], dtype)
    short: gl.constexpr = gl.NVMMASharedLayout.get_default_for([NARROW, SCALED], dtype)
    x_tiles = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [ROWS, SCALED], tall)
    wide = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [WIDE, SCALED], long)
    a0 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SCALED], tall)
    a1 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, SCALED], tall)
    b0 = gl.allocate_shared_memory(dtype, [STAGES, WIDE, SCALED], long)
    narrow = wide
    b1 = b0
    if BLOCK_N > WIDE:
        narrow = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [NARROW, SCALED], short)
        b1 = gl.allocate_shared_memory(dtype, [STAGES, NARROW, SCALED], short)
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
                0, BLOCK_N, GROUP, STAGES,
            )),
            (_multiply, (
                a1, b0, b1, full, empty, x_scale, weight_scale, bias, out, M, N, K, out_stride,
                x_scale_stride, x_scale_colstride, weight_scale_stride,
                ROWS, BLOCK_N, GROUP, STAGES,
            )),
            (_copy, (
                x_tiles, wide, narrow, a0, a1, b0, b1, full, empty, M, N, K, BLOCK_N, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
