"""The gated delta rule in chunks of 64 tokens, as three launches: what each chunk needs of itself, the state
along the chunks, the outputs.

The formulas are in `kiln.recipes.gdn_chunk`. Operands of products are bf16, sums and the state f32; the
inverse is f32 with tf32 products.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.sequences import pick, piece_rows, sequences

CHUNK: tl.constexpr = tl.constexpr(64)


@triton.jit
def _merged(d, a, INNER: tl.constexpr):
    """From the inverse d of the INNER x INNER blocks on the diagonal of I + a to that of blocks 4 times as
    wide: with M = d a below those blocks, M^4 = 0 and (I + M)^-1 d = (I - M)(I + M^2) d."""
    r, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inside = (r // (4 * INNER) == s // (4 * INNER)) & (r // INNER > s // INNER)
    m = tl.dot(d, tl.where(inside, a, 0.0)).to(tl.float16)
    m2 = tl.dot(m, m).to(tl.float16)
    power = (m2 - m).to(tl.float32) - tl.dot(m, m2)
    return (d.to(tl.float32) + tl.dot(power.to(tl.float16), d)).to(tl.float16)


@triton.jit
def _unit_lower_inverse(a):
    """(I + a)^-1 for a strictly lower a [64, 64] f16: blocks of 4 on the diagonal, then of 16, then all.
    Each level is a short product, so that nothing grows as powers of the whole matrix would where keys
    repeat. f16 keeps as many bits as tf32, in half the registers."""
    r, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    least = tl.where(r // 4 == s // 4, a, 0.0)
    square = tl.dot(least, least).to(tl.float16)
    d = (r == s).to(tl.float32) + (square - least).to(tl.float32) - tl.dot(least, square)
    return _merged(_merged(d.to(tl.float16), a, 4), a, 16)


@triton.jit
def prepare(
    k, v, g, beta, cu_seqlens, decay, w, u, T, SEQS, HV, HEADS, k_stride, v_stride, g_stride, beta_stride,
    K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program ids: (chunk, value head). The last two products are made PART columns at a time."""
    _, _, _, first, stop = piece_rows(cu_seqlens, tl.program_id(0), SEQS, T, CHUNK, LANES)
    if first >= stop:
        return
    hv = tl.program_id(1)
    h = hv // (HV // HEADS)
    rows = first.to(tl.int64) + tl.arange(0, CHUNK)
    live = rows < stop
    keys = tl.arange(0, K)
    from_k = k + rows[:, None] * k_stride + (h * K + keys)[None, :]
    kk = tl.load(from_k, mask=live[:, None], other=0.0)
    total = tl.cumsum(tl.load(g + rows * g_stride + hv, mask=live, other=0.0), 0)
    b = tl.load(beta + rows * beta_stride + hv, mask=live, other=0.0)
    r, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    factor = tl.exp(tl.where(r > s, total[:, None] - total[None, :], float("-inf")))
    inner = tl.dot(kk, tl.trans(kk)) * b[:, None] * factor
    inverse = _unit_lower_inverse(inner.to(tl.float16)).to(k.dtype.element_ty)
    tl.store(decay + rows * HV + hv, total, mask=live)
    # Read again in halves instead of kept in registers through the inverse, which takes them all.
    half = tl.arange(0, PART)
    for column in tl.static_range(0, V, PART):
        where = (hv * V + column + half)[None, :]
        vv = tl.load(v + rows[:, None] * v_stride + where, mask=live[:, None], other=0.0)
        strong = (vv.to(tl.float32) * b[:, None]).to(v.dtype.element_ty)
        fresh = tl.dot(inverse, strong).to(u.dtype.element_ty)
        tl.store(u + rows[:, None] * (HV * V) + where, fresh, mask=live[:, None])
    rise = b * tl.exp(total)
    for column in tl.static_range(0, K, PART):
        again = k + rows[:, None] * k_stride + (h * K + column + half)[None, :]
        kk = tl.load(again, mask=live[:, None], other=0.0)
        grown = tl.dot(inverse, (kk.to(tl.float32) * rise[:, None]).to(k.dtype.element_ty))
        where = (hv * K + column + half)[None, :]
        tl.store(w + rows[:, None] * (HV * K) + where, grown.to(w.dtype.element_ty), mask=live[:, None])


