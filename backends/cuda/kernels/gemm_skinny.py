"""Matrix products with few rows of x: out = x · weightᵀ at the speed of reading the weight."""

import triton
import triton.language as tl


@triton.jit
def _finish(
    total, m, n, M, N, out, x_scale, weight_scale, out_stride
):
    """Scale, round once and store the f32 tile `total` of output features n by rows m."""
    keep = (n < N)[:, None] & (m < M)[None, :]
    if weight_scale is not None:
        total = total * tl.load(weight_scale + n, mask=n < N, other=0.0)[:, None]
        total = total * tl.load(x_scale + m, mask=m < M, other=0.0)[None, :]
    where = out + m[None, :] * out_stride + n[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _arrived_last(arrivals, tile, programs):
    """Whether every other program of the tile has written its partial sums; they are then visible here."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
    return before == programs - 1


@triton.jit
def split_k(
    x,
    weight,
    out,
    x_scale,
    weight_scale,
    partials,
    arrivals,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program a slice of K of an output tile; the last to finish adds the slices in their order."""
    pid = tl.program_id(0)
    split = pid % SPLITS
    tile = pid // SPLITS
    across = tl.cdiv(M, BLOCK_M)
    m = (tile % across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile // across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(K, BLOCK_K)
    first = split * steps // SPLITS
    last = (split + 1) * steps // SPLITS
    a = weight + tl.where(n < N, n, 0)[:, None] * weight_stride + (k + first * BLOCK_K)[None, :]
    b = x + tl.where(m < M, m, 0)[None, :] * x_stride + (k + first * BLOCK_K)[:, None]
    live = (m < M)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        if EVEN_K:
            left = tl.load(a, eviction_policy="evict_first")
            right = tl.load(b, mask=live, other=0.0, eviction_policy="evict_last")
        else:
            here = k < K - step * BLOCK_K
            left = tl.load(a, mask=here[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(b, mask=here[:, None] & live, other=0.0, eviction_policy="evict_last")
        total = tl.dot(left, right, total)
        a += BLOCK_K
        b += BLOCK_K
    if SPLITS == 1:
        _finish(total, m, n, M, N, out, x_scale, weight_scale, out_stride)
    else:
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partials + pid.to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(mine + within, total)
        if _arrived_last(arrivals, tile, SPLITS):
            mine = partials + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M)
            total = tl.load(mine + within, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(mine + s * (BLOCK_N * BLOCK_M) + within, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _finish(total, m, n, M, N, out, x_scale, weight_scale, out_stride)


@triton.jit
def warp_k(
    x,
    weight,
    out,
    x_scale,
    weight_scale,
    partials,
    arrivals,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """As split_k, with each step of BLOCK_K divided among SLICES groups of warps, whose sums meet in shared memory."""
    pid = tl.program_id(0)
    split = pid % SPLITS
    tile = pid // SPLITS
    across = tl.cdiv(M, BLOCK_M)
    m = (tile % across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile // across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    SLICE: tl.constexpr = BLOCK_K // SLICES
    k = tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    steps = tl.cdiv(K, BLOCK_K)
    first = split * steps // SPLITS
    last = (split + 1) * steps // SPLITS
    a = weight + tl.where(n < N, n, 0)[None, :, None] * weight_stride + (k + first * BLOCK_K)[:, None, :]
    b = x + tl.where(m < M, m, 0)[None, None, :] * x_stride + (k + first * BLOCK_K)[:, :, None]
    live = (m < M)[None, None, :]
    sums = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        if EVEN_K:
            left = tl.load(a, eviction_policy="evict_first")
            right = tl.load(b, mask=live, other=0.0, eviction_policy="evict_last")
        else:
            here = k < K - step * BLOCK_K
            left = tl.load(a, mask=here[:, None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(b, mask=here[:, :, None] & live, other=0.0, eviction_policy="evict_last")
        sums = tl.dot(left, right, sums)
        a += BLOCK_K
        b += BLOCK_K
    total = tl.sum(sums, 0)
    if SPLITS == 1:
        _finish(total, m, n, M, N, out, x_scale, weight_scale, out_stride)
    else:
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partials + pid.to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(mine + within, total)
        if _arrived_last(arrivals, tile, SPLITS):
            mine = partials + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M)
            total = tl.load(mine + within, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(mine + s * (BLOCK_N * BLOCK_M) + within, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _finish(total, m, n, M, N, out, x_scale, weight_scale, out_stride)


@triton.jit
def stream_k(
    x,
    weight,
    out,
    x_scale,
    weight_scale,
    partials,
    arrivals,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """PROGRAMS programs share the steps of all tiles evenly, each a run of consecutive ones."""
    pid = tl.program_id(0)
    across = tl.cdiv(M, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    whole = (tl.cdiv(N, BLOCK_N) * across * steps).to(tl.int64)
    first = (pid * whole // PROGRAMS).to(tl.int32)
    last = ((pid + 1) * whole // PROGRAMS).to(tl.int32)
    rows = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    within = rows[:, None] * BLOCK_M + columns[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in tl.range(first, last):
        tile = i // steps
        step = i - tile * steps
        m = (tile % across).to(tl.int64) * BLOCK_M + columns
        n = (tile // across).to(tl.int64) * BLOCK_N + rows
        here = k + step * BLOCK_K
        a = weight + tl.where(n < N, n, 0)[:, None] * weight_stride + here[None, :]
        b = x + tl.where(m < M, m, 0)[None, :] * x_stride + here[:, None]
        live = (m < M)[None, :]
        if EVEN_K:
            left = tl.load(a, eviction_policy="evict_first")
            right = tl.load(b, mask=live, other=0.0, eviction_policy="evict_last")
        else:
            left = tl.load(a, mask=(here < K)[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(b, mask=(here < K)[:, None] & live, other=0.0, eviction_policy="evict_last")
        total = tl.dot(left, right, total)
        if (step == steps - 1) | (i == last - 1):
            begin = tile * steps
            end = begin + steps
            if (begin >= first) & (end <= last):
                _finish(total, m, n, M, N, out, x_scale, weight_scale, out_stride)
            else:
                slot = 2 * pid + (begin >= first).to(tl.int32)
                tl.store(partials + slot.to(tl.int64) * (BLOCK_N * BLOCK_M) + within, total)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for end_of_run in tl.static_range(2):
        tile = (last - 1) // steps if end_of_run else first // steps
        begin = tile * steps
        end = begin + steps
        mine = (begin >= first) if end_of_run else (begin < first)
        if mine & ((begin < first) | (end > last)) & (first < last):
            oldest = (((begin + 1).to(tl.int64) * PROGRAMS - 1) // whole).to(tl.int32)
            newest = ((end.to(tl.int64) * PROGRAMS - 1) // whole).to(tl.int32)
            if _arrived_last(arrivals, tile, newest - oldest + 1):
                m = (tile % across).to(tl.int64) * BLOCK_M + columns
                n = (tile // across).to(tl.int64) * BLOCK_N + rows
                slot = 2 * oldest + (begin >= (oldest * whole // PROGRAMS)).to(tl.int32)
                part = partials + slot.to(tl.int64) * (BLOCK_N * BLOCK_M)
                total = tl.load(part + within, cache_modifier=".cg")
                part = partials + (2 * oldest).to(tl.int64) * (BLOCK_N * BLOCK_M)
                for _ in tl.range(oldest, newest):
                    part += 2 * BLOCK_N * BLOCK_M
                    total += tl.load(part + within, cache_modifier=".cg")
                tl.store(arrivals + tile, 0)
                _finish(total, m, n, M, N, out, x_scale, weight_scale, out_stride)


@triton.jit
def rows_fma(
    x,
    weight,
    out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """No matrix units: each thread multiplies and adds what it loads, the threads of a feature add at the end."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = weight + tl.where(n < N, n, 0)[:, None] * weight_stride + k[None, :]
    b = x + k
    zero = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sum0 = zero
    sum1 = zero
    sum2 = zero
    sum3 = zero
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = k < K - first
        left = tl.load(a, mask=here[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        sum0 = tl.fma(left, tl.load(b, mask=here, other=0.0).to(tl.float32)[None, :] + zero, sum0)
        if ROWS > 1:
            right = tl.load(b + tl.minimum(1, M - 1) * x_stride, mask=here, other=0.0).to(tl.float32)
            sum1 = tl.fma(left, right[None, :] + zero, sum1)
        if ROWS > 2:
            right = tl.load(b + tl.minimum(2, M - 1) * x_stride, mask=here, other=0.0).to(tl.float32)
            sum2 = tl.fma(left, right[None, :] + zero, sum2)
            right = tl.load(b + tl.minimum(3, M - 1) * x_stride, mask=here, other=0.0).to(tl.float32)
            sum3 = tl.fma(left, right[None, :] + zero, sum3)
        a += BLOCK_K
        b += BLOCK_K
    tl.store(out + n, tl.sum(sum0, 1).to(out.dtype.element_ty), mask=n < N)
    if ROWS > 1:
        tl.store(out + out_stride + n, tl.sum(sum1, 1).to(out.dtype.element_ty), mask=(n < N) & (n * 0 + 1 < M))
    if ROWS > 2:
        tl.store(out + 2 * out_stride + n, tl.sum(sum2, 1).to(out.dtype.element_ty), mask=(n < N) & (n * 0 + 2 < M))
        tl.store(out + 3 * out_stride + n, tl.sum(sum3, 1).to(out.dtype.element_ty), mask=(n < N) & (n * 0 + 3 < M))
