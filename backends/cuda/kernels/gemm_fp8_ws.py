"""Products of e4m3 codes with scales of rows and columns, for Hopper: one warp copies, two warpgroups multiply.

Tensor cores of sm_90 keep about 14 bits of a running sum, so a product over PROMOTE * 128 of the inner
dimension starts from nothing and is then added to an f32 total. While one warpgroup adds, the tensor cores have
the other's products; with OVERLAP, they also have the same warpgroup's next.

A warpgroup's tile is 64 rows of one or two pieces of columns, each with a total of its own. Totals of two pieces
of 128 columns leave registers for the products of one; those of 128 and 64, or of one of 128, for two.

Scales and bias are loaded before the sums begin, a value in a thread or two, and spread out when they are needed.
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

from kiln.backends.cuda.kernels.gemm_hopper import _block, _next

ROWS: gl.constexpr = gl.constexpr(64)
"""Rows of a warpgroup's tile."""
DEPTH: gl.constexpr = gl.constexpr(128)
"""Codes of the inner dimension in a stage: a row of 128 bytes."""


@gluon.constexpr_function
def _across(columns):
    """A piece's columns: 64 in a warpgroup's threads, further ones in their registers."""
    high = [[1 << bit] for bit in range(6, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(high, [[1], [2], [4], [8], [16]], [[32], [0]], [], [columns])


@gluon.jit
def _steps(split, K, PROMOTE: gl.constexpr, SPLIT: gl.constexpr):
    """(first, end) of a part's stages, of SPLIT parts along the inner dimension."""
    groups = gl.cdiv(K, DEPTH * PROMOTE)
    return groups * split // SPLIT * PROMOTE, groups * (split + 1) // SPLIT * PROMOTE


@gluon.jit
def _copy(
    x, weight, narrow, a, b, full, empty, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, PROMOTE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The copying warp. a: x for the first and second warpgroup (one buffer twice, side by side); b: pieces of
    weight from left to right."""
    WIDE: gl.constexpr = weight.block_shape[0]
    NARROW: gl.constexpr = narrow.block_shape[0]
    SIDE: gl.constexpr = BLOCK_N // 2
    stage = 0
    phase = 1
    units = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) * SPLIT
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, column = _block(unit // SPLIT, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = row * BLOCK_M
        n = column * BLOCK_N
        first, last = _steps(unit % SPLIT, K, PROMOTE, SPLIT)
        for step in range(first, last):
            k = step * DEPTH
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * DEPTH)
            tma.async_load(x, [m, k], ready, a[0].index(stage))
            if BLOCK_M != ROWS:
                tma.async_load(x, [m + ROWS, k], ready, a[1].index(stage))
            tma.async_load(weight, [n, k], ready, b[0].index(stage))
            if PIECES == 2:
                tma.async_load(narrow, [n + WIDE, k], ready, b[1].index(stage))
            if BLOCK_M == ROWS:
                tma.async_load(weight, [n + SIDE, k], ready, b[PIECES].index(stage))
                if PIECES == 2:
                    tma.async_load(narrow, [n + SIDE + WIDE, k], ready, b[3].index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _scales(scales, index, size, step):
    """A scale for each index; with step 0 the one for all."""
    return gl.load(scales + index * step, mask=index < size, other=0.0)


@gluon.jit
def _bias(bias, index, size):
    """Entries of a bias, -0 of one that is null: adding it changes no bit."""
    return gl.load(bias + index, mask=(bias.to(gl.int64) != 0) & (index < size), other=-0.0)


@gluon.jit
def _columns(n, W: gl.constexpr):
    """The numbers (i64) of a piece's columns."""
    return n.to(gl.int64) + gl.arange(0, W, _across(W))


@gluon.jit
def _store(out, c, total, x_scale, weight_scale, bias, m, n, AT: gl.constexpr):
    """Scales, rounds and stores a piece by TMA, 128 bytes of every row at a time, through two buffers in turn.
    AT counts chunks of a tile."""
    CHUNK: gl.constexpr = c.shape[2]
    W: gl.constexpr = total.shape[1]
    if W > CHUNK:
        HALF: gl.constexpr = W // 2
        NEXT: gl.constexpr = AT + HALF // CHUNK
        left, right = total.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        scale0 = None
        scale1 = None
        if weight_scale is not None:
            scale0, scale1 = weight_scale.reshape([2, HALF]).permute([1, 0]).split()
        bias0, bias1 = bias.reshape([2, HALF]).permute([1, 0]).split()
        _store(out, c, left, x_scale, scale0, bias0, m, n, AT)
        _store(out, c, right, x_scale, scale1, bias1, m, n + HALF, NEXT)
    else:
        layout: gl.constexpr = total.type.layout
        buffer = c.index(AT % 2)
        if weight_scale is not None:
            total = gl.convert_layout(weight_scale, gl.SliceLayout(0, layout))[None, :] * total
        if x_scale is not None:
            total = gl.convert_layout(x_scale, gl.SliceLayout(1, layout))[:, None] * total
        total += gl.convert_layout(bias.to(gl.float32), gl.SliceLayout(0, layout))[None, :]
        tma.store_wait(1)
        buffer.store(total.to(c.dtype))
        fence_async_shared()
        tma.async_store(out, [m, n], buffer)


@gluon.jit
def _one(a, b, full, empty, stage, phase, steps, PROMOTE: gl.constexpr, STAGES: gl.constexpr):
    """(total, stage, phase) of a tile of one piece."""
    W: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total = nothing
    for _ in range(0, steps, PROMOTE):
        part = nothing
        for i in gl.static_range(PROMOTE):
            mbarrier.wait(full.index(stage), phase)
            part = warpgroup_mma(
                a.index(stage), b.index(stage).permute([1, 0]), part, use_acc=i > 0, is_async=True
            )
            if i + 1 < PROMOTE:
                stage, phase = _next(stage, phase, STAGES)
        part = warpgroup_mma_wait(0, deps=[part])
        if PROMOTE == 2:
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1))
        mbarrier.arrive(empty.index(stage))
        total += part
        stage, phase = _next(stage, phase, STAGES)
    return total, stage, phase


@gluon.jit
def _one_overlapped(a, b, full, empty, stage, phase, steps, STAGES: gl.constexpr):
    """As `_one`, for an even number of steps: while a step's products are added, the next one's are made."""
    W: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total = nothing
    mbarrier.wait(full.index(stage), phase)
    part = warpgroup_mma(a.index(stage), b.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
    for _ in range(0, steps - 2, 2):
        second, phase1 = _next(stage, phase, STAGES)
        mbarrier.wait(full.index(second), phase1)
        other = warpgroup_mma(
            a.index(second), b.index(second).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        part = warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(empty.index(stage))
        total += part
        stage, phase = _next(second, phase1, STAGES)
        mbarrier.wait(full.index(stage), phase)
        part = warpgroup_mma(
            a.index(stage), b.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        other = warpgroup_mma_wait(1, deps=[other])
        mbarrier.arrive(empty.index(second))
        total += other
    second, phase1 = _next(stage, phase, STAGES)
    mbarrier.wait(full.index(second), phase1)
    other = warpgroup_mma(
        a.index(second), b.index(second).permute([1, 0]), nothing, use_acc=False, is_async=True
    )
    part = warpgroup_mma_wait(1, deps=[part])
    mbarrier.arrive(empty.index(stage))
    total += part
    other = warpgroup_mma_wait(0, deps=[other])
    mbarrier.arrive(empty.index(second))
    total += other
    stage, phase = _next(second, phase1, STAGES)
    return total, stage, phase


@gluon.jit
def _two(
    a, b0, b1, full, empty, stage, phase, steps, PROMOTE: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """(left total, right total, stage, phase) of a tile of two pieces."""
    W0: gl.constexpr = b0.shape[1]
    W1: gl.constexpr = b1.shape[1]
    left: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W0, 32])
    right: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W1, 32])
    nothing0 = gl.zeros([ROWS, W0], gl.float32, left)
    nothing1 = gl.zeros([ROWS, W1], gl.float32, right)
    total0 = nothing0
    total1 = nothing1
    for _ in range(0, steps, PROMOTE):
        if OVERLAP:
            mbarrier.wait(full.index(stage), phase)
            part0 = warpgroup_mma(
                a.index(stage), b0.index(stage).permute([1, 0]), nothing0, use_acc=False, is_async=True
            )
            part1 = warpgroup_mma(
                a.index(stage), b1.index(stage).permute([1, 0]), nothing1, use_acc=False, is_async=True
            )
            part0 = warpgroup_mma_wait(1, deps=[part0])
            total0 = _here(total0 + part0)
            part1 = warpgroup_mma_wait(0, deps=[part1])
            mbarrier.arrive(empty.index(stage))
            total1 += part1
            stage, phase = _next(stage, phase, STAGES)
        elif PROMOTE == 1:
            mbarrier.wait(full.index(stage), phase)
            part0 = warpgroup_mma(
                a.index(stage), b0.index(stage).permute([1, 0]), nothing0, use_acc=False, is_async=True
            )
            part0 = warpgroup_mma_wait(0, deps=[part0])
            total0 = _here(total0 + part0)
            part1 = warpgroup_mma(
                a.index(stage), b1.index(stage).permute([1, 0]), nothing1, use_acc=False, is_async=True
            )
            part1 = warpgroup_mma_wait(0, deps=[part1])
            mbarrier.arrive(empty.index(stage))
            total1 += part1
            stage, phase = _next(stage, phase, STAGES)
        else:
            second, phase1 = _next(stage, phase, STAGES)
            mbarrier.wait(full.index(stage), phase)
            part0 = warpgroup_mma(
                a.index(stage), b0.index(stage).permute([1, 0]), nothing0, use_acc=False, is_async=True
            )
            mbarrier.wait(full.index(second), phase1)
            part0 = warpgroup_mma(
                a.index(second), b0.index(second).permute([1, 0]), part0, is_async=True
            )
            part0 = warpgroup_mma_wait(0, deps=[part0])
            total0 = _here(total0 + part0)
            part1 = warpgroup_mma(
                a.index(stage), b1.index(stage).permute([1, 0]), part0, use_acc=False, is_async=True
            )
            part1 = warpgroup_mma(
                a.index(second), b1.index(second).permute([1, 0]), part1, is_async=True
            )
            part1 = warpgroup_mma_wait(0, deps=[part1])
            mbarrier.arrive(empty.index(stage))
            mbarrier.arrive(empty.index(second))
            total1 += part1
            stage, phase = _next(second, phase1, STAGES)
    return total0, total1, stage, phase


@gluon.jit
def _here(value):
    """The value, computed before what follows: the compiler would put it behind the next products."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], value.dtype, is_pure=False, pack=1)


@gluon.jit
def _places(total):
    """Where a tile's elements lie in its part."""
    layout: gl.constexpr = total.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    return row[:, None] * total.shape[1] + column[None, :]


@gluon.jit
def _last(total, parts, counter, split, SPLIT: gl.constexpr):
    """Lays a part of a tile's sums down; whether all others lie there already."""
    SIZE: gl.constexpr = ROWS * total.shape[1]
    gl.store(parts + split * SIZE + _places(total), total)
    # Every thread has written before one says so; acquire and release order that for the other programs.
    gl.barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _sum(total, parts, SPLIT: gl.constexpr):
    """The parts' sum, in order of the inner dimension."""
    SIZE: gl.constexpr = ROWS * total.shape[1]
    places = _places(total)
    made = gl.load(parts + places, cache_modifier=".cg")
    for split in gl.static_range(1, SPLIT):
        made += gl.load(parts + split * SIZE + places, cache_modifier=".cg")
    return made


@gluon.jit
def _multiply(
    out, a, b0, b1, c, full, empty, x_scale, weight_scale, bias, parts, counters, M, N, K,
    x_scale_step, weight_scale_step,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, PROMOTE: gl.constexpr, OVERLAP: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, the first or the second: its half of every tile of this program."""
    W0: gl.constexpr = b0.shape[1]
    W1: gl.constexpr = b1.shape[1]
    left: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W0, 32])
    stage = 0
    phase = 0
    units = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) * SPLIT
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, column = _block(unit // SPLIT, M, N, BLOCK_M, BLOCK_N, GROUP)
        first, last = _steps(unit % SPLIT, K, PROMOTE, SPLIT)
        steps = last - first
        m = row * BLOCK_M
        n = column * BLOCK_N
        if BLOCK_M == ROWS:
            n += SIDE * (BLOCK_N // 2)
        else:
            m += SIDE * ROWS
        row_scale = None
        if x_scale is not None:
            index = m.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, left))
            row_scale = _scales(x_scale, index, M, x_scale_step)
        columns = _columns(n, W0)
        scale0 = _scales(weight_scale, columns, N, weight_scale_step)
        bias0 = _bias(bias, columns, N)
        if PIECES == 2:
            columns = _columns(n + W0, W1)
            scale1 = _scales(weight_scale, columns, N, weight_scale_step)
            bias1 = _bias(bias, columns, N)
            total0, total1, stage, phase = _two(
                a, b0, b1, full, empty, stage, phase, steps, PROMOTE, STAGES, OVERLAP
            )
            _store(out, c, total0, row_scale, scale0, bias0, m, n, 0)
            _store(out, c, total1, row_scale, scale1, bias1, m, n + W0, W0 // c.shape[2])
        else:
            if OVERLAP:
                total0, stage, phase = _one_overlapped(a, b0, full, empty, stage, phase, steps, STAGES)
            else:
                total0, stage, phase = _one(a, b0, full, empty, stage, phase, steps, PROMOTE, STAGES)
            if SPLIT == 1:
                _store(out, c, total0, row_scale, scale0, bias0, m, n, 0)
            else:
                half = unit // SPLIT * 2 + SIDE
                own = parts + half.to(gl.int64) * (SPLIT * ROWS * W0)
                if _last(total0, own, counters + half, unit % SPLIT, SPLIT):
                    _store(out, c, _sum(total0, own, SPLIT), row_scale, scale0, bias0, m, n, 0)
    tma.store_wait(0)


@gluon.jit
def scaled_matmul_bt(
    x, weight, x_scale, weight_scale, bias, out, parts, counters, M, N, K,
    x_stride, weight_stride, out_stride, x_scale_step, weight_scale_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PROMOTE: gl.constexpr, OVERLAP: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """K >= 1; rows of x, weight and out are multiples of 16 bytes apart and begin at such addresses.

    Programs take tiles of BLOCK_M x BLOCK_N in turn, of which warpgroups have 64 rows each (BLOCK_M 128) or half
    of the columns each (BLOCK_M 64). A half has one piece of 64 or 128 columns, or two: of 128 and 128 or 64.
    x_scale is None, or indexed by rows times x_scale_step (0: one for all); weight_scale likewise by columns;
    bias may be null. With OVERLAP and one piece, PROMOTE is 2 and stands for an even number of steps.

    SPLIT programs share a tile of one piece along the inner dimension. parts [tiles, 2, SPLIT, 64 * columns] f32 and
    counters [tiles, 2], zeros before and after, are None with SPLIT 1. Nobody waits for another program: the last
    one to finish adds the parts in order, so that bits do not depend on who that was.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    result: gl.constexpr = out.dtype.element_ty
    CHUNK: gl.constexpr = 64
    HALF: gl.constexpr = BLOCK_N if BLOCK_M > ROWS else BLOCK_N // 2
    W0: gl.constexpr = min(HALF, 128)
    PIECES: gl.constexpr = 2 if HALF > W0 else 1
    W1: gl.constexpr = HALF - W0 if PIECES == 2 else W0
    la: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], dtype)
    l0: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W0, DEPTH], dtype)
    l1: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W1, DEPTH], dtype)
    lc: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], result)
    xd = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [ROWS, DEPTH], la)
    wd = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [W0, DEPTH], l0)
    od = tma.make_tensor_descriptor(out, [M, N], [out_stride, 1], [ROWS, CHUNK], lc)
    narrow = wd
    if W1 != W0:
        narrow = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [W1, DEPTH], l1)
    a0 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], la)
    b0 = gl.allocate_shared_memory(dtype, [STAGES, W0, DEPTH], l0)
    a1 = a0
    b1 = b0
    b2 = b0
    b3 = b0
    if PIECES == 2:
        b1 = gl.allocate_shared_memory(dtype, [STAGES, W1, DEPTH], l1)
    if BLOCK_M > ROWS:
        a1 = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], la)
        b2 = b0
        b3 = b1
    else:
        b2 = gl.allocate_shared_memory(dtype, [STAGES, W0, DEPTH], l0)
        b3 = b2
        if PIECES == 2:
            b3 = gl.allocate_shared_memory(dtype, [STAGES, W1, DEPTH], l1)
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
                od, a0, b0, b1, c0, full, empty, x_scale, weight_scale, bias, parts, counters, M, N, K,
                x_scale_step, weight_scale_step,
                0, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP, PROMOTE, OVERLAP, SPLIT,
            )),
            (_multiply, (
                od, a1, b2, b3, c1, full, empty, x_scale, weight_scale, bias, parts, counters, M, N, K,
                x_scale_step, weight_scale_step,
                1, BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP, PROMOTE, OVERLAP, SPLIT,
            )),
            (_copy, (
                xd, wd, narrow, (a0, a1), b, full, empty, M, N, K,
                BLOCK_M, BLOCK_N, PIECES, STAGES, GROUP, PROMOTE, SPLIT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
