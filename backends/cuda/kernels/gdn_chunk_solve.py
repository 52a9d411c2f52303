"""What a chunk of the gated delta rule needs of itself, in Gluon: one warp for each chunk and value head.

The formulas are in `kiln.recipes.gdn_chunk_walk`. The 64 x 64 matrices are lower triangular, so that ten of
their sixteen blocks of 16 x 16 are made at all, each by mma.sync in the registers of the one warp, row of
blocks by row. A block becomes the right operand of a product by way of shared memory (stmatrix, ldmatrix).
Keys and queries are bf16, the matrices f16 between products, which has as many bits as tf32; sums are f32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kiln.backends.cuda.kernels.sequences_gluon import added, piece_rows

CHUNK: gl.constexpr = gl.constexpr(64)
SIDE: gl.constexpr = gl.constexpr(16)
KEYS: gl.constexpr = gl.constexpr(128)
BLOCK: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, BLOCK.value, 2))
RIGHT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(1, BLOCK.value, 2))
ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, BLOCK.value))
COLUMN: gl.constexpr = gl.constexpr(gl.SliceLayout(0, BLOCK.value))
COPY: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
FLAT: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def _none():
    """A tuple of blocks to begin with."""
    return ()


@gluon.jit
def _left(x):
    """A block as the left operand of a product: the same registers."""
    return gl.convert_layout(x.to(gl.float16), LEFT)


@gluon.jit
def _right(x, place):
    """A block as the right operand of a product."""
    place.store(x.to(gl.float16))
    return place.load(RIGHT)


@gluon.jit
def _inverse(low, places):
    """(I + low)^-1 of a strictly lower block [16, 16] f32: that of its blocks of 4 on the diagonal, d, and
    with m = -d times what is below those, (I + m + m^2 + m^3) d. Two short sums, so that nothing grows as
    powers of the whole block would where keys repeat."""
    r, s = gl.arange(0, SIDE, layout=ROW)[:, None], gl.arange(0, SIDE, layout=COLUMN)[None, :]
    zero = gl.zeros([SIDE, SIDE], gl.float32, layout=BLOCK)
    near = r // 4 == s // 4
    n = gl.where(near, -low, 0.0)
    right = _right(n, places.index(0))
    square = mma_v2(_left(n), right, zero)
    d = mma_v2(_left(square), right, square + gl.where(r == s, 1.0, n))
    m = mma_v2(_left(d), _right(gl.where(near, 0.0, -low), places.index(1)), zero)
    right = _right(m, places.index(2))
    square = mma_v2(_left(m), right, zero)
    power = mma_v2(_left(square), right, m + square)
    return mma_v2(_left(power), _right(d, places.index(3)), d)


@gluon.jit
def _eight_rows(first, stride):
    """Where the elements of eight rows lie."""
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, COPY))
    return first + (row * stride)[:, None] + column[None, :]


@gluon.jit
def _copy(tile, of, stride, left):
    """Begins to copy the rows of a tile, eight at a time; `left` of them there are, zeros follow."""
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, COPY))
    for i in gl.static_range(tile.shape[0] // 8):
        rows = tile.slice(8 * i, 8, 0)
        async_copy.async_load(rows, of + i * (8 * stride), mask=(row < left - 8 * i)[:, None])


@gluon.jit
def _gates(g, beta, factors, first, stop, hv, HV, g_stride, beta_stride):
    """(G log2(e), beta) of a chunk's rows; stores its factors. Rows beyond it have the last G, and 0."""
    lane = gl.arange(0, CHUNK, layout=FLAT)
    rows, live = first.to(gl.int64) + lane, first + lane < stop
    given = gl.load(g + rows * g_stride + hv, mask=live, other=0.0)
    strength = gl.load(beta + rows * beta_stride + hv, mask=live, other=0.0)
    total = gl.associative_scan(given, 0, added)
    last = gl.sum(gl.where(lane == CHUNK - 1, total, 0.0), 0)
    gl.store(factors + lane, gl.exp(total))
    gl.store(factors + CHUNK + lane, gl.exp(last - total))
    return total * LOG2E, strength


