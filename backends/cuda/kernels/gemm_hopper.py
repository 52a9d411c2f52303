"""Dense matrix product out = x · weightᵀ for Hopper (sm_90a), in Gluon: 16-bit types, and e4m3 with
scales.

A program (a CTA, or a cluster of them) stays on its multiprocessors and takes blocks of the output in
turn. One warp fills a ring of stages by TMA. Two warpgroups multiply (wgmma, one product in flight while
the next is queued), round, and store by TMA while the next block is being loaded. CTAs of a cluster lie
along M and receive the same rows of weight by multicast.

mbarriers guard a stage: `full` (one arrival, and the bytes that it announced), `empty` (whoever reads it
has) and, in clusters, `pair` in the leading CTA (all CTAs have seen their own `empty`), behind which the
leader's multicast may write into all of them. The producer begins with phase 1, so that it passes a fresh
`empty`; every arrival of a stage's round happens exactly once, whatever the number of steps. A phase tells
only one round from the next: warpgroups that take blocks in turns wait for each other (`turn`) before they
look at a stage, or they would take a round before the last for theirs.

With `parts`, blocks that do not divide evenly are shared along K: see `share`. Programs that share a block
lay their f32 parts down and count themselves; the last one adds and stores. Nobody waits for another
program, so no order of execution can hang, and bits do not depend on who was last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    cluster,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kiln.backends.cuda.kernels.hopper_share import block, segment, share, sharers
from kiln.backends.cuda.kernels.hopper_store import bias_of, last, scales_of, store


@gluon.constexpr_function
def power_below(n):
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


@gluon.constexpr_function
def along_m(ctas):
    """How rows lie in the CTAs of a cluster: bases of a linear layout."""
    return [[1 << bit, 0] for bit in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def along(columns, ctas):
    """A warpgroup's columns: 64 in its threads, further ones in their registers; in every CTA of a
    cluster."""
    high = [[1 << bit] for bit in range(6, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(high, [[1], [2], [4], [8], [16]], [[32], [0]], in_one(ctas), [columns])


@gluon.constexpr_function
def in_each(ctas):
    """Every CTA of a cluster has the whole of a matrix."""
    return [[0, 0] for _ in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def in_one(ctas):
    """A cluster has one of a barrier."""
    return [[0] for _ in range(ctas.bit_length() - 1)]


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _produce(
    x, weight, second, a0, a1, b0, b1, full, empty, pair, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One warp: fills the ring, with rows of weight for all CTAs of a cluster."""
    ROWS: gl.constexpr = x.block_shape[0]
    FIRST: gl.constexpr = weight.block_shape[0]
    CLUSTER: gl.constexpr = gl.num_ctas() > 1
    BYTES: gl.constexpr = x.nbytes_per_cta * (BLOCK_M // ROWS) + weight.nbytes_per_cta // FIRST * BLOCK_N
    whole, own, begin, steps = share(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT)
    stage = 0
    phase = 1
    done = 0
    while done < steps:
        tile, first, run = segment(done, whole, own, begin, steps, K, BLOCK_K, SPLIT)
        row, column = block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = row * BLOCK_M
        n = column * BLOCK_N
        for step in range(first, first + run):
            k = step * BLOCK_K
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            if CLUSTER:
                mbarrier.arrive(pair.index(stage))
            mbarrier.expect(ready, BYTES)
            tma.async_load(x, [m, k], ready, a0.index(stage))
            if ROWS != BLOCK_M:
                tma.async_load(x, [m + ROWS, k], ready, a1.index(stage))
            if CLUSTER:
                mbarrier.wait(pair.index(stage), phase ^ 1)
            tma.async_load(weight, [n, k], ready, b0.index(stage), multicast=CLUSTER)
            if FIRST != BLOCK_N:
                tma.async_load(second, [n + FIRST, k], ready, b1.index(stage), multicast=CLUSTER)
            stage, phase = _next(stage, phase, STAGES)
        done += run


@gluon.jit
def _consume(
    target, a, b, more, c, full, empty, turn, parts, counters, M, N, K, after, extra,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr, SHARED_BY: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: multiplies its half of every block, or every other block, and stores it."""
    ROWS: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    REST: gl.constexpr = 0 if SHARED_BY == "N" else BLOCK_N - COLUMNS
    DEPTH: gl.constexpr = 256 // b.dtype.primitive_bitwidth
    CGA: gl.constexpr = along_m(gl.num_ctas())
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH], cga_layout=CGA)
    whole, own, begin, steps = share(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT)
    TURNS: gl.constexpr = SHARED_BY == "turns"
    stage = 0
    phase = 0
    done = 0
    opened = 1 - WARPGROUP
    if TURNS:
        done += WARPGROUP * gl.cdiv(K, BLOCK_K)
    while done < steps:
        tile, _, run = segment(done, whole, own, begin, steps, K, BLOCK_K, SPLIT)
        row, column = block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = row * BLOCK_M
        n = column * BLOCK_N
        if SHARED_BY == "M":
            m += WARPGROUP * ROWS
        if SHARED_BY == "N":
            n += WARPGROUP * COLUMNS
        if TURNS:
            stage = done % STAGES
            phase = done // STAGES % 2
        before = stage
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        if REST != 0:
            narrow: gl.constexpr = gl.NVMMADistributedLayout(
                [3, 0], [4, 1], [16, REST, DEPTH], cga_layout=CGA
            )
            rest = gl.zeros([ROWS, REST], gl.float32, narrow)
        left = None
        if after[0] is not None:
            left = scales_of(
                after[0], m.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), M, after[2]
            )
        scales = None
        bias = None
        rest_scales = None
        rest_bias = None
        column = n.to(gl.int64) + gl.arange(0, COLUMNS, along(COLUMNS, gl.num_ctas()))
        if after[1] is not None:
            scales = scales_of(after[1], column, N, after[3])
        if after[4] is not None:
            bias = bias_of(after[4], column, N)
        if REST != 0:
            column = n.to(gl.int64) + COLUMNS + gl.arange(0, REST, along(REST, gl.num_ctas()))
            if after[1] is not None:
                rest_scales = scales_of(after[1], column, N, after[3])
            if after[4] is not None:
                rest_bias = bias_of(after[4], column, N)
        if TURNS:
            mbarrier.wait(turn.index(WARPGROUP), opened)
            opened ^= 1
        for step in range(run):
            mbarrier.wait(full.index(stage), phase)
            total = warpgroup_mma(a.index(stage), b.index(stage).permute([1, 0]), total, is_async=True)
            if REST != 0:
                rest = warpgroup_mma(a.index(stage), more.index(stage).permute([1, 0]), rest, is_async=True)
                total, rest = warpgroup_mma_wait(2, deps=[total, rest])
            else:
                total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index(before), pred=step > 0)
            before = stage
            stage, phase = _next(stage, phase, STAGES)
        if TURNS:
            mbarrier.arrive(turn.index(1 - WARPGROUP))
        if REST != 0:
            total, rest = warpgroup_mma_wait(0, deps=[total, rest])
        else:
            total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(before))
        if SPLIT:
            own_parts = parts + WARPGROUP * (ROWS * COLUMNS)
            p0, p1 = sharers(tile, whole, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
            complete = p0 == p1
            if p0 < p1:
                complete = last(total, own_parts, counters + (tile - whole) * 2 + WARPGROUP, p0, p1)
            if complete:
                store(target, c, total, left, scales, bias, m, n, M, N, own_parts, p0, p1, extra,
                      0, COLUMNS, EPILOGUE)  # fmt: skip
        else:
            store(target, c, total, left, scales, bias, m, n, M, N, None, 0, 0, extra,
                  0, COLUMNS, EPILOGUE)  # fmt: skip
            if REST != 0:
                store(target, c, rest, left, rest_scales, rest_bias, m, n + COLUMNS, M, N, None, 0, 0, extra,
                      0, REST, EPILOGUE)  # fmt: skip
        done += run
        if TURNS:
            done += run
    tma.store_wait(0)


@gluon.jit
def matmul_bt(
    x, weight, out, x_scale, weight_scale, bias, parts, counters, M, N, K,
    x_stride, weight_stride, out_stride, x_scale_step, weight_scale_step, extra,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SHARED_BY: gl.constexpr, BUFFERS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """K >= 1; rows of x, weight and out are multiples of 16 bytes apart and begin at such addresses.

    BLOCK_M x BLOCK_N is a program's block, of all CTAs of its cluster; the two warpgroups halve it along
    "M" or "N", or take whole blocks by "turns", which hides the end of one behind the products of the
    next. BLOCK_N may be a sum of two powers of two, but along "N". parts [2 * programs, BLOCK_M, BLOCK_N]
    f32 and counters [4 * programs], zeros before and after, make programs share blocks; None where they
    take whole ones. x_scale (x_scale_step 0: one for all), weight_scale and bias are None, or pointers;
    bias may be null.
    """
    CTAS: gl.constexpr = gl.num_ctas()
    ROWS: gl.constexpr = BLOCK_M // 2 if SHARED_BY == "M" else BLOCK_M
    FIRST: gl.constexpr = BLOCK_N // 2 if SHARED_BY == "N" else power_below(BLOCK_N)
    SECOND: gl.constexpr = BLOCK_N - FIRST
    kind: gl.constexpr = x.dtype.element_ty
    result: gl.constexpr = out.dtype.element_ty
    CHUNK: gl.constexpr = 1024 // result.primitive_bitwidth
    la: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], kind, cga_layout=along_m(CTAS))
    lb: gl.constexpr = gl.NVMMASharedLayout.get_default_for([FIRST, BLOCK_K], kind, cga_layout=in_each(CTAS))
    lc: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], result, cga_layout=along_m(CTAS))
    xd = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [ROWS, BLOCK_K], la)
    wd = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [FIRST, BLOCK_K], lb)
    od = tma.make_tensor_descriptor(out, [M, N], [out_stride, 1], [ROWS, CHUNK], lc)
    second = wd
    a0 = gl.allocate_shared_memory(kind, [STAGES, ROWS, BLOCK_K], la)
    b0 = gl.allocate_shared_memory(kind, [STAGES, FIRST, BLOCK_K], lb)
    a1 = a0
    b1 = b0
    if SHARED_BY == "M":
        a1 = gl.allocate_shared_memory(kind, [STAGES, ROWS, BLOCK_K], la)
    if SECOND != 0:
        lm: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [SECOND, BLOCK_K], kind, cga_layout=in_each(CTAS)
        )
        if SECOND != FIRST:
            second = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [SECOND, BLOCK_K], lm)
        b1 = gl.allocate_shared_memory(kind, [STAGES, SECOND, BLOCK_K], lm)
    c0 = gl.allocate_shared_memory(result, [BUFFERS, ROWS, CHUNK], lc)
    c1 = gl.allocate_shared_memory(result, [BUFFERS, ROWS, CHUNK], lc)
    full = mbarrier.allocate_mbarrier(STAGES)
    empty = mbarrier.allocate_mbarrier(STAGES)
    pair = empty
    if CTAS > 1:
        pair = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout(in_one(CTAS)))
    turn = empty
    if SHARED_BY == "turns":
        turn = mbarrier.allocate_mbarrier(2)
        mbarrier.init(turn.index(0), 1)
        mbarrier.init(turn.index(1), 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 1 if SHARED_BY == "turns" else 2)
        if CTAS > 1:
            mbarrier.init(pair.index(stage), 1)
    # Behind the descriptors, which are made in memory of the ring: without these, the compiler puts a fence,
    # and in clusters an exchange between all CTAs, into every step.
    fence_async_shared(cluster=CTAS > 1)
    if CTAS > 1:
        cluster.barrier()
    SPLIT: gl.constexpr = parts is not None
    after = (x_scale, weight_scale, x_scale_step, weight_scale_step, bias)
    gl.warp_specialize(
        [
            (_consume, (od, a0, b0, b1, c0, full, empty, turn, parts, counters, M, N, K, after, extra,
                        0, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, SPLIT, SHARED_BY, EPILOGUE)),
            (_consume, (od, a1, b1 if SHARED_BY == "N" else b0, b1, c1, full, empty, turn,
                        parts, counters, M, N, K, after, extra,
                        1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, SPLIT, SHARED_BY, EPILOGUE)),
            (_produce, (xd, wd, second, a0, a1, b0, b1, full, empty, pair, M, N, K,
                        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, SPLIT)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
