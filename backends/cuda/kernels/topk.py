"""Top-k with indices over rows, exact under the total order (key descending, index ascending).

An element is packed in 64 bits: an order-preserving key of its value above the complement of its column.
Packed elements are distinct, so "larger" is the whole contract: NaN first, both zeros equal, ties by lower
index. A program keeps the best `KEEP` of a range of columns in registers, sorted. A tile of columns is read
once: the maximum of each group of its elements, a float maximum apiece, says whether anything in the tile can
still enter. Only then are the groups' largest packed elements extracted, sorted and merged, repeatedly until
no group holds an element above the k-th best. There are no atomics and no capacity that adversarial input
could exceed.
"""

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _key(x):
    """The order-preserving key of f32 values: NaN above +inf, -0 equal to +0."""
    bits = x.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    key = tl.where(x == 0.0, 0x80000000, key)
    return tl.where(x != x, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def _pack(x, col):
    return (_key(x).to(tl.uint64) << 32) | (~col).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _side(rank: tl.constexpr, bit: tl.constexpr):
    """0 and 1 along the hypercube axis of index bit `bit`."""
    return tl.reshape(tl.arange(0, 2), [1] * (rank - bit - 1) + [2] + [1] * bit)


@triton.jit
def _exchange(h, descending, rank: tl.constexpr, bit: tl.constexpr):
    """Order each pair of elements whose index differs in `bit`."""
    other = tl.sum(h, rank - 1 - bit, keep_dims=True) - h
    return tl.where((h > other) != (descending ^ _side(rank, bit)).to(tl.int1), other, h)


@triton.jit
def _bitonic(h, descending, rank: tl.constexpr, length: tl.constexpr):
    """Sort every bitonic run of 2**length elements of a hypercube; `descending` is 0, 1, or varies over
    the hypercube."""
    for step in tl.static_range(length):
        h = _exchange(h, descending, rank, length - 1 - step)
    return h


@triton.jit
def _halve(h, descending: tl.constexpr, rank: tl.constexpr, keep: tl.constexpr):
    """From neighbouring runs of opposite direction, the best run of each two: 2**rank elements become half
    as many."""
    h = tl.max(h, axis=rank - 1 - keep)
    return _bitonic(h, _side(rank - 1, keep) if rank - 1 > keep else descending, rank - 1, keep)


@triton.jit
def _fold(h, descending: tl.constexpr, rank: tl.constexpr, keep: tl.constexpr):
    """From 2**(rank - keep) sorted runs of alternating direction, the best 2**keep elements as one sorted
    run."""
    for i in tl.static_range(rank - keep):
        h = _halve(h, descending, rank - i, keep)
    return h


@triton.jit
def _sort_top(x, descending: tl.constexpr, rank: tl.constexpr, keep: tl.constexpr):
    """The largest 2**keep of 2**rank elements, as a sorted hypercube."""
    h = tl.reshape(x, [2] * rank)
    for i in tl.static_range(1, keep + 1):
        h = _bitonic(h, _side(rank, i) if i < rank else descending, rank, i)
    return _fold(h, descending, rank, keep)


@triton.jit
def _merge(best, rising, keep: tl.constexpr):
    """The best 2**keep of two sorted runs, `best` descending and `rising` ascending."""
    return _bitonic(tl.maximum(best, rising), 1, keep, keep)


@triton.jit
def _kth(best, k, KEEP: tl.constexpr):
    flat = tl.reshape(best, [KEEP])
    return tl.max(tl.where(tl.arange(0, KEEP) >= k - 1, flat, 0), axis=0)


@triton.jit
def _group_max(x):
    """The largest packed element of each group of an [E, G, VEC] tile."""
    return tl.max(tl.max(x, axis=2), axis=0)


@triton.jit
def _select(
    row,
    begin,
    end,
    limit,
    k,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_KEEP: tl.constexpr,
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The best KEEP packed elements of columns [begin, end) of a row, descending; columns from `limit` on
    count as -inf.

    WHOLE tiles are read without a mask: the last one is moved back to end with the range, and its stale
    columns are dropped when packed.
    """
    best = tl.full([2] * LOG_KEEP, 0, tl.uint64)
    kth = tl.zeros([], tl.uint64)
    lane = tl.arange(0, TILE)
    shape: tl.constexpr = [TILE // (GROUPS * VEC), GROUPS, VEC]
    width = end - begin
    for t in range(width // TILE + (width % TILE + TILE - 1) // TILE):
        fresh = begin + t * TILE
        if WHOLE:
            start = tl.multiple_of(tl.minimum(fresh, end - TILE), 16)
            raw = tl.load(row + start + lane)
        else:
            start = fresh
            raw = tl.load(row + start + lane, mask=lane < end - start, other=NEGATIVE_INFINITY)
        x = tl.reshape(raw.to(tl.float32), shape)
        peak = tl.reduce(tl.reduce(x, 2, _nan_max), 0, _nan_max)
        if tl.max(_key(peak), axis=0) > (kth >> 32).to(tl.uint32):
            col = tl.reshape(start + lane, shape)
            live = (tl.reshape(lane, shape) < end - start) & (col >= fresh)
            packed = tl.where(live, _pack(tl.where(col < limit, x, NEGATIVE_INFINITY), col), 0)
            found = _group_max(packed)
            while tl.max(found, axis=0) > kth:
                best = _merge(best, _sort_top(found, 0, LOG_GROUPS, LOG_KEEP), LOG_KEEP)
                kth = _kth(best, k, KEEP)
                found = _group_max(tl.where(packed < found[None, :, None], packed, 0))
    return best


@triton.jit
def _emit(best, scores, values, indices, row, row_stride, limit, k, KEEP: tl.constexpr):
    """Write the first k of a descending run: the row's own bits, or -inf for a padded column, and the
    columns."""
    place = tl.arange(0, KEEP)
    col = ~tl.reshape(best, [KEEP]).to(tl.uint32).to(tl.int32, bitcast=True)
    live = place < k
    out = row.to(tl.int64) * k + place
    x = tl.load(
        scores + row.to(tl.int64) * row_stride + col, mask=live & (col < limit), other=NEGATIVE_INFINITY
    )
    tl.store(values + out, x, mask=live)
    tl.store(indices + out, col, mask=live)


@triton.jit
def top_k_row(
    scores,
    values,
    indices,
    row_stride,
    V,
    limit,
    k,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_KEEP: tl.constexpr,
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program a row: the whole op in one launch."""
    row = tl.program_id(0)
    begin = row * 0
    source = scores + row.to(tl.int64) * row_stride
    best = _select(source, begin, V, limit, k, TILE, GROUPS, KEEP, LOG_GROUPS, LOG_KEEP, VEC, WHOLE)
    _emit(best, scores, values, indices, row, row_stride, limit, k, KEEP)


@triton.jit
def top_k_tiles(
    scores,
    packed,
    row_stride,
    V,
    limit,
    k,
    chunk,
    lists,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    LOG_KEEP: tl.constexpr,
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Program (row, c): the sorted best of columns [c * chunk, (c + 1) * chunk), into packed[row, c *
    KEEP:]; zeros fill a short list."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = tl.minimum(part.to(tl.int64) * chunk, V).to(tl.int32)
    end = begin + tl.minimum(chunk, V - begin)
    source = scores + row * row_stride
    best = _select(source, begin, end, limit, k, TILE, GROUPS, KEEP, LOG_GROUPS, LOG_KEEP, VEC, WHOLE)
    place = tl.arange(0, KEEP)
    run = tl.where(place < k, tl.reshape(best, [KEEP]), 0)
    tl.store(packed + (row * lists + part) * KEEP + place, run.to(tl.int64, bitcast=True))


@triton.jit
def top_k_merge(
    packed,
    scores,
    values,
    indices,
    row_stride,
    limit,
    k,
    lists,
    LISTS: tl.constexpr,
    KEEP: tl.constexpr,
    LOG_ALL: tl.constexpr,
    LOG_KEEP: tl.constexpr,
):
    """One program a row: the best of its `lists` sorted lists, LISTS of them at a time."""
    row = tl.program_id(0)
    best = tl.full([2] * LOG_KEEP, 0, tl.uint64)
    which = tl.arange(0, LISTS * KEEP) // KEEP
    place = tl.arange(0, LISTS * KEEP) % KEEP
    place = tl.where(which % 2 == 1, KEEP - 1 - place, place)
    for first in range(0, lists, LISTS):
        live = which < lists - first
        source = packed + (row.to(tl.int64) * lists + first + which) * KEEP + place
        run = tl.load(source, mask=live, other=0).to(tl.uint64, bitcast=True)
        best = _merge(best, _fold(tl.reshape(run, [2] * LOG_ALL), 0, LOG_ALL, LOG_KEEP), LOG_KEEP)
    _emit(best, scores, values, indices, row, row_stride, limit, k, KEEP)
