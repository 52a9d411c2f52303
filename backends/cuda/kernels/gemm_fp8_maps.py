"""Hopper's scaled products of e4m3 codes (`gemm_fp8_ws`) with tensor maps that the host makes: a launch waits
for none. Everything else is its: tiles, parts, order of sums and bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kiln.backends.cuda.kernels.gemm_fp8_ws import _across, _bias, _last, _scales, _store, _sum, _unit
from kiln.backends.cuda.kernels.gemm_fp8_ws_sums import DEPTH, ROWS, one_piece, two_pieces
from kiln.backends.cuda.kernels.gemm_hopper import _next


@gluon.jit
def _copy(
    boxes, buffers, full, empty, M, N, K,
    WEIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SPLIT: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """A copying warp, for x or weight, a map: a tile's rows in as many boxes as there are buffers for."""
    BOX: gl.constexpr = buffers[0].shape[1]
    BLOCK: gl.constexpr = BLOCK_N if WEIGHT else BLOCK_M
    stage = 0
    phase = 1
    units = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) * SPLIT
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        m, n, first, end = _unit(unit, M, N, K, BLOCK_M, BLOCK_N, GROUP, SPLIT, TOGETHER)
        row = m
        if WEIGHT:
            row = n
        for step in range(first, end):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BLOCK * DEPTH)
            for box in gl.static_range(BLOCK // BOX):
                tma.async_load(boxes, [row + box * BOX, step * DEPTH], ready, buffers[box].index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(
    out, a, b0, b1, c, full, empty, x_scale, weight_scale, bias, parts, counters,
    M, N, K, strides,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr, TOGETHER: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, the first or the second: its half of every tile of this program."""
    W: gl.constexpr = b0.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    x_stride, x_colstride, weight_stride, weight_colstride = strides
    stage = 0
    phase = 0
    units = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) * SPLIT
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        m, n, first, end = _unit(unit, M, N, K, BLOCK_M, BLOCK_N, GROUP, SPLIT, TOGETHER)
        if BLOCK_M == ROWS:
            n += SIDE * (BLOCK_N // 2)
        else:
            m += SIDE * ROWS
        row = m.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column0 = n.to(gl.int64) + gl.arange(0, W, _across(W, c.shape[2]))
        column1 = column0 + W
        blocks = None
        right = None
        row_scale = None
        scale0 = None
        scale1 = None
        if BLOCKS:
            begin = first.to(gl.int64)
            rows = x_scale + gl.where(row < M, row, 0) * x_stride + begin * x_colstride
            last = gl.cdiv(N, DEPTH) - 1
            columns = weight_scale + begin * weight_colstride
            right = columns + gl.minimum((n + W) // DEPTH, last).to(gl.int64) * weight_stride
            columns += gl.minimum(n // DEPTH, last).to(gl.int64) * weight_stride
            blocks = ((rows, columns), (x_colstride, weight_colstride), gl.cdiv(K, DEPTH) - first)
        else:
            if x_scale is not None:
                row_scale = _scales(x_scale, row, M, x_stride)
            scale0 = _scales(weight_scale, column0, N, weight_stride)
        bias0 = _bias(bias, column0, N)
        if PIECES == 2:
            if not BLOCKS:
                scale1 = _scales(weight_scale, column1, N, weight_stride)
            bias1 = _bias(bias, column1, N)
            total0, total1, stage, phase = two_pieces(
                a, b0, b1, full, empty, stage, phase, end - first, blocks, right, STAGES
            )
            _store(out, c, total0, row_scale, scale0, bias0, m, n, 0)
            _store(out, c, total1, row_scale, scale1, bias1, m, n + W, W // c.shape[2])
        else:
            total0, stage, phase = one_piece(a, b0, full, empty, stage, phase, end - first, blocks, STAGES)
            if SPLIT == 1:
                _store(out, c, total0, row_scale, scale0, bias0, m, n, 0)
            else:
                half = unit // SPLIT * 2 + SIDE
                own = parts + half.to(gl.int64) * (SPLIT * ROWS * W)
                if _last(total0, own, counters + half, unit % SPLIT, SPLIT):
                    _store(out, c, _sum(total0, own, SPLIT), row_scale, scale0, bias0, m, n, 0)
    tma.store_wait(0)


@gluon.jit
def scaled_matmul_bt(
    x, weight, x_scale, weight_scale, bias, out, parts, counters, M, N, K,
    x_scale_stride, x_scale_colstride, weight_scale_stride, weight_scale_colstride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, BUFFERS: gl.constexpr, SPLIT: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """K >= 1; rows of x, weight and out are multiples of 16 bytes apart and begin at such addresses.

    Programs take tiles of BLOCK_M x BLOCK_N in turn. With BLOCKS, x_scale and weight_scale are matrices of
    block scales. Without, x_scale is None or indexed by rows times x_scale_stride (0: one for all), and
    weight_scale by columns likewise. bias may be null. The output leaves through BUFFERS of 128 bytes of
    every row for each warpgroup, of whose number a tile has a multiple.

    SPLIT programs share a tile of one piece along the inner dimension. parts [tiles, 2, SPLIT, 64 * columns]
    f32 and counters [tiles, 2], zeros before and after, are None with SPLIT 1. Nobody waits for another
    program: the last one to finish adds the parts in order, so that bits do not depend on who that was.
    """
    dtype: gl.constexpr = x.dtype
    result: gl.constexpr = out.dtype
    CHUNK: gl.constexpr = 1024 // result.primitive_bitwidth
    gl.static_assert((BLOCK_M * BLOCK_N) // (2 * ROWS * CHUNK) % BUFFERS == 0)
    HALF: gl.constexpr = BLOCK_N if BLOCK_M > ROWS else BLOCK_N // 2
    W: gl.constexpr = min(HALF, 128)
    PIECES: gl.constexpr = HALF // W
    gl.static_assert(SPLIT == 1 or PIECES == 1)
    gl.static_assert(BLOCK_K == DEPTH)
    TOGETHER: gl.constexpr = 4 if BLOCKS and PIECES == 1 else 1
    la: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], dtype)
    lb: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W, DEPTH], dtype)
    lc: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], result)
    a0 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], la)
    b0 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
    # Pieces from left to right; warpgroups that lie above each other have the same.
    a1 = a0
    b1 = b0
    b2 = b0
    b3 = b0
    if BLOCK_N > W:
        b1 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
    if BLOCK_M > ROWS:
        a1 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], la)
        b2 = b0
        b3 = b1
    elif PIECES == 2:
        b2 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
        b3 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
    else:
        b2 = b1
    c0 = gl.allocate_shared_memory(result, [BUFFERS, ROWS, CHUNK], lc)
    c1 = gl.allocate_shared_memory(result, [BUFFERS, ROWS, CHUNK], lc)
    full = mbarrier.allocate_mbarrier(STAGES)
    empty = mbarrier.allocate_mbarrier(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 2)
        mbarrier.init(empty.index(stage), 2)
    # Copies arrive at barriers from outside of the threads, and see them as they are now.
    fence_async_shared()
    strides = (x_scale_stride, x_scale_colstride, weight_scale_stride, weight_scale_colstride)
    gl.warp_specialize(
        [
            (_multiply, (
                out, a0, b0, b1, c0, full, empty, x_scale, weight_scale, bias, parts, counters,
                M, N, K, strides, 0, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP, SPLIT, TOGETHER, BLOCKS,
            )),
            (_multiply, (
                out, a1, b2, b3, c1, full, empty, x_scale, weight_scale, bias, parts, counters,
                M, N, K, strides, 1, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP, SPLIT, TOGETHER, BLOCKS,
            )),
            (_copy, (
                x, (a0, a1), full, empty, M, N, K,
                False, BLOCK_M, BLOCK_N, STAGES, GROUP, SPLIT, TOGETHER,
            )),
            (_copy, (
                weight, (b0, b1, b2, b3), full, empty, M, N, K,
                True, BLOCK_M, BLOCK_N, STAGES, GROUP, SPLIT, TOGETHER,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
