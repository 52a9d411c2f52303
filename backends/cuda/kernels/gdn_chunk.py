"""The gated delta rule in chunks of 64 tokens, as three launches: what each chunk needs of itself, the state along the chunks, the outputs.

The formulas are in `kiln.recipes.gdn_chunk`. Operands of products are bf16, sums and the state f32; the inverse is f32 with tf32 products.
Boundaries are made monotonic and kept inside the rows, so that no value of cu_seqlens leads outside an operand.
"""

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(64)
SUB: tl.constexpr = tl.constexpr(16)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sequences(cu_seqlens, SEQS, T, LANES: tl.constexpr):
    """(begin, end, chunks up to and with it) of LANES sequences; those beyond SEQS are empty."""
    n = tl.arange(0, LANES)
    edge = tl.load(cu_seqlens + n, mask=(n > 0) & (n < SEQS), other=0)
    begin = tl.minimum(tl.maximum(tl.associative_scan(edge, 0, _larger), 0), T)
    after = tl.load(cu_seqlens + n + 1, mask=n + 1 < SEQS, other=0)
    end = tl.maximum(begin, tl.minimum(after, T))
    begin = tl.where(n < SEQS, begin, T)
    end = tl.where(n + 1 < SEQS, end, T)
    return begin, end, tl.cumsum((end - begin + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _pick(values, index, LANES: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, LANES) == index, values, 0), axis=0)


@triton.jit
def _chunk_rows(cu_seqlens, chunk, SEQS, T, LANES: tl.constexpr):
    """(first row, end) of a chunk; both T where there are fewer."""
    begin, end, total = _sequences(cu_seqlens, SEQS, T, LANES)
    n = tl.sum((total <= chunk).to(tl.int32), axis=0)
    before = _pick(total, n - 1, LANES)
    first = _pick(begin, n, LANES) + (chunk - before) * CHUNK
    stop = tl.minimum(first + CHUNK, _pick(end, n, LANES))
    return tl.where(n < SEQS, first, T), tl.where(n < SEQS, stop, T)


@triton.jit
def _unit_lower_inverse(a):
    """(I + a)^-1 for a strictly lower a [64, 64]: 16 x 16 blocks on the diagonal row by row, then
    (I + M)^-1 D with M = D a below them, which is nilpotent: (I + M)^-1 = (I - M)(I + M^2)."""
    blocks: tl.constexpr = CHUNK // SUB
    r, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    i, j = tl.arange(0, SUB)[None, :, None], tl.arange(0, blocks)
    same = (j[:, None] == j[None, :])[:, None, :, None]
    x = -tl.sum(tl.where(same, tl.reshape(a, (blocks, SUB, blocks, SUB)), 0.0), axis=2)
    for row in range(1, SUB):
        old = tl.sum(tl.where(i == row, x, 0.0), axis=1)
        new = old + tl.sum(old[:, :, None] * x, axis=1)
        x = tl.where(i == row, new[:, None, :], x)
    spread = tl.where(same, tl.expand_dims(x, 2), 0.0)
    d = tl.reshape(spread, (CHUNK, CHUNK)) + (r == s).to(tl.float32)
    m = tl.dot(d, tl.where(r // SUB > s // SUB, a, 0.0), input_precision="tf32")
    m2 = tl.dot(m, m, input_precision="tf32")
    power = (r == s).to(tl.float32) - m + m2 - tl.dot(m, m2, input_precision="tf32")
    return tl.dot(power, d, input_precision="tf32")


@triton.jit
def prepare(
    k, v, g, beta, cu_seqlens, decay, w, u, T, SEQS, HV, HEADS, k_stride, v_stride, g_stride, beta_stride,
    K: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program ids: (chunk, value head)."""
    first, stop = _chunk_rows(cu_seqlens, tl.program_id(0), SEQS, T, LANES)
    if first >= stop:
        return
    hv = tl.program_id(1)
    h = hv // (HV // HEADS)
    rows = first.to(tl.int64) + tl.arange(0, CHUNK)
    live = rows < stop
    keys, values = tl.arange(0, K), tl.arange(0, V)
    from_k = k + rows[:, None] * k_stride + (h * K + keys)[None, :]
    kk = tl.load(from_k, mask=live[:, None], other=0.0)
    total = tl.cumsum(tl.load(g + rows * g_stride + hv, mask=live, other=0.0), 0)
    b = tl.load(beta + rows * beta_stride + hv, mask=live, other=0.0)
    r, s = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    factor = tl.exp(tl.where(r > s, total[:, None] - total[None, :], float("-inf")))
    inverse = _unit_lower_inverse(tl.dot(kk, tl.trans(kk)) * b[:, None] * factor).to(k.dtype.element_ty)
    tl.store(decay + rows * HV + hv, total, mask=live)
    # Read again instead of kept in registers through the inverse, which takes them all; the store keeps them apart.
    vv = tl.load(v + rows[:, None] * v_stride + (hv * V + values)[None, :], mask=live[:, None], other=0.0)
    strong = (vv.to(tl.float32) * b[:, None]).to(v.dtype.element_ty)
    tl.store(u + rows[:, None] * (HV * V) + (hv * V + values)[None, :],
             tl.dot(inverse, strong).to(u.dtype.element_ty), mask=live[:, None])  # fmt: skip
    again = tl.load(from_k, mask=live[:, None], other=0.0)
    grown = (again.to(tl.float32) * (b * tl.exp(total))[:, None]).to(k.dtype.element_ty)
    tl.store(w + rows[:, None] * (HV * K) + (hv * K + keys)[None, :],
             tl.dot(inverse, grown).to(w.dtype.element_ty), mask=live[:, None])  # fmt: skip


@triton.jit
def state(
    k, w, u, decay, initial_state, cu_seqlens, states, v_new, final_state, T, SEQS, HV, HEADS, k_stride,
    K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of values, sequence and value head). The state is held as [K, BLOCK_V]."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // HEADS)
    begins, ends, totals = _sequences(cu_seqlens, SEQS, T, LANES)
    begin, end = _pick(begins, n, LANES), _pick(ends, n, LANES)
    at = _pick(totals, n - 1, LANES).to(tl.int64)
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
    first, stop = _chunk_rows(cu_seqlens, tl.program_id(1), SEQS, T, LANES)
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
