"""One decode step of the gated delta rule over a state and the ring of the steps since it was written: a
program has BLOCK_V values of one head of one row.

Tiles over keys are [K / PART, rows, PART]: a lane holds all parts of its keys, so that a sum over K is
mostly additions within it and then log2(PART / 4) exchanges for all of its rows at once.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(tile, vector):
    """The dot of each of the rows with a vector, [parts, rows, part] and [parts, part]."""
    return tl.sum(tl.sum(tile * vector[:, None, :], axis=0), axis=1)


@triton.jit
def _unit(x, EPS: tl.constexpr):
    """x over the root of its sum of squares."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, axis=0), axis=0) + EPS))


@triton.jit
def _vectors(packed, h, HEADS, scale, keys, K: tl.constexpr):
    """Query and key of a head."""
    q = tl.load(packed + h * K + keys).to(tl.float32)
    k = tl.load(packed + (HEADS + h) * K + keys).to(tl.float32)
    return _unit(q, 1e-6) * scale, _unit(k, 1e-6)


@triton.jit
def _gates(a, b, a_log, dt_bias, hv):
    """(log decay, strength); `a` and `b` point at the row's."""
    x = tl.load(a + hv).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
    strength = tl.load(b + hv)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
    sigmoid = 1.0 / (1.0 + tl.exp(-strength.to(tl.float32)))
    return -tl.exp(tl.load(a_log + hv)) * softplus, sigmoid.to(strength.dtype).to(tl.float32)


@triton.jit
def replay_decode(
    mixed_qkv,
    a,
    b,
    a_log,
    dt_bias,
    state,
    ring_d,
    ring_k,
    ring_g,
    state_indices,
    write_pos,
    force_flush,
    state_out,
    ring_d_out,
    ring_k_out,
    ring_g_out,
    out,
    HV,
    HEADS,
    SLOTS,
    scale,
    qkv_stride,
    a_stride,
    b_stride,
    state_stride,
    d_stride,
    k_stride,
    g_stride,
    out_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTRIES: tl.constexpr,
    PART: tl.constexpr,
    CACHE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Program ids: (value block and value head, row). The ring is read ENTRIES at a time, the newest first."""
    tiles: tl.constexpr = V // BLOCK_V
    hv, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    h = hv // (HV // HEADS)
    values = block * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, K // PART)[:, None] * PART + tl.arange(0, PART)[None, :]
    slot = tl.load(state_indices + row).to(tl.int64)
    live = tl.load(write_pos + row)
    where = out + row * out_stride + hv * V + values
    # What cannot be refused here is treated as a row without a slot: nothing outside is read or written.
    if (slot <= 0) | (slot >= SLOTS) | (live < 0) | (live >= WINDOW):
        tl.store(where, tl.zeros((BLOCK_V,), out.dtype.element_ty))
        return
    tile = slot * state_stride + hv.to(tl.int64) * (V * K) + (values * K)[None, :, None] + keys[:, None, :]
    old = tl.load(state + tile, cache_modifier=CACHE, eviction_policy=EVICT)
    flush = live == WINDOW - 1
    if force_flush is not None:
        flush = flush | (tl.load(force_flush + row) != 0)
    packed = mixed_qkv + row * qkv_stride
    v = tl.load(packed + 2 * HEADS * K + hv * V + values).to(tl.float32)
    d_ring = slot * d_stride + hv * (WINDOW * V) + values
    k_ring = slot * k_stride + h * (WINDOW * K) + keys
    g_ring = slot * g_stride + hv * WINDOW
    if flush:
        for j in range(live):
            past = tl.load(ring_d + d_ring + j * V).to(tl.float32)
            key = tl.load(ring_k + k_ring + j * K).to(tl.float32)
            decay = tl.exp(tl.load(ring_g + g_ring + j))
            old = old * decay + past[None, :, None] * key[:, None, :]
        q, k = _vectors(packed, h, HEADS, scale, keys, K)
        g, beta = _gates(a + row * a_stride, b + row * b_stride, a_log, dt_bias, hv)
        old = old * tl.exp(g)
        d = beta * (v - _dot(old, k))
        new = old + d[None, :, None] * k[:, None, :]
        tl.store(where, _dot(new, q).to(out.dtype.element_ty))
        tl.store(state_out + tile, new, eviction_policy=EVICT)
    else:
        lane = tl.arange(0, ENTRIES)
        recalled = tl.zeros((BLOCK_V,), tl.float32)
        read = tl.zeros((BLOCK_V,), tl.float32)
        after = 0.0
        q, k = _vectors(packed, h, HEADS, scale, keys, K)
        g, beta = _gates(a + row * a_stride, b + row * b_stride, a_log, dt_bias, hv)
        for turn in range((live + ENTRIES - 1) // ENTRIES):
            entry = ((live - 1) // ENTRIES - turn) * ENTRIES + lane
            used = entry < live
            past = tl.load(ring_d + d_ring[None, :] + (entry * V)[:, None], mask=used[:, None], other=0.0)
            past_keys = tl.load(
                ring_k + k_ring[:, None, :] + (entry * K)[None, :, None],
                mask=used[None, :, None],
                other=0.0,
            ).to(tl.float32)
            decays = tl.load(ring_g + g_ring + entry, mask=used, other=0.0)
            next_used = (entry + 1 < live) & (lane + 1 < ENTRIES)
            later = tl.load(ring_g + g_ring + entry + 1, mask=next_used, other=0.0)
            weights = tl.exp(tl.cumsum(later, axis=0, reverse=True) + after)
            past = past.to(tl.float32)
            recalled += tl.sum(past * (weights * _dot(past_keys, k))[:, None], axis=0)
            read += tl.sum(past * (weights * _dot(past_keys, q))[:, None], axis=0)
            after += tl.sum(decays, axis=0)
        kept, alpha = tl.exp(after), tl.exp(g)
        d = beta * (v - alpha * (kept * _dot(old, k) + recalled))
        both = tl.sum(tl.sum(k * q, axis=0), axis=0)
        tl.store(where, (alpha * (kept * _dot(old, q) + read) + d * both).to(out.dtype.element_ty))
        tl.store(ring_d_out + d_ring + live * V, d.to(ring_d_out.dtype.element_ty))
        if block == 0:
            tl.store(ring_g_out + g_ring + live, g)
            if hv % (HV // HEADS) == 0:
                tl.store(ring_k_out + k_ring + live * K, k.to(ring_k_out.dtype.element_ty))
