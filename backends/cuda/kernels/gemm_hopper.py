"""Dense matrix product out = x · weightᵀ of 16-bit types for Hopper (sm_90a), in Gluon.

A program stays on its multiprocessor and takes blocks of the output in turn. Two warps fill a ring of stages
by TMA, one with x and one with weight; two warpgroups multiply one half of the block each (wgmma, one product
in flight while the next is queued), round, and store by TMA while the next block is being loaded.

Every warp and warpgroup makes the tensor map that it uses, so that they are made side by side: one after
another, before anything else, they took 0.5 to 1 us more of every launch.

Two kinds of mbarrier guard a stage: `full` (both loading warps have arrived, and their bytes) and `empty`
(both warpgroups have read it). The loading warps' phase starts at 1, so that it passes a fresh `empty`; every
arrival of a stage's round happens exactly once, whatever the number of steps, so nobody can wait for a round
that is not filled.

Blocks of a last round that does not come out even are shared along K where programs would have nothing to
do, each by the same number of programs: see `_shares`. These lay their f32 parts down and count themselves;
the last one adds them in the order of K and stores. Nobody waits for another program, so no order of
execution can hang, and the bits do not depend on who was last.
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
"""Rows of a warpgroup's half of a block."""
MOST: gl.constexpr = gl.constexpr(8)
"""Programs that share a block, at most: the last one reads all their sums."""
DEEP: gl.constexpr = gl.constexpr(1024)
"""Elements along K of a share, at least."""


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
def _shares(M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(blocks that programs take whole, blocks of a last round that does not come out even, programs that
    share each of these): as many as there are, but for shares that are too small to gain anything."""
    programs = gl.num_programs(0)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    rest = tiles % programs
    free = programs // gl.maximum(rest, 1)
    return tiles - rest, rest, gl.maximum(gl.minimum(gl.minimum(free, MOST), K // DEEP), 1)


@gluon.jit
def _unit(unit, whole, rest, depth, split):
    """(block, part of it, first step, end) of a unit of work: a whole block, or one of `split` parts of one
    of the rest. The same part of all these blocks comes first, so that programs read the same stretch of K
    together."""
    over = unit - whole
    part = over // gl.maximum(rest, 1)
    divided = unit >= whole
    tile = gl.where(divided, whole + over - part * rest, unit)
    first = gl.where(divided, depth * part // split, 0)
    end = gl.where(divided, depth * (part + 1) // split, depth)
    return tile, part, first, end


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _load(
    matrix, stride, limit, near, far, full, empty, M, N, K,
    X: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A loading warp: x or weight, of `limit` rows, into the buffers of the first and of the second
    warpgroup, which are one where both read the same."""
    BLOCK: gl.constexpr = BLOCK_M if X else BLOCK_N
    HALF: gl.constexpr = near.shape[1]
    BYTES: gl.constexpr = BLOCK * BLOCK_K * (near.dtype.primitive_bitwidth // 8)
    tensor = tma.make_tensor_descriptor(matrix, [limit, K], [stride, 1], [HALF, BLOCK_K], near.layout)
    # Without it the compiler puts a fence into every step, for the memory that the map was made in.
    fence_async_shared()
    whole, rest, split = _shares(M, N, K, BLOCK_M, BLOCK_N)
    depth = gl.cdiv(K, BLOCK_K)
    stage = 0
    phase = 1
    for unit in range(gl.program_id(0), whole + rest * split, gl.num_programs(0)):
        tile, _, first, end = _unit(unit, whole, rest, depth, split)
        row, column = _block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        at = (row if X else column) * BLOCK
        for step in range(first, end):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            tma.async_load(tensor, [at, step * BLOCK_K], ready, near.index(stage))
            if HALF != BLOCK:
                tma.async_load(tensor, [at + HALF, step * BLOCK_K], ready, far.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(
    out, out_stride, a, b, c, full, empty, parts, counters, M, N, K, extra,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, the first or the second: its half of every block, which it also stores."""
    COLUMNS: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    whole, rest, split = _shares(M, N, K, BLOCK_M, BLOCK_N)
    depth = gl.cdiv(K, BLOCK_K)
    od = tma.make_tensor_descriptor(out, [M, N], [out_stride, 1], [ROWS, c.shape[2]], c.layout)
    fence_async_shared()
    stage = 0
    phase = 0
    # Not a copy of `stage`: the compiler would take the two names for one in the loop.
    before = 0
    for unit in range(gl.program_id(0), whole + rest * split, gl.num_programs(0)):
        tile, part, first, end = _unit(unit, whole, rest, depth, split)
        row, column = _block(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = row * BLOCK_M
        n = column * BLOCK_N
        if BLOCK_M != ROWS:
            m += SIDE * ROWS
        else:
            n += SIDE * COLUMNS
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for step in range(first, end):
            mbarrier.wait(full.index(stage), phase)
            total = warpgroup_mma(a.index(stage), b.index(stage).permute([1, 0]), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index(before), pred=step > first)
            before = stage
            stage, phase = _next(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(before))
        tail = (m, n, M, N, extra)
        if unit < whole or split == 1:
            _store(od, c, total, tail, 0, EPILOGUE)
        else:
            half = (tile - whole) * 2 + SIDE
            own = parts + half.to(gl.int64) * split * (ROWS * COLUMNS)
            if _last(total, own, counters + half, part, split):
                _store_sum(od, c, own, split, tail, COLUMNS, EPILOGUE)
    tma.store_wait(0)


@gluon.jit
def _flat(total):
    """A half block in the order of parts: for every 8 columns, 16 bytes of each thread in turn."""
    COLUMNS: gl.constexpr = total.shape[1]
    return total.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * COLUMNS])


@gluon.jit
def _unflat(part, COLUMNS: gl.constexpr):
    """The half block of a part."""
    return part.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, COLUMNS])


@gluon.jit
def _last(total, parts, counter, part, split):
    """Lays `total` down as a part of a half block; whether all others lie there already."""
    SIZE: gl.constexpr = ROWS * total.shape[1]
    flat = _flat(total)
    gl.store(parts + part * SIZE + gl.arange(0, SIZE, flat.type.layout), flat)
    # Every thread has written before one says so; acquire and release order that for the other programs.
    gl.barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == split - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _part(parts, at, part, split, SIZE: gl.constexpr):
    """Values of a part of SIZE values, -0 where there is none: adding it changes no bit."""
    return gl.load(
        parts + part * SIZE + at, mask=(at >= 0) & (part < split), other=-0.0, cache_modifier=".cg"
    )


@gluon.jit
def _put(out, c, values, tail, SHIFT: gl.constexpr, EPILOGUE: gl.constexpr):
    """Rounds and stores the chunk of a half block that begins SHIFT columns in, behind EPILOGUE, a function
    of the sums, rows [.., 1], columns [1, ..], M, N and the values of `extra`."""
    BUFFERS: gl.constexpr = c.shape[0]
    m, n, M, N, extra = tail
    if EPILOGUE is not None:
        layout: gl.constexpr = values.type.layout
        row = m.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = n.to(gl.int64) + SHIFT + gl.arange(0, c.shape[2], gl.SliceLayout(0, layout))
        values = EPILOGUE(values, row[:, None], column[None, :], M, N, *extra)
    buffer = c.index(SHIFT // c.shape[2] % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    buffer.store(values.to(c.dtype))
    fence_async_shared()
    tma.async_store(out, [m, n + SHIFT], buffer)


@gluon.jit
def _store(out, c, total, tail, SHIFT: gl.constexpr, EPILOGUE: gl.constexpr):
    """Stores columns of a half block, SHIFT of it and on: 128 bytes of every row at a time."""
    if total.shape[1] > c.shape[2]:
        HALF: gl.constexpr = total.shape[1] // 2
        left, right = total.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        _store(out, c, left, tail, SHIFT, EPILOGUE)
        _store(out, c, right, tail, SHIFT + HALF, EPILOGUE)
    else:
        _put(out, c, total, tail, SHIFT, EPILOGUE)


@gluon.jit
def _store_sum(out, c, parts, split, tail, COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr):
    """Stores a half block of which all parts lie in memory, added in the order of K. The first parts of the
    next chunk of columns are on their way meanwhile: more do not fit into the registers."""
    CHUNK: gl.constexpr = c.shape[2]
    SIZE: gl.constexpr = ROWS * COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    order: gl.constexpr = _flat(gl.zeros([ROWS, CHUNK], gl.float32, layout)).type.layout
    at = gl.arange(0, ROWS * CHUNK, order)
    p0 = _part(parts, at, 0, split, SIZE)
    p1 = _part(parts, at, 1, split, SIZE)
    for i in gl.static_range(COLUMNS // CHUNK):
        here = parts + i * CHUNK * ROWS
        after = here + CHUNK * ROWS
        p2 = _part(here, at, 2, split, SIZE)
        p3 = _part(here, at, 3, split, SIZE)
        total = p0 + p1
        if (i + 1) * CHUNK < COLUMNS:
            p0 = _part(after, at, 0, split, SIZE)
            p1 = _part(after, at, 1, split, SIZE)
        total = total + p2 + p3
        for part in range(4, split, 2):
            p2 = _part(here, at, part, split, SIZE)
            p3 = _part(here, at, part + 1, split, SIZE)
            total = total + p2 + p3
        _put(out, c, gl.convert_layout(_unflat(total, CHUNK), layout), tail, i * CHUNK, EPILOGUE)


@gluon.jit
def matmul_bt(
    x, weight, out, parts, counters, M, N, K, x_stride, weight_stride, out_stride, extra,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, BUFFERS: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """K >= 1; rows of x, weight and out are multiples of 16 bytes apart and begin at such addresses.

    BLOCK_M x BLOCK_N is a program's block: warpgroups halve 128 rows along M, 64 along N. parts holds
    BLOCK_M x BLOCK_N f32 and counters two i32 for each program; counters are zeros before and after. BUFFERS
    of 128 bytes of every row hold the output of each warpgroup.
    """
    ALONG_N: gl.constexpr = BLOCK_M == ROWS
    HALF_N: gl.constexpr = BLOCK_N // 2 if ALONG_N else BLOCK_N
    kind: gl.constexpr = x.dtype.element_ty
    result: gl.constexpr = out.dtype.element_ty
    CHUNK: gl.constexpr = min(1024 // result.primitive_bitwidth, HALF_N)
    la: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], kind)
    lb: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_N, BLOCK_K], kind)
    lc: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], result)
    a0 = gl.allocate_shared_memory(kind, [STAGES, ROWS, BLOCK_K], la)
    b0 = gl.allocate_shared_memory(kind, [STAGES, HALF_N, BLOCK_K], lb)
    if ALONG_N:
        a1 = a0
        b1 = gl.allocate_shared_memory(kind, [STAGES, HALF_N, BLOCK_K], lb)
    else:
        a1 = gl.allocate_shared_memory(kind, [STAGES, ROWS, BLOCK_K], la)
        b1 = b0
    c0 = gl.allocate_shared_memory(result, [BUFFERS, ROWS, CHUNK], lc)
    c1 = gl.allocate_shared_memory(result, [BUFFERS, ROWS, CHUNK], lc)
    full = mbarrier.allocate_mbarrier(STAGES)
    empty = mbarrier.allocate_mbarrier(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 2)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out, out_stride, a0, b0, c0, full, empty, parts, counters,
                M, N, K, extra, 0, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, EPILOGUE,
            )),
            (_multiply, (
                out, out_stride, a1, b1, c1, full, empty, parts, counters,
                M, N, K, extra, 1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, EPILOGUE,
            )),
            (_load, (
                x, x_stride, M, a0, a1, full, empty, M, N, K,
                True, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP,
            )),
            (_load, (
                weight, weight_stride, N, b0, b1, full, empty, M, N, K,
                False, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
