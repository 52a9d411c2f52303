"""One decode step of the gated delta rule over a state and the ring of the steps since it was written: a
program has BLOCK_V values of one head of one row.

Rows of K keys are taken in parts of PART, [rows, PART] or [parts, rows, PART]: a lane holds the same keys of
every part, so that a sum over K is mostly additions within it and then log2(PART / 4) exchanges for all of
its rows at once. The two routes share no tile, and neither holds the other's registers.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(tile, vector):
    """The dot of each of the rows with a vector, [parts, rows, part] and [parts, part]."""
    return tl.sum(tl.sum(tile * vector[:, None, :], axis=0), axis=1)


@triton.jit
def _unit(x):
    """x over the root of its sum of squares."""
    return x * _inverse(tl.sum(tl.sum(x * x, axis=0), axis=0))


@triton.jit
def _inverse(squares):
    return 1.0 / tl.sqrt_rn(squares + 1e-6)


@triton.jit
def _entry(ring_d, ring_k, ring_g, j, live, V: tl.constexpr, K: tl.constexpr):
    """(update, key, decay) of entry j; what is not live changes nothing. Pointers are to entry 0."""
    d = tl.load(ring_d + j * V, mask=j < live, other=0.0).to(tl.float32)
    k = tl.load(ring_k + j * K, mask=j < live, other=0.0).to(tl.float32)
    return d, k, tl.exp(tl.load(ring_g + j, mask=j < live, other=0.0))


@triton.jit
def _replayed(state, d, k, decay):
    """One step of the ring on a tile."""
    return tl.fma(state, decay, d[None, :, None] * k[:, None, :])


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
    mixed_qkv, a, b, a_log, dt_bias, state, ring_d, ring_k, ring_g, state_indices, write_pos, force_flush,
    state_out, ring_d_out, ring_k_out, ring_g_out, out, HV, HEADS, SLOTS, scale, qkv_stride, a_stride,
    b_stride, state_stride, d_stride, k_stride, g_stride, out_stride, K: tl.constexpr, V: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_V: tl.constexpr, ENTRIES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program ids: (value block and value head, row). ENTRIES is the power of two from WINDOW on."""
    tiles: tl.constexpr = V // BLOCK_V
    hv, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    h = hv // (HV // HEADS)
    values = block * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(state_indices + row).to(tl.int64)
    live = tl.load(write_pos + row)
    where = out + row * out_stride + hv * V + values
    # What cannot be refused here is treated as a row without a slot: nothing outside is read or written.
    if (slot <= 0) | (slot >= SLOTS) | (live < 0) | (live >= WINDOW):
        tl.store(where, tl.zeros((BLOCK_V,), out.dtype.element_ty))
        return
    flush = live == WINDOW - 1
    if force_flush is not None:
        flush = flush | (tl.load(force_flush + row) != 0)
    packed = mixed_qkv + row * qkv_stride
    q_row, k_row = packed + h * K, packed + (HEADS + h) * K
    v_row = packed + 2 * HEADS * K + hv * V
    rows = slot * state_stride + hv.to(tl.int64) * (V * K)
    d_ring = slot * d_stride + hv * (WINDOW * V)
    k_ring = slot * k_stride + h * (WINDOW * K)
    g_ring = slot * g_stride + hv * WINDOW
    if flush:
        keys = tl.arange(0, K // PART)[:, None] * PART + tl.arange(0, PART)[None, :]
        tile = rows + (values * K)[None, :, None] + keys[:, None, :]
        new = tl.load(state + tile)
        query, key = tl.load(q_row + keys).to(tl.float32), tl.load(k_row + keys).to(tl.float32)
        v = tl.load(v_row + values).to(tl.float32)
        g, beta = _gates(a + row * a_stride, b + row * b_stride, a_log, dt_bias, hv)
        all_d, all_k, all_g = ring_d + d_ring + values, ring_k + k_ring + keys, ring_g + g_ring
        # Four steps of the ring at a time: what they load is on its way together.
        for j in range(0, live, 4):
            d0, k0, g0 = _entry(all_d, all_k, all_g, j, live, V, K)
            d1, k1, g1 = _entry(all_d, all_k, all_g, j + 1, live, V, K)
            d2, k2, g2 = _entry(all_d, all_k, all_g, j + 2, live, V, K)
            d3, k3, g3 = _entry(all_d, all_k, all_g, j + 3, live, V, K)
            new = _replayed(new, d0, k0, g0)
            new = _replayed(new, d1, k1, g1)
            new = _replayed(new, d2, k2, g2)
            new = _replayed(new, d3, k3, g3)
        query, key = _unit(query) * scale, _unit(key)
        new = new * tl.exp(g)
        d = beta * (v - _dot(new, key))
        new = new + d[None, :, None] * key[:, None, :]
        tl.store(where, _dot(new, query).to(out.dtype.element_ty))
        tl.store(state_out + tile, new, eviction_policy="evict_first")
    else:
        # Dots with q and k as they are; norms and scale come last, so that nothing waits for them.
        part = tl.arange(0, PART)
        entry = tl.arange(0, ENTRIES)
        used = entry < live
        recalled = tl.zeros((BLOCK_V, PART), tl.float32)
        read = tl.zeros((BLOCK_V, PART), tl.float32)
        key_recalled = tl.zeros((ENTRIES, PART), tl.float32)
        key_read = tl.zeros((ENTRIES, PART), tl.float32)
        kk = tl.zeros((PART,), tl.float32)
        qq = tl.zeros((PART,), tl.float32)
        kq = tl.zeros((PART,), tl.float32)
        for p in tl.static_range(K // PART):
            at = rows + (values * K)[:, None] + (p * PART + part)[None, :]
            old = tl.load(state + at, eviction_policy="evict_first")
            q = tl.load(q_row + p * PART + part).to(tl.float32)
            k = tl.load(k_row + p * PART + part).to(tl.float32)
            past_at = k_ring + (entry * K)[:, None] + (p * PART + part)[None, :]
            past_keys = tl.load(ring_k + past_at, mask=used[:, None], other=0.0).to(tl.float32)
            recalled = tl.fma(old, k[None, :], recalled)
            read = tl.fma(old, q[None, :], read)
            key_recalled = tl.fma(past_keys, k[None, :], key_recalled)
            key_read = tl.fma(past_keys, q[None, :], key_read)
            kk, qq, kq = tl.fma(k, k, kk), tl.fma(q, q, qq), tl.fma(k, q, kq)
        past_at = d_ring + (entry * V)[:, None] + values[None, :]
        past = tl.load(ring_d + past_at, mask=used[:, None], other=0.0).to(tl.float32)
        decays = tl.load(ring_g + g_ring + entry, mask=used, other=0.0)
        later = tl.load(ring_g + g_ring + entry + 1, mask=entry + 1 < live, other=0.0)
        v = tl.load(v_row + values).to(tl.float32)
        g, beta = _gates(a + row * a_stride, b + row * b_stride, a_log, dt_bias, hv)
        weights = tl.exp(tl.cumsum(later, axis=0, reverse=True))
        kept, alpha = tl.exp(tl.sum(decays, axis=0)), tl.exp(g)
        k_unit, q_unit = _inverse(tl.sum(kk, axis=0)), _inverse(tl.sum(qq, axis=0)) * scale
        ring_recalled = tl.sum(past * (weights * tl.sum(key_recalled, axis=1))[:, None], axis=0)
        ring_read = tl.sum(past * (weights * tl.sum(key_read, axis=1))[:, None], axis=0)
        d = beta * (v - alpha * k_unit * (kept * tl.sum(recalled, axis=1) + ring_recalled))
        o = alpha * q_unit * (kept * tl.sum(read, axis=1) + ring_read)
        o += d * (tl.sum(kq, axis=0) * k_unit * q_unit)
        tl.store(where, o.to(out.dtype.element_ty))
        tl.store(ring_d_out + d_ring + live * V + values, d.to(ring_d_out.dtype.element_ty))
        if block == 0:
            tl.store(ring_g_out + g_ring + live, g)
            if hv % (HV // HEADS) == 0:
                whole = tl.arange(0, K)
                unit = tl.load(k_row + whole).to(tl.float32) * k_unit
                tl.store(ring_k_out + k_ring + live * K + whole, unit.to(ring_k_out.dtype.element_ty))
