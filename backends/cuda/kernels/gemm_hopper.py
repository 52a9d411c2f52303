"""Dense matrix product out = x · weightᵀ for Hopper (sm_90a), in Gluon: 16-bit types, and e4m3 with scales.

A program (a CTA, or a cluster of them) stays on its multiprocessors and takes blocks of the output in turn.
One warp fills a ring of stages by TMA, two warpgroups multiply one half of the block each (wgmma, one product
in flight while the next is queued), round, and store by TMA while the next block is being loaded. CTAs of a
cluster lie along M and receive the same rows of weight by multicast.

Three kinds of mbarrier guard a stage: `full` (one arrival, and the bytes of x and weight), `empty` (both
warpgroups have read it) and, in clusters, `pair` in the leading CTA (all producers have seen their own
`empty`), behind which the leader's multicast may write into all of them. The producer's phase starts at 1, so
that it passes a fresh `empty`; every arrival of a stage's round happens exactly once, whatever the number of
steps, so nobody can wait for a round that is not filled.

With `parts`, blocks that do not divide evenly are shared along K: see `_share`. Programs that share a block
lay
their f32 parts down and count themselves; the last one adds them in the order of K and stores. Nobody waits
for another program, so no order of execution can hang, and the bits do not depend on who was last: f32
addition commutes, and more than two parts are all read back in order.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def _along_m(ctas):
    """How rows lie in the CTAs of a cluster: bases of a linear layout."""
    return [[1 << bit, 0] for bit in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def _in_each(ctas):
    """Every CTA of a cluster has the whole of a matrix."""
    return [[0, 0] for _ in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def _in_one(ctas):
    """A cluster has one of a barrier."""
    return [[0] for _ in range(ctas.bit_length() - 1)]


@gluon.jit
def _block(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """(row, column) of a block: GROUP rows of blocks are walked column by column, so that what programs load
    together stays in L2."""
    across = gl.cdiv(N, BLOCK_N)
    span = GROUP * across
    first = tile // span * GROUP
    size = gl.minimum(gl.cdiv(M, BLOCK_M) - first, GROUP)
    return first + tile % span % size, tile % span // size


@gluon.jit
def _share(M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT: gl.constexpr):
    """(blocks that are taken whole, own steps in those, first step of the own share of the rest, own steps).

    A step is BLOCK_K of one block. With SPLIT, whole blocks go round as long as one and up to two for every
    program remain; the steps of these are cut into even shares, one run of steps for each program.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    depth = gl.cdiv(K, BLOCK_K)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    if SPLIT:
        whole = gl.maximum(tiles // programs - 1, 0) * programs
        rest = ((tiles - whole) * depth).to(gl.int64)
        begin = (rest * pid // programs).to(gl.int32)
        end = (rest * (pid + 1) // programs).to(gl.int32)
        own = whole // programs * depth
        return whole, own, begin, own + end - begin
    else:
        own = gl.cdiv(gl.maximum(tiles - pid, 0), programs) * depth
        return tiles, own, 0, own


@gluon.jit
def _segment(done, whole, own, begin, steps, K, BLOCK_K: gl.constexpr, SPLIT: gl.constexpr):
    """(block, first step in it, steps in it) of what comes after `done` own steps."""
    depth = gl.cdiv(K, BLOCK_K)
    turn = gl.program_id(0) + done // depth * gl.num_programs(0)
    if SPLIT:
        at = begin + done - own
        divided = done >= own
        tile = gl.where(divided, whole + at // depth, turn)
        first = gl.where(divided, at % depth, 0)
        return tile, first, gl.minimum(depth - first, steps - done)
    else:
        return turn, 0, depth


@gluon.jit
def _sharers(tile, whole, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    """(first, last) program with steps in a block; the same number twice for whole blocks."""
    programs = gl.num_programs(0)
    depth = gl.cdiv(K, BLOCK_K)
    rest = ((gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) - whole) * depth).to(gl.int64)
    at = ((tile - whole) * depth).to(gl.int64)
    first = (((at + 1) * programs - 1) // rest).to(gl.int32)
    last = (((at + depth) * programs - 1) // rest).to(gl.int32)
    return gl.where(tile < whole, 0, first), gl.where(tile < whole, 0, last)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _produce(
    x, weight, a0, a1, b0, b1, full, empty, pair, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One warp: fills the ring."""
    HALF_M: gl.constexpr = x.block_shape[0]
    HALF_N: gl.constexpr = weight.block_shape[0]
    BYTES: gl.constexpr = x.nbytes_per_cta * (BLOCK_M // HALF_M) + weight.nbytes_per_cta * (BLOCK_N // HALF_N)
    CLUSTER: gl.constexpr = gl.num_ctas() > 1
    whole, own, begin, steps = _share(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT)
    stage = 0
    phase = 1
    done = 0
    while done < steps:
        tile, first, run = _segment(done, whole, own, begin, steps, K, BLOCK_K, SPLIT)
        row, column = _block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
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
            if HALF_M != BLOCK_M:
                tma.async_load(x, [m + HALF_M, k], ready, a1.index(stage))
            if CLUSTER:
                mbarrier.wait(pair.index(stage), phase)
            tma.async_load(weight, [n, k], ready, b0.index(stage), multicast=CLUSTER)
            if HALF_N != BLOCK_N:
                tma.async_load(weight, [n + HALF_N, k], ready, b1.index(stage))
            stage, phase = _next(stage, phase, STAGES)
        done += run


@gluon.jit
def _consume(
    out, a, b, c, full, empty, parts, counters, M, N, K, tail,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: multiplies its half of every block, and stores it."""
    ROWS: gl.constexpr = a.shape[1]
    COLUMNS: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS, 256 // b.dtype.primitive_bitwidth], cga_layout=_along_m(gl.num_ctas())
    )
    whole, own, begin, steps = _share(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT)
    stage = 0
    phase = 0
    before = 0
    done = 0
    while done < steps:
        tile, _, run = _segment(done, whole, own, begin, steps, K, BLOCK_K, SPLIT)
        row, column = _block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = row * BLOCK_M
        n = column * BLOCK_N
        if BLOCK_M != ROWS:
            m += WARPGROUP * ROWS
        if BLOCK_N != COLUMNS:
            n += WARPGROUP * COLUMNS
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for step in range(run):
            mbarrier.wait(full.index(stage), phase)
            total = warpgroup_mma(a.index(stage), b.index(stage).permute([1, 0]), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index(before), pred=step > 0)
            before = stage
            stage, phase = _next(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(before))
        done += run
        if SPLIT:
            own_parts = parts + WARPGROUP * (ROWS * COLUMNS)
            p0, p1 = _sharers(tile, whole, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
            complete = p0 == p1
            if p0 < p1:
                complete = _last(total, own_parts, counters + (tile - whole) * 2 + WARPGROUP, p0, p1)
            if complete:
                _store(out, c, total, m, n, own_parts, p0, p1, 0, COLUMNS, tail, EPILOGUE)
        else:
            _store(out, c, total, m, n, None, 0, 0, 0, COLUMNS, tail, EPILOGUE)
    tma.store_wait(0)


@gluon.jit
def _slot(program, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where a program's part of a block lies. It has one for a block that it starts with, and one for a block
    that it ends with, which is a block that it begins; each holds both warpgroups' halves."""
    return (2 * program + (program == first).to(gl.int32)) * (2 * ROWS * COLUMNS)


@gluon.jit
def _last(total, parts, counter, p0, p1):
    """Lays `total` down as this program's part of a block; whether all other parts lie there already."""
    layout: gl.constexpr = total.type.layout
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    slot = parts + _slot(gl.program_id(0), p0, ROWS, COLUMNS)
    gl.store(slot + row[:, None] * COLUMNS + column[None, :], total)
    gl.barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == p1 - p0
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _values(
    total, m, n, parts, p0, p1, SHIFT: gl.constexpr, WIDTH: gl.constexpr, tail, EPILOGUE: gl.constexpr
):
    """The f32 values to round of a chunk of columns: the parts' sum, and what the call has behind it."""
    layout: gl.constexpr = total.type.layout
    ROWS: gl.constexpr = total.shape[0]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    if parts is not None:
        lane = row[:, None] * WIDTH + (column + SHIFT)[None, :]
        if p1 == p0 + 1:
            total += gl.load(parts + _slot(p0 + p1 - gl.program_id(0), p0, ROWS, WIDTH) + lane)
        elif p1 > p0:
            total = gl.load(parts + _slot(p0, p0, ROWS, WIDTH) + lane)
            for p in range(p0 + 1, p1 + 1):
                total += gl.load(parts + _slot(p, p0, ROWS, WIDTH) + lane)
    return _after(total, m.to(gl.int64) + row, n.to(gl.int64) + (column + SHIFT), *tail, EPILOGUE)


@gluon.jit
def _after(
    total, m, n, M, N, x_scale, weight_scale, bias, x_scale_step, weight_scale_step, extra,
    EPILOGUE: gl.constexpr
):  # fmt: skip
    """What follows the sums of rows m and columns n (i64). EPILOGUE is a function of them, rows [.., 1],
    columns [1, ..], M, N and the values of `extra`."""
    if weight_scale is not None:
        total = gl.load(weight_scale + n * weight_scale_step, mask=n < N, other=0.0)[None, :] * total
    if x_scale is not None:
        total = gl.load(x_scale + m * x_scale_step, mask=m < M, other=0.0)[:, None] * total
    if bias is not None:
        given = (bias.to(gl.int64) != 0) & (n < N)
        total += gl.load(bias + n, mask=given, other=-0.0).to(gl.float32)[None, :]
    if EPILOGUE is not None:
        total = EPILOGUE(total, m[:, None], n[None, :], M, N, *extra)
    return total


@gluon.jit
def _store(
    out, c, total, m, n, parts, p0, p1, SHIFT: gl.constexpr, WIDTH: gl.constexpr, tail, EPILOGUE: gl.constexpr
):
    """Rounds and stores columns from SHIFT on of a half block of WIDTH columns, 128 bytes at a time,
    through as
    many buffers as there are: one for each 128 bytes, or some in turn."""
    CHUNK: gl.constexpr = c.shape[2]
    BUFFERS: gl.constexpr = c.shape[0]
    if total.shape[1] > CHUNK:
        HALF: gl.constexpr = total.shape[1] // 2
        left, right = total.reshape([total.shape[0], 2, HALF]).permute([0, 2, 1]).split()
        _store(out, c, left, m, n, parts, p0, p1, SHIFT, WIDTH, tail, EPILOGUE)
        _store(out, c, right, m, n, parts, p0, p1, SHIFT + HALF, WIDTH, tail, EPILOGUE)
    else:
        AT: gl.constexpr = SHIFT // CHUNK
        ENOUGH: gl.constexpr = BUFFERS * CHUNK >= WIDTH
        values = _values(total, m, n, parts, p0, p1, SHIFT, WIDTH, tail, EPILOGUE).to(c.dtype)
        if not ENOUGH:
            tma.store_wait(BUFFERS - 1)
        elif AT == 0:
            tma.store_wait(0)
        c.index(AT % BUFFERS).store(values)
        if not ENOUGH:
            fence_async_shared()
            tma.async_store(out, [m, n + SHIFT], c.index(AT % BUFFERS))
        elif SHIFT + CHUNK >= WIDTH:
            fence_async_shared()
            for i in gl.static_range(WIDTH // CHUNK):
                tma.async_store(out, [m, n + i * CHUNK], c.index(i))


@gluon.jit
def matmul_bt(
    x, weight, out, x_scale, weight_scale, bias, parts, counters, M, N, K,
    x_stride, weight_stride, out_stride, x_scale_step, weight_scale_step, extra,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ALONG_N: gl.constexpr, BUFFERS: gl.constexpr, PDL: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """K >= 1; rows of x, weight and out are multiples of 16 bytes apart and begin at such addresses.

    BLOCK_M x BLOCK_N is a program's block, of all CTAs of its cluster; warpgroups halve it along N or along
    M.
    parts [2 * programs, BLOCK_M, BLOCK_N] f32 and counters [4 * programs], zeros before and after, make
    programs share blocks; None where they take whole ones. x_scale (x_scale_step 0: one for all),
    weight_scale
    and bias are None, or pointers; bias may be null.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    CTAS: gl.constexpr = gl.num_ctas()
    HALF_M: gl.constexpr = BLOCK_M if ALONG_N else BLOCK_M // 2
    HALF_N: gl.constexpr = BLOCK_N // 2 if ALONG_N else BLOCK_N
    kind: gl.constexpr = x.dtype.element_ty
    result: gl.constexpr = out.dtype.element_ty
    CHUNK: gl.constexpr = 1024 // result.primitive_bitwidth
    la: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [HALF_M, BLOCK_K], kind, cga_layout=_along_m(CTAS)
    )
    lb: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [HALF_N, BLOCK_K], kind, cga_layout=_in_each(CTAS)
    )
    lc: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [HALF_M, CHUNK], result, cga_layout=_along_m(CTAS)
    )
    xd = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [HALF_M, BLOCK_K], la)
    wd = tma.make_tensor_descriptor(weight, [N, K], [weight_stride, 1], [HALF_N, BLOCK_K], lb)
    od = tma.make_tensor_descriptor(out, [M, N], [out_stride, 1], [HALF_M, CHUNK], lc)
    a0 = gl.allocate_shared_memory(kind, [STAGES, HALF_M, BLOCK_K], la)
    b0 = gl.allocate_shared_memory(kind, [STAGES, HALF_N, BLOCK_K], lb)
    if ALONG_N:
        a1 = a0
        b1 = gl.allocate_shared_memory(kind, [STAGES, HALF_N, BLOCK_K], lb)
    else:
        a1 = gl.allocate_shared_memory(kind, [STAGES, HALF_M, BLOCK_K], la)
        b1 = b0
    c0 = gl.allocate_shared_memory(result, [BUFFERS, HALF_M, CHUNK], lc)
    c1 = gl.allocate_shared_memory(result, [BUFFERS, HALF_M, CHUNK], lc)
    full = mbarrier.allocate_mbarrier(STAGES)
    empty = mbarrier.allocate_mbarrier(STAGES)
    pair = empty
    if CTAS > 1:
        pair = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout(_in_one(CTAS)))
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
        if CTAS > 1:
            mbarrier.init(pair.index(stage), 1)
    # Behind the descriptors, for whose making shared memory of the ring served: without these, the compiler
    # puts a fence, and in clusters an exchange between all CTAs, into every step.
    fence_async_shared(cluster=CTAS > 1)
    if CTAS > 1:
        cluster.barrier()
    SPLIT: gl.constexpr = parts is not None
    tail = (M, N, x_scale, weight_scale, bias, x_scale_step, weight_scale_step, extra)
    gl.warp_specialize(
        [
            (_consume, (od, a0, b0, c0, full, empty, parts, counters, M, N, K, tail,
                        0, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, SPLIT, EPILOGUE)),
            (_consume, (od, a1, b1, c1, full, empty, parts, counters, M, N, K, tail,
                        1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, SPLIT, EPILOGUE)),
            (_produce, (xd, wd, a0, a1, b0, b1, full, empty, pair, M, N, K,
                        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, SPLIT)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