@gluon.jit
def solve(
    q, k, g, beta, cu_seqlens, blocks, factors, T, SEQS, HV, HEADS, scale, q_stride, k_stride, g_stride,
    beta_stride,
    LANES: gl.constexpr,
):  # fmt: skip
    """Program ids: (value head, chunk)."""
    first, stop = piece_rows(cu_seqlens, gl.program_id(1), SEQS, T, CHUNK, LANES)
    if first < stop:
        hv = gl.program_id(0)
        h, left, row0 = hv // (HV // HEADS), stop - first, first.to(gl.int64)
        kind: gl.constexpr = k.dtype.element_ty
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        k_tile = gl.allocate_shared_memory(kind, [CHUNK, KEYS], swizzled)
        q_tile = gl.allocate_shared_memory(kind, [2, SIDE, KEYS], swizzled)
        places = gl.allocate_shared_memory(
            gl.float16, [6, SIDE, SIDE], gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
        )
        of_q = _eight_rows(q + row0 * q_stride + h * KEYS, q_stride)
        _copy(k_tile, _eight_rows(k + row0 * k_stride + h * KEYS, k_stride), k_stride, left)
        for i in gl.static_range(2):
            _copy(q_tile.index(i), of_q + i * SIDE * q_stride, q_stride, left - SIDE * i)
            async_copy.commit_group()
        at = gl.program_id(1).to(gl.int64) * HV + hv
        gates = _gates(g, beta, factors + at * (2 * CHUNK), first, stop, hv, HV, g_stride, beta_stride)
        decay = gl.allocate_shared_memory(gl.float32, [CHUNK], plain, gates[0])
        strength = gl.allocate_shared_memory(gl.float32, [CHUNK], plain, gates[1])
        r, s = gl.arange(0, SIDE, layout=ROW), gl.arange(0, SIDE, layout=COLUMN)
        zero = gl.zeros([SIDE, SIDE], gl.float32, layout=BLOCK)
        to = blocks + at * (2 * CHUNK * CHUNK) + r[:, None] * CHUNK + s[None, :]
        made = _none()
        for i in gl.static_range(4):
            async_copy.wait_group(1 if i < 3 else 0)
            ka, qa = k_tile.slice(SIDE * i, SIDE, 0).load(LEFT), q_tile.index(i % 2).load(LEFT)
            if i < 2:
                _copy(q_tile.index(i), of_q + (i + 2) * SIDE * q_stride, q_stride, left - SIDE * (i + 2))
                async_copy.commit_group()
            gr, br = decay.slice(SIDE * i, SIDE, 0).load(ROW), strength.slice(SIDE * i, SIDE, 0).load(ROW)
            if i > 0:
                # Left of the diagonal a decay is that since the row before the block, times that up to it.
                since = gl.sum(decay.slice(SIDE * i - 1, 1, 0).load(FLAT), 0)
                grown = gl.exp2(gr - since)
                strong = (grown * br)[:, None]
            low, high = _none(), _none()
            for j in gl.static_range(i + 1):
                kb = k_tile.slice(SIDE * j, SIDE, 0).permute((1, 0)).load(RIGHT)
                gs = decay.slice(SIDE * j, SIDE, 0).load(COLUMN)
                a, p = mma_v2(ka, kb, zero), mma_v2(qa, kb, zero)
                if j < i:
                    shrunk = gl.exp2(since - gs)[None, :]
                    p = p * grown[:, None] * shrunk
                    low = low + (_left(a * strong * shrunk),)  # noqa: RUF005
                else:
                    inside = r[:, None] >= s[None, :]
                    factor = gl.exp2(gl.where(inside, gr[:, None] - gs[None, :], float("-inf")))
                    p = p * factor
                    own = _inverse(gl.where(r[:, None] > s[None, :], a * factor * br[:, None], 0.0), places)
                high = high + (_left(p),)  # noqa: RUF005
            against = _left(-own)
            for j in gl.static_range(4):
                x, p = own if j == i else zero, zero
                if j < i:
                    t = zero
                    for c in gl.static_range(j, i):
                        t = mma_v2(low[c], made[c * (c + 1) // 2 + j], t)
                    x = mma_v2(against, _right(t, places.index(j)), zero)
                if j <= i:
                    made = made + (_right(x, places.index(3 + j % 3)),)  # noqa: RUF005
                    for c in gl.static_range(j, i + 1):
                        p = mma_v2(high[c], made[c * (c + 1) // 2 + j], p)
                    bs = strength.slice(SIDE * j, SIDE, 0).load(COLUMN)
                    x = x * bs[None, :]
                    p = p * (bs * scale)[None, :]
                gl.store(to + SIDE * (i * CHUNK + j), x.to(kind))
                gl.store(to + CHUNK * CHUNK + SIDE * (i * CHUNK + j), p.to(kind))
