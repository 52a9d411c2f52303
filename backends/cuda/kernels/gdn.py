"""One decode step of the gated delta rule: a program has BLOCK_V values of one head of one row.

The tile [BLOCK_V, K] of the state is read once, kept in registers and written once; nothing crosses warps
but the two sums over K. The tile's load is issued before anything that only q, k and the gates need.
"""

import triton
import triton.language as tl


@triton.jit
def _unit(x, EPS: tl.constexpr):
    """x over the root of its sum of squares."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) + EPS))


@triton.jit
def packed_decode(
    mixed_qkv,
    a,
    b,
    a_log,
    dt_bias,
    state,
    state_indices,
    state_out,
    out,
    HV,
    HEADS,
    SLOTS,
    scale,
    qkv_stride,
    a_stride,
    b_stride,
    state_stride,
    out_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    L2NORM: tl.constexpr,
    CACHE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Program ids: (value block and value head, row)."""
    tiles: tl.constexpr = V // BLOCK_V
    hv, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    h = hv // (HV // HEADS)
    values = block * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, K)
    slot = tl.load(state_indices + row).to(tl.int64)
    where = out + row * out_stride + hv * V + values
    # A slot beyond the pool is treated as none: nothing outside it is read or written.
    if (slot <= 0) | (slot >= SLOTS):
        tl.store(where, tl.zeros((BLOCK_V,), out.dtype.element_ty))
        return
    tile = slot * state_stride + hv.to(tl.int64) * (V * K) + (values * K)[:, None] + keys[None, :]
    old = tl.load(state + tile, cache_modifier=CACHE, eviction_policy=EVICT).to(tl.float32)
    packed = mixed_qkv + row * qkv_stride
    q = tl.load(packed + h * K + keys).to(tl.float32)
    k = tl.load(packed + (HEADS + h) * K + keys).to(tl.float32)
    v = tl.load(packed + 2 * HEADS * K + hv * V + values).to(tl.float32)
    x = tl.load(a + row * a_stride + hv).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
    strength = tl.load(b + row * b_stride + hv)
    if L2NORM:
        q, k = _unit(q, 1e-6), _unit(k, 1e-6)
    q *= scale
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
    alpha = tl.exp(-tl.exp(tl.load(a_log + hv)) * softplus)
    sigmoid = 1.0 / (1.0 + tl.exp(-strength.to(tl.float32)))
    beta = sigmoid.to(strength.dtype).to(tl.float32)
    old = old * alpha
    d = beta * (v - tl.sum(old * k[None, :], axis=1))
    new = old + d[:, None] * k[None, :]
    tl.store(where, tl.sum(new * q[None, :], axis=1).to(out.dtype.element_ty))
    tl.store(state_out + tile, new.to(state_out.dtype.element_ty), eviction_policy=EVICT)
