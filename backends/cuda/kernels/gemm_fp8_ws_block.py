"""Products of e4m3 codes with a scale for every 128 of the inner dimension, for Hopper: as `gemm_fp8_ws`, where
a step's products are scaled when they are added. A piece of columns lies in one block of weight's scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kiln.backends.cuda.kernels.gemm_fp8_ws import DEPTH, ROWS, _bias, _columns, _copy, _here, _store
from kiln.backends.cuda.kernels.gemm_hopper import _block, _next


@gluon.jit
def _one(
    a, b, full, empty, stage, phase, rows, columns, K, rows_step, columns_step, STAGES: gl.constexpr
):
    """(total, stage, phase) of a tile of one piece. rows [64] and columns point to the first step's scales."""
    W: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total = nothing
    scale = gl.load(rows)
    scale0 = gl.load(columns)
    for k in range(0, K, DEPTH):
        mbarrier.wait(full.index(stage), phase)
        part = warpgroup_mma(
            a.index(stage), b.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        # The next step's scales, before anyone waits.
        rows += rows_step
        columns += columns_step
        more = k + DEPTH < K
        later = gl.load(rows, mask=more, other=0.0)
        later0 = gl.load(columns, mask=more, other=0.0)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        total += part * (scale * scale0)[:, None]
        scale = later
        scale0 = later0
        stage, phase = _next(stage, phase, STAGES)
    return total, stage, phase


@gluon.jit
def _two(
    a, b0, b1, full, empty, stage, phase, rows, columns0, columns1, K, rows_step, columns_step, STAGES: gl.constexpr,
):  # fmt: skip
    """(left total, right total, stage, phase) of a tile of two pieces of the same width."""
    W: gl.constexpr = b0.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total0 = nothing
    total1 = nothing
    scale = gl.load(rows)
    scale0 = gl.load(columns0)
    scale1 = gl.load(columns1)
    for k in range(0, K, DEPTH):
        mbarrier.wait(full.index(stage), phase)
        part0 = warpgroup_mma(
            a.index(stage), b0.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        # The next step's scales, before anyone waits.
        rows += rows_step
        columns0 += columns_step
        columns1 += columns_step
        more = k + DEPTH < K
        later = gl.load(rows, mask=more, other=0.0)
        later0 = gl.load(columns0, mask=more, other=0.0)
        later1 = gl.load(columns1, mask=more, other=0.0)
        part0 = warpgroup_mma_wait(0, deps=[part0])
        total0 = _here(total0 + part0 * (scale * scale0)[:, None])
        part1 = warpgroup_mma(
            a.index(stage), b1.index(stage).permute([1, 0]), part0, use_acc=False, is_async=True
        )
        part1 = warpgroup_mma_wait(0, deps=[part1])
        mbarrier.arrive(empty.index(stage))
        total1 += part1 * (scale * scale1)[:, None]
        scale = later
        scale0 = later0
        scale1 = later1
        stage, phase = _next(stage, phase, STAGES)
    return total0, total1, stage, phase


@gluon.jit
def _multiply(
    out, a, b0, b1, c, full, empty, x_scale, weight_scale, bias, M, N, K,
    x_scale_stride, x_scale_colstride, weight_scale_stride, weight_scale_colstride,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, the first or the second: its half of every tile of this program."""
    W: gl.constexpr = b0.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    stage = 0
    phase = 0
    last = gl.cdiv(N, DEPTH) - 1
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = _block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = row * BLOCK_M
        n = column * BLOCK_N
        if BLOCK_M == ROWS:
            n += SIDE * (BLOCK_N // 2)
        else:
            m += SIDE * ROWS
        index = m.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        rows = x_scale + gl.where(index < M, index, 0) * x_scale_stride
        columns0 = weight_scale + gl.minimum(n // DEPTH, last).to(gl.int64) * weight_scale_stride
        bias0 = _bias(bias, _columns(n, W), N)
        if PIECES == 2:
            bias1 = _bias(bias, _columns(n + W, W), N)
            columns1 = weight_scale + gl.minimum((n + W) // DEPTH, last).to(gl.int64) * weight_scale_stride
            total0, total1, stage, phase = _two(
                a, b0, b1, full, empty, stage, phase, rows, columns0, columns1, K,
                x_scale_colstride, weight_scale_colstride, STAGES,
            )  # fmt: skip
            _store(out, c, total0, None, None, bias0, m, n, 0)
            _store(out, c, total1, None, None, bias1, m, n + W, W // c.shape[2])
        else:
            total0, stage, phase = _one(
                a, b0, full, empty, stage, phase, rows, columns0, K,
                x_scale_colstride, weight_scale_colstride, STAGES,
            )  # fmt: skip
            _store(out, c, total0, None, None, bias0, m, n, 0)
    tma.store_wait(0)


@gluon.jit
def scaled_matmul_bt_block(
    x, weight, x_scale, weight_scale, bias, out, M, N, K, x_stride, weight_stride, out_stride,
    x_scale_stride, x_scale_colstride, weight_scale_stride, weight_scale_colstride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """K >= 1; rows of x, weight and out are multiples of 16 bytes apart and begin at such addresses.

    Programs take tiles of BLOCK_M x BLOCK_N in turn, of which warpgroups have 64 rows each (BLOCK_M 128) or half
    of the columns each (BLOCK_M 64): one piece of 64 or 128 columns, or two of 128. bias may be null.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    result: gl.constexpr = out.dtype.element_ty
    CHUNK: gl.constexpr = 64
    HALF: gl.constexpr = BLOCK_N if BLOCK_M > ROWS else BLOCK_N // 2
    W: gl.constexpr = min(HALF, 128)
    PIECES: gl.constexpr = HALF // W
    la: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], dtype)
    lb: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W, DEPTH], dtype)
    lc: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], result)
    xd = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [ROWS, DEPTH], la)
    wd = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [W, DEPTH], lb)
    od = tma.make_tensor_descriptor(out, [M, N], [out_stride, 1], [ROWS, CHUNK], lc)
    a0 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], la)
    b0 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
    a1 = a0
    b1 = b0
    b2 = b0
    b3 = b0
    if PIECES == 2:
        b1 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
    if BLOCK_M > ROWS:
        a1 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], la)
        b2 = b0
        b3 = b1
    else:
        b2 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
        b3 = b2
        if PIECES == 2:
            b3 = gl.allocate_shared_memory(dtype, [STAGES, W, DEPTH], lb)
    c0 = gl.allocate_shared_memory(result, [2, ROWS, CHUNK], lc)
    c1 = gl.allocate_shared_memory(result, [2, ROWS, CHUNK], lc)
    full = mbarrier.allocate_mbarrier(STAGES)
    empty = mbarrier.allocate_mbarrier(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    # Without it, the compiler puts a fence into every step, since descriptors are made in memory of the ring.
    fence_async_shared()
    b = (b0, b1, b2, b3)
    if PIECES == 1:
        b = (b0, b2)
    gl.warp_specialize(
        [
            (_multiply, (
                od, a0, b0, b1, c0, full, empty, x_scale, weight_scale, bias, M, N, K,
                x_scale_stride, x_scale_colstride, weight_scale_stride, weight_scale_colstride,
                0, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP,
            )),
            (_multiply, (
                od, a1, b2, b3, c1, full, empty, x_scale, weight_scale, bias, M, N, K,
                x_scale_stride, x_scale_colstride, weight_scale_stride, weight_scale_colstride,
                1, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP,
            )),
            (_copy, (
                xd, wd, wd, (a0, a1), b, full, empty, M, N, K, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP, 1, 1,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
