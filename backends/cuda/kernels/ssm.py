"""Causal convolutions over tokens, and the split of a projection into q, k, v and gates after them.

A program has a block of channels and, of a forward convolution, a piece of one sequence, which it walks with
the last three rows in registers: every row is read once, STEP of them ahead. Who has a sequence's first piece
also writes its state: nobody else reads it. Products of bf16 are exact in f32, so that a fused multiply-add
rounds as a product and a sum do.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.sequences import piece_rows

HELD: tl.constexpr = tl.constexpr(3)
"""Rows of a state: one less than the taps."""


@triton.jit
def _taps(weight, c, C):
    """The four taps of a block of channels, f32, the newest last. One load of all: four of each channel's
    own lie 8 bytes apart and take as long as the rest of a step."""
    tile = tl.load(weight + c[:, None] * 4 + tl.arange(0, 4)[None, :], mask=(c < C)[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), (c.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _sum(z0, z1, z2, z3, taps, start):
    total = tl.fma(z1, taps[1], tl.fma(z0, taps[0], start))
    return tl.fma(z3, taps[3], tl.fma(z2, taps[2], total))


@triton.jit
def _start(bias, c, C):
    """What sums begin with."""
    start = tl.zeros_like(c).to(tl.float32)
    if bias is not None:
        start = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    return start


@triton.jit
def _activate(x, SILU: tl.constexpr):
    """exp2 and the square of rsqrt flush what is too small, exp and a division do not: 8 instructions less
    of 25 an element."""
    if SILU:
        r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
        x = x * (r * r)
    return x


@triton.jit
def update(
    x, weight, bias, conv_state, state_indices, conv_state_out, out, C, SLOTS, x_stride, state_stride,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of channels, row)."""
    c, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    live = c < C
    slot = tl.load(state_indices + row).to(tl.int64)
    fresh = tl.load(x + row * x_stride + c, mask=live, other=0.0)
    taps = _taps(weight, c, C)
    known = live & (slot > 0) & (slot < SLOTS)
    held = conv_state + slot * state_stride + c
    z0 = tl.load(held, mask=known, other=0.0)
    z1 = tl.load(held + C, mask=known, other=0.0)
    z2 = tl.load(held + 2 * C, mask=known, other=0.0)
    total = _sum(
        z0.to(tl.float32), z1.to(tl.float32), z2.to(tl.float32), fresh.to(tl.float32), taps,
        _start(bias, c, C),
    )  # fmt: skip
    kept = conv_state_out + slot * state_stride + c
    tl.store(kept, z1, mask=known)
    tl.store(kept + C, z2, mask=known)
    tl.store(kept + 2 * C, fresh, mask=known)
    made = tl.where(known, _activate(total, SILU), 0.0)
    tl.store(out + row * C + c, made.to(out.dtype.element_ty), mask=live)


@triton.jit
def _none():
    """A tuple of rows to begin with."""
    return ()


@triton.jit
def _row(x, held, row, begin, known, x_stride, C, c):
    """A row of a sequence, or one of up to three before it: of its state from `known` on, zeros before."""
    source = tl.where(row >= begin, x + row * x_stride, held + (row - begin + HELD) * C)
    return tl.load(source + c, mask=(c < C) & (row >= known), other=0.0)


@triton.jit
def forward(
    x, weight, bias, conv_state, cu_seqlens, state_indices, has_initial_state, conv_state_out, out, T,
    SEQS, C, SLOTS, x_stride, state_stride,
    SILU: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program ids: (block of channels, piece)."""
    n, begin, end, first, stop = piece_rows(cu_seqlens, tl.program_id(1), SEQS, T, PIECE, LANES)
    if n >= SEQS:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < C
    slot = tl.load(state_indices + n).to(tl.int64)
    at = first.to(tl.int64)
    to = out + at * C + c
    if (slot <= 0) | (slot >= SLOTS):
        for _ in range(first, stop):
            tl.store(to, tl.zeros((BLOCK,), out.dtype.element_ty), mask=live)
            to += C
        return
    # The first row that inputs are known of: the state's, or the sequence's own.
    known = begin - tl.where(tl.load(has_initial_state + n) != 0, HELD, 0)
    held = conv_state + slot * state_stride
    taps = _taps(weight, c, C)
    start = _start(bias, c, C)
    z0 = _row(x, held, at - 3, begin, known, x_stride, C, c).to(tl.float32)
    z1 = _row(x, held, at - 2, begin, known, x_stride, C, c).to(tl.float32)
    z2 = _row(x, held, at - 1, begin, known, x_stride, C, c).to(tl.float32)
    of = x + at * x_stride + c
    for row in range(first, stop, STEP):
        rows = _none()
        for i in tl.static_range(STEP):
            rows = rows + (tl.load(of + i * x_stride, mask=live & (row + i < stop), other=0.0),)  # noqa: RUF005
        for i in tl.static_range(STEP):
            z3 = rows[i].to(tl.float32)
            made = _activate(_sum(z0, z1, z2, z3, taps, start), SILU)
            tl.store(to + i * C, made.to(out.dtype.element_ty), mask=live & (row + i < stop))
            z0, z1, z2 = z1, z2, z3
        of += STEP * x_stride
        to += STEP * C
    if first == begin:
        _keep(x, held, conv_state_out + slot * state_stride, begin, end, known, x_stride, C, c)


@triton.jit
def _keep(x, held, kept, begin, end, known, x_stride, C, c):
    """The state becomes the last inputs, old ones among them where the sequence is shorter."""
    # What other threads still read of the old state is read; below, rows only move down.
    tl.debug_barrier()
    for j in tl.static_range(HELD):
        row = _row(x, held, end.to(tl.int64) - HELD + j, begin, known, x_stride, C, c)
        tl.store(kept + j * C + c, row, mask=c < C)


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
