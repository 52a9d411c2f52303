"""Hopper's dense matrix product (`gemm_hopper`) with tensor maps that the host makes: the four warps and
warpgroups begin to load and multiply at once, where those of `gemm_hopper` each make a map first, which costs
1.5 to 2 us of every launch. Everything else is its: blocks, shares, order of sums and bits.

The kernel takes maps by value, so that they lie in constant memory: nothing is written before a copy, and no
fence orders one behind it.
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

from kiln.backends.cuda.kernels.gemm_hopper import (
    ROWS,
    _block,
    _last,
    _next,
    _shares,
    _store,
    _store_sum,
    _unit,
)


@gluon.jit
def _load(
    matrix, near, far, full, empty, M, N, K,
    X: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A loading warp: x or weight, a map of boxes, into the buffers of the first and of the second
    warpgroup, which are one where both read the same."""
    BLOCK: gl.constexpr = BLOCK_M if X else BLOCK_N
    HALF: gl.constexpr = near.shape[1]
    BYTES: gl.constexpr = BLOCK * BLOCK_K * (near.dtype.primitive_bitwidth // 8)
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
            tma.async_load(matrix, [at, step * BLOCK_K], ready, near.index(stage))
            if HALF != BLOCK:
                tma.async_load(matrix, [at + HALF, step * BLOCK_K], ready, far.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(
    out, a, b, c, full, empty, parts, counters, M, N, K, extra,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, the first or the second: its half of every block, which it also stores."""
    COLUMNS: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    whole, rest, split = _shares(M, N, K, BLOCK_M, BLOCK_N)
    depth = gl.cdiv(K, BLOCK_K)
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
            _store(out, c, total, tail, 0, EPILOGUE)
        else:
            half = (tile - whole) * 2 + SIDE
            own = parts + half.to(gl.int64) * split * (ROWS * COLUMNS)
            if _last(total, own, counters + half, part, split):
                _store_sum(out, c, own, split, tail, COLUMNS, EPILOGUE)
    tma.store_wait(0)


@gluon.jit
def matmul_bt(
    x, weight, out, parts, counters, M, N, K, extra,
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
    kind: gl.constexpr = x.dtype
    result: gl.constexpr = out.dtype
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
                out, a0, b0, c0, full, empty, parts, counters,
                M, N, K, extra, 0, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, EPILOGUE,
            )),
            (_multiply, (
                out, a1, b1, c1, full, empty, parts, counters,
                M, N, K, extra, 1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, EPILOGUE,
            )),
            (_load, (
                x, a0, a1, full, empty, M, N, K,
                True, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP,
            )),
            (_load, (
                weight, b0, b1, full, empty, M, N, K,
                False, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
