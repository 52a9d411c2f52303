"""Causal convolutions over tokens, and the split of a projection into q, k, v and gates after them.

A program has a block of channels and, of a forward convolution, a piece of one sequence: its rows are read
once from memory and `WIDTH` times from the cache. Who has a sequence's first piece also writes its state:
nobody else reads it.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.sequences import piece_rows


@triton.jit
def _tap(weight, c, C, j, WIDTH: tl.constexpr):
    """Tap j of a block of channels."""
    return tl.load(weight + c * WIDTH + j, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _activate(x, SILU: tl.constexpr):
    if SILU:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def update(
    x, weight, bias, conv_state, state_indices, conv_state_out, out, C, SLOTS, x_stride, state_stride,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of channels, row)."""
    c, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    live = c < C
    slot = tl.load(state_indices + row).to(tl.int64)
    if (slot <= 0) | (slot >= SLOTS):
        tl.store(out + row * C + c, tl.zeros((BLOCK,), out.dtype.element_ty), mask=live)
        return
    fresh = tl.load(x + row * x_stride + c, mask=live, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        total = tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH - 1):
        held = tl.load(conv_state + slot * state_stride + j * C + c, mask=live, other=0.0)
        total += held.to(tl.float32) * _tap(weight, c, C, j, WIDTH)
        if j > 0:
            tl.store(conv_state_out + slot * state_stride + (j - 1) * C + c, held, mask=live)
    total += fresh.to(tl.float32) * _tap(weight, c, C, WIDTH - 1, WIDTH)
    tl.store(conv_state_out + slot * state_stride + (WIDTH - 2) * C + c, fresh, mask=live)
    tl.store(out + row * C + c, _activate(total, SILU).to(out.dtype.element_ty), mask=live)


@triton.jit
def forward(
    x, weight, bias, conv_state, cu_seqlens, state_indices, has_initial_state, conv_state_out, out, T,
    SEQS, C, SLOTS,
    x_stride, state_stride,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of channels, piece)."""
    n, begin, end, first, stop = piece_rows(cu_seqlens, tl.program_id(1), SEQS, T, PIECE, LANES)
    if n >= SEQS:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < C
    slot = tl.load(state_indices + n).to(tl.int64)
    rows = first.to(tl.int64) + tl.arange(0, PIECE)
    inside = (rows < stop)[:, None] & live[None, :]
    where = out + rows[:, None] * C + c[None, :]
    if (slot <= 0) | (slot >= SLOTS):
        tl.store(where, tl.zeros((PIECE, BLOCK), out.dtype.element_ty), mask=inside)
        return
    # The first row that inputs are known of: the state's, or the sequence's own.
    known = begin - tl.where(tl.load(has_initial_state + n) != 0, WIDTH - 1, 0)
    held = conv_state + slot * state_stride + c[None, :]
    total = tl.zeros((PIECE, BLOCK), tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        source = rows - (WIDTH - 1) + j
        z = tl.load(
            x + source[:, None] * x_stride + c[None, :], mask=inside & (source >= begin)[:, None], other=0.0
        )
        z = z.to(tl.float32)
        if j < WIDTH - 1:
            old = ((source < begin) & (source >= known))[:, None] & inside
            back = (source - begin + (WIDTH - 1))[:, None] * C
            z += tl.load(held + back, mask=old, other=0.0).to(tl.float32)
        total += z * _tap(weight, c, C, j, WIDTH)[None, :]
    tl.store(where, _activate(total, SILU).to(out.dtype.element_ty), mask=inside)
    if first == begin:
        _keep(x, conv_state, conv_state_out, begin, end, slot, known, c, C, x_stride, state_stride, WIDTH)


@triton.jit
def _keep(
    x, conv_state, conv_state_out, begin, end, slot, known, c, C, x_stride, state_stride, WIDTH: tl.constexpr
):
    """The state becomes the last inputs, old ones among them where the sequence is shorter."""
    # What other threads still read of the old state is read; below, rows only move down.
    tl.debug_barrier()
    for j in tl.static_range(WIDTH - 1):
        source = end.to(tl.int64) - (WIDTH - 1) + j + tl.zeros_like(c)
        fresh = tl.load(x + source * x_stride + c, mask=(c < C) & (source >= begin), other=0.0)
        back = conv_state + slot * state_stride + (source - begin + (WIDTH - 1)) * C + c
        kept = tl.load(back, mask=(c < C) & (source < begin) & (source >= known), other=0.0)
        tl.store(
            conv_state_out + slot * state_stride + j * C + c,
            tl.where(source >= begin, fresh, kept),
            mask=c < C,
        )


@triton.jit
def post_conv(
    mixed_qkv, a, b, a_log, dt_bias, q, k, v, g, beta, T, HV, HEADS, qkv_stride, a_stride, b_stride,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of rows, head): first the key heads, then the value heads."""
    rows, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    live = rows < T
    keys, values = tl.arange(0, K), tl.arange(0, V)
    packed = mixed_qkv + rows[:, None] * qkv_stride
    if head < HEADS:
        own = rows[:, None] * (HEADS * K) + (head * K + keys)[None, :]
        for part in tl.static_range(2):
            column = (part * HEADS + head) * K + keys
            z = tl.load(packed + column[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            z = z * (1.0 / tl.sqrt_rn(tl.sum(z * z, axis=1) + 1e-6))[:, None]
            to = q if part == 0 else k
            tl.store(to + own, z.to(q.dtype.element_ty), mask=live[:, None])
    else:
        hv = head - HEADS
        column = 2 * HEADS * K + hv * V + values
        bits = tl.load(packed + column[None, :], mask=live[:, None], other=0.0)
        tl.store(v + rows[:, None] * (HV * V) + (hv * V + values)[None, :], bits, mask=live[:, None])
        x = tl.load(a + rows * a_stride + hv, mask=live, other=0.0).to(tl.float32)
        x += tl.load(dt_bias + hv).to(tl.float32)
        soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        decay = -tl.exp(tl.load(a_log + hv)) * tl.where(x > 20.0, x, soft)
        tl.store(g + rows * HV + hv, decay, mask=live)
        strength = tl.load(b + rows * b_stride + hv, mask=live, other=0.0).to(tl.float32)
        tl.store(beta + rows * HV + hv, 1.0 / (1.0 + tl.exp(-strength)), mask=live)
