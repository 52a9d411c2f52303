"""Top-k with indices over rows, exact under the total order (key descending, index ascending).

An element is packed in 64 bits: an order-preserving key of its value above the complement of its column.
Packed elements are distinct, so "larger" is the whole contract: NaN first, both zeros equal, ties by lower
index. A block of elements is narrowed to few candidates: the k-th largest of the maxima of disjoint groups is
at most the k-th largest element, and few elements reach it. Where more than CAP do, which takes adversarial
input, the bound is bisected until between k and CAP elements reach it: packed elements are distinct, so it
ends. Candidates are compacted by a prefix sum, and each is written to the place that the number of larger
candidates gives: nothing is sorted, no order of execution is visible.
"""

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _widen(x):
    """f32 values of f32 or bf16 ones, bit by bit: no conversion that could quiet or replace a NaN."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _key(x):
    """The order-preserving key of f32 values: NaN above +inf, -0 equal to +0."""
    bits = x.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    key = tl.where(x == 0.0, 0x80000000, key)
    return tl.where(x != x, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def _join(key, col):
    return (key.to(tl.uint64) << 32) | (~col).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _above(peers, x):
    """How many of `peers` are larger, for each x."""
    return tl.sum((peers[None, :] > x[:, None]).to(tl.int32), axis=1)


@triton.jit
def _bound(peaks, k):
    """The k-th largest of some elements, 0 if there are fewer."""
    return tl.min(tl.where(_above(peaks, peaks) < k, peaks, tl.max(peaks, axis=0)), axis=0)


@triton.jit
def _reach(packed, bound):
    """Which elements of an [E, THREADS, VEC] block reach the bound: a bit mask a thread, bit e * VEC + v."""
    steps: tl.constexpr = packed.shape[0]
    vec: tl.constexpr = packed.shape[2]
    bit = tl.arange(0, steps)[:, None, None] * vec + tl.arange(0, vec)[None, None, :]
    one = tl.where(packed >= bound, 1 << bit, 0)
    return tl.sum(tl.sum(one, axis=2), axis=0).to(tl.uint32, bitcast=True)


@triton.jit
def _bits(mask):
    """Ones of each mask."""
    pairs = mask - ((mask >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _narrow(packed, low, high, k, CAP: tl.constexpr):
    """Masks of at least k and at most CAP elements, all that reach some bound, and their number; at least k
    elements, or all that are live, reach `low`, and at most one reaches `high`."""
    mask = _reach(packed, low)
    count = tl.sum(_bits(mask).to(tl.int32), axis=0)
    while count > CAP:
        middle = low + ((high - low) >> 1)
        fewer = _reach(packed, middle)
        reach = tl.sum(_bits(fewer).to(tl.int32), axis=0)
        enough = reach >= k
        mask = tl.where(enough, fewer, mask)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reach, count)
    return mask, count


@triton.jit
def _lowest(mask, THREADS: tl.constexpr, VEC: tl.constexpr):
    """The position in the block of each mask's lowest one."""
    one = (mask & (~mask + 1)).to(tl.float32).to(tl.int32, bitcast=True)
    bit = tl.maximum((one >> 23) - 127, 0)
    return (bit // VEC) * (THREADS * VEC) + tl.arange(0, THREADS) * VEC + bit % VEC


@triton.jit
def _first_places(mask):
    mine = _bits(mask).to(tl.int32)
    return tl.cumsum(mine, axis=0) - mine


@triton.jit
def _ranked(source, slot, count, PEERS: tl.constexpr):
    """The stored candidates at `slot`, and the rank of each among `count`; zeros beyond them."""
    found = tl.load(source + slot, mask=slot < count, other=0).to(tl.uint64, bitcast=True)
    rank = tl.zeros(slot.shape, tl.int32)
    for first in range(0, count, PEERS):
        peer = first + tl.arange(0, PEERS)
        peers = tl.load(source + peer, mask=peer < count, other=0).to(tl.uint64, bitcast=True)
        rank += _above(peers, found)
    return found, rank


@triton.jit
def _emit(found, rank, scores, values, indices, row, row_stride, limit, k):
    """Write candidates to the places of their ranks: the row's own bits, or -inf for a padded column, and
    the columns."""
    col = ~found.to(tl.uint32).to(tl.int32, bitcast=True)
    live = (rank < k) & (found > 0)
    out = row.to(tl.int64) * k + rank
    source = scores + row.to(tl.int64) * row_stride + col
    x = tl.load(source, mask=live & (col < limit), other=NEGATIVE_INFINITY)
    tl.store(values + out, x, mask=live)
    tl.store(indices + out, col, mask=live)


@triton.jit
def _columns(source, col, V, limit):
    """Keys of columns of a row, 0 beyond its end."""
    raw = tl.load(source + col, mask=col < V, other=NEGATIVE_INFINITY)
    return tl.where(col < V, _key(tl.where(col < limit, _widen(raw), NEGATIVE_INFINITY)), 0)


@triton.jit
def _compact_columns(out, mask, source, begin, V, limit, THREADS: tl.constexpr, VEC: tl.constexpr):
    """Store the marked columns, packed, one after another."""
    place = _first_places(mask)
    while tl.max(mask, axis=0) > 0:
        live = mask > 0
        col = begin + _lowest(mask, THREADS, VEC)
        packed = _join(_columns(source, tl.where(live, col, V), V, limit), col)
        tl.store(out + place, packed.to(tl.int64, bitcast=True), mask=live)
        place += 1
        mask = mask & (mask - 1)


@triton.jit
def _peaks(x, GROUPS: tl.constexpr):
    """The largest element of each group of neighbouring threads of an [E, THREADS, VEC] block."""
    mine = tl.max(tl.max(x, axis=2), axis=0)
    return tl.max(tl.reshape(mine, [GROUPS, x.shape[1] // GROUPS]), axis=1)


@triton.jit
def _best_of_tile(
    out,
    source,
    begin,
    V,
    limit,
    k,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store at least the best k of TILE columns from `begin`, at most KEEP, and return how many."""
    shape: tl.constexpr = [TILE // (THREADS * VEC), THREADS, VEC]
    col = begin + tl.arange(0, TILE)
    key = tl.reshape(_columns(source, col, V, limit), shape)
    peaks = _peaks(key, GROUPS)
    low = _join(tl.maximum(_bound(peaks, k), 1).to(tl.uint32), begin + (TILE - 1))
    high = _join(tl.max(peaks, axis=0), begin)
    mask, count = _narrow(_join(key, tl.reshape(col, shape)), low, high, k, KEEP)
    _compact_columns(out, mask, source, begin, V, limit, THREADS, VEC)
    return count


@triton.jit
def top_k_tiles(
    scores,
    packed,
    row_stride,
    V,
    limit,
    k,
    lists,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    VEC: tl.constexpr,
):
    """Program (row, c): the best k of columns [c * TILE, (c + 1) * TILE) in order, into packed[row, c *
    KEEP:]; zeros fill the list."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    mine = packed + (row * lists + part) * KEEP
    source = scores + row * row_stride
    count = _best_of_tile(mine, source, part * TILE, V, limit, k, TILE, THREADS, GROUPS, KEEP, VEC)
    place = tl.arange(0, KEEP)
    tl.debug_barrier()
    found, rank = _ranked(mine, place, count, 16)
    tl.debug_barrier()
    tl.store(mine + rank, found.to(tl.int64, bitcast=True), mask=(rank < k) & (found > 0))
    tl.store(mine + place, 0, mask=place >= tl.minimum(k, count))


@triton.jit
def _compact_slots(
    out,
    mask,
    source,
    KEEP: tl.constexpr,
    USED: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store the marked slots, one after another."""
    place = _first_places(mask)
    while tl.max(mask, axis=0) > 0:
        live = mask > 0
        slot = _lowest(mask, THREADS, VEC)
        packed = tl.load(source + (slot // USED) * KEEP + slot % USED, mask=live, other=0)
        tl.store(out + place, packed, mask=live)
        place += 1
        mask = mask & (mask - 1)


@triton.jit
def top_k_merge(
    packed,
    scores,
    values,
    indices,
    scratch,
    row_stride,
    limit,
    k,
    lists,
    LISTS: tl.constexpr,
    KEEP: tl.constexpr,
    USED: tl.constexpr,
    THREADS: tl.constexpr,
    GROUPS: tl.constexpr,
    VEC: tl.constexpr,
):
    """One program a row: the best of its at most LISTS lists, of which only USED >= k slots can be live."""
    row = tl.program_id(0)
    shape: tl.constexpr = [LISTS * USED // (THREADS * VEC), THREADS, VEC]
    slot = tl.arange(0, LISTS * USED)
    source = packed + row.to(tl.int64) * lists * KEEP
    every = tl.load(source + (slot // USED) * KEEP + slot % USED, mask=slot < lists * USED, other=0)
    every = tl.reshape(every.to(tl.uint64, bitcast=True), shape)
    peaks = _peaks(every, GROUPS)
    low = tl.maximum(_bound(peaks, k), 1).to(tl.uint64)
    mask, count = _narrow(every, low, tl.max(peaks, axis=0), k, KEEP)
    mine = scratch + row.to(tl.int64) * KEEP
    _compact_slots(mine, mask, source, KEEP, USED, THREADS, VEC)
    tl.debug_barrier()
    found, rank = _ranked(mine, tl.arange(0, KEEP), count, 16)
    _emit(found, rank, scores, values, indices, row, row_stride, limit, k)


@triton.jit
def _packed_columns(source, col, V, limit):
    key = _columns(source, col, V, limit)
    return tl.where(key > 0, _join(key, col), 0)


@triton.jit
def _extremes(source, V, limit, TILE: tl.constexpr):
    """Packed bounds of a row: every element reaches the first, at most one the second."""
    largest = tl.zeros([TILE], tl.uint32)
    missing = tl.zeros([TILE], tl.uint32)
    for first in range(0, V, TILE):
        key = _columns(source, first + tl.arange(0, TILE), V, limit)
        largest = tl.maximum(largest, key)
        missing = tl.maximum(missing, tl.where(key > 0, ~key, 0))
    least = (~tl.max(missing, axis=0)).to(tl.uint32)
    return _join(least, V - 1), _join(tl.max(largest, axis=0), V * 0)


@triton.jit
def _row_reach(source, bound, V, limit, TILE: tl.constexpr):
    """How many elements of a row reach a bound."""
    total = tl.zeros([TILE], tl.int32)
    for first in range(0, V, TILE):
        packed = _packed_columns(source, first + tl.arange(0, TILE), V, limit)
        total += (packed >= bound).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def top_k_row(
    scores,
    values,
    indices,
    scratch,
    row_stride,
    V,
    limit,
    k,
    TILE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One program a row, any k and V: the row is read again for every bisection of the bound, until at most
    KEEP elements reach it."""
    row = tl.program_id(0)
    source = scores + row.to(tl.int64) * row_stride
    low, high = _extremes(source, V, limit, TILE)
    count = V
    while count > KEEP:
        middle = low + ((high - low) >> 1)
        reach = _row_reach(source, middle, V, limit, TILE)
        enough = reach >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reach, count)
    mine = scratch + row.to(tl.int64) * KEEP
    begin = V * 0
    for first in range(0, V, TILE):
        packed = _packed_columns(source, first + tl.arange(0, TILE), V, limit)
        live = (packed >= low).to(tl.int32)
        place = begin + tl.cumsum(live, axis=0) - live
        tl.store(mine + place, packed.to(tl.int64, bitcast=True), mask=live > 0)
        begin += tl.sum(live, axis=0)
    tl.debug_barrier()
    for first in range(0, count, 128):
        found, rank = _ranked(mine, first + tl.arange(0, 128), count, 16)
        _emit(found, rank, scores, values, indices, row, row_stride, limit, k)