@triton.jit
def state(
    k, w, u, decay, initial_state, cu_seqlens, states, v_new, final_state, T, SEQS, HV, HEADS, k_stride,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of values, sequence and value head). The state is held as [K, BLOCK_V]."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // HEADS)
    begins, ends, totals = sequences(cu_seqlens, SEQS, T, CHUNK, LANES)
    begin, end = pick(begins, n, LANES), pick(ends, n, LANES)
    at = pick(totals, n - 1, LANES).to(tl.int64)
    keys, values = tl.arange(0, K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    own = (n.to(tl.int64) * HV + hv) * (V * K) + keys[:, None] + values[None, :] * K
    s = tl.load(initial_state + own)
    lanes = tl.arange(0, CHUNK).to(tl.int64)
    for first in tl.range(begin, end, CHUNK, num_stages=STAGES):
        rows = first + lanes
        live = rows < end
        before = s.to(states.dtype.element_ty)
        tl.store(states + (at * HV + hv) * (K * V) + keys[:, None] * V + values[None, :], before)
        at += 1
        ww = tl.load(w + rows[:, None] * (HV * K) + (hv * K + keys)[None, :], mask=live[:, None], other=0.0)
        where = rows[:, None] * (HV * V) + (hv * V + values)[None, :]
        uu = tl.load(u + where, mask=live[:, None], other=0.0)
        kk = tl.load(k + rows[None, :] * k_stride + (h * K + keys)[:, None], mask=live[None, :], other=0.0)
        total = tl.load(decay + rows * HV + hv, mask=live, other=0.0)
        last = tl.load(decay + (tl.minimum(first + CHUNK, end) - 1).to(tl.int64) * HV + hv)
        fresh = uu.to(tl.float32) - tl.dot(ww, before)
        tl.store(v_new + where, fresh.to(v_new.dtype.element_ty), mask=live[:, None])
        kept = fresh * tl.exp(tl.where(live, last - total, 0.0))[:, None]
        s = s * tl.exp(last) + tl.dot(kk, kept.to(k.dtype.element_ty))
    tl.store(final_state + own, s)


@triton.jit
def output(
    q, k, v_new, states, decay, cu_seqlens, out, T, SEQS, HV, HEADS, scale, q_stride, k_stride, out_stride,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of values, chunk, value head)."""
    chunk, hv = tl.program_id(1).to(tl.int64), tl.program_id(2)
    _, _, _, first, stop = piece_rows(cu_seqlens, tl.program_id(1), SEQS, T, CHUNK, LANES)
    if first >= stop:
        return
    h = hv // (HV // HEADS)
    rows = first.to(tl.int64) + tl.arange(0, CHUNK)
    live = rows < stop
    keys, values = tl.arange(0, K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    qq = tl.load(q + rows[:, None] * q_stride + (h * K + keys)[None, :], mask=live[:, None], other=0.0)
    kk = tl.load(k + rows[None, :] * k_stride + (h * K + keys)[:, None], mask=live[None, :], other=0.0)
    before = tl.load(states + (chunk * HV + hv) * (K * V) + keys[:, None] * V + values[None, :])
    total = tl.load(decay + rows * HV + hv, mask=live, other=0.0)
    where = (hv * V + values)[None, :]
    fresh = tl.load(v_new + rows[:, None] * (HV * V) + where, mask=live[:, None], other=0.0)
    r, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    factor = tl.exp(tl.where((r >= s) & live[:, None], total[:, None] - total[None, :], float("-inf")))
    inner = (tl.dot(qq, kk) * factor).to(v_new.dtype.element_ty)
    found = tl.dot(qq, before) * tl.exp(total)[:, None]
    found = (found + tl.dot(inner, fresh)) * scale
    tl.store(out + rows[:, None] * out_stride + where, found.to(out.dtype.element_ty), mask=live[:, None])

