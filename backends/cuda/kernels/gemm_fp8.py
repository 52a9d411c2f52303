"""Products of 8-bit codes with scales: out = x_scale * (weight_scale * (x · weightᵀ)) + bias, and with a scale
for every 128 of the inner dimension.

As in the dense product, rows beyond M and N are read from row 0 and never stored, and an element's bits do
not depend on its neighbours. Codes are e4m3 or i8, or, where tensor cores know no e4m3, bytes that are
decoded to f16: every e4m3 value is exact there.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.gemm import _block

SCALED: tl.constexpr = tl.constexpr(128)
"""Codes along the inner dimension, and rows of weight, that share a block scale."""


@triton.jit
def _decoded(codes):
    """f16 of e4m3 codes in bytes, divided by 256: sign and magnitude moved into place, so that no arithmetic
    touches subnormals. Codes of other types are returned as they are."""
    if codes.dtype == tl.uint8:
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return codes


@triton.jit
def _restored(total, codes):
    """The sum of products of what `_decoded` gave, in the codes' own units."""
    return total * 65536.0 if codes.dtype.element_ty == tl.uint8 else total


@triton.jit
def _store(total, m, n, bias, out, M, N, out_stride):
    """Add the bias, round once, store what lies inside."""
    if bias is not None:
        total += tl.load(bias + tl.where(n < N, n, 0)).to(tl.float32)[None, :]
    where = out + m[:, None] * out_stride + n[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def scaled_matmul_bt(
    x,
    weight,
    x_scale,
    weight_scale,
    azp,
    azp_adj,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    x_scale_step,
    weight_scale_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """One program a block of the output, summed over k in order of BLOCK_K.

    x_scale is absent, or indexed by rows times x_scale_step (0: one for all); weight_scale likewise by
    columns. azp and azp_adj are those of i8 codes, or absent. IMPRECISE is Triton's max_num_imprecise_acc.
    """
    block_m, block_n = _block(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, col = tl.where(m < M, m, 0), tl.where(n < N, n, 0)
    k = tl.arange(0, BLOCK_K)
    a = x + row[:, None] * x_stride + k[None, :]
    b = weight + col[None, :] * weight_stride + k[:, None]
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), kind)
    for first in range(0, K, BLOCK_K):
        live = k < K - first
        left = _decoded(tl.load(a, mask=live[None, :], other=0.0))
        right = _decoded(tl.load(b, mask=live[:, None], other=0.0))
        total = tl.dot(left, right, total, max_num_imprecise_acc=IMPRECISE, out_dtype=kind)
        a += BLOCK_K
        b += BLOCK_K
    if azp is not None:
        total -= tl.load(azp + row * x_scale_step)[:, None] * tl.load(azp_adj + col)[None, :]
    total = tl.load(weight_scale + col * weight_scale_step)[None, :] * _restored(total.to(tl.float32), x)
    if x_scale is not None:
        total = tl.load(x_scale + row * x_scale_step)[:, None] * total
    _store(total, m, n, bias, out, M, N, out_stride)


@triton.jit
def scaled_matmul_bt_block(
    x,
    weight,
    x_scale,
    weight_scale,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    x_scale_stride,
    x_scale_colstride,
    weight_scale_stride,
    weight_scale_colstride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a block of the output: a product over each 128 of k is scaled and added to an f32 total."""
    block_m, block_n = _block(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, col = tl.where(m < M, m, 0), tl.where(n < N, n, 0)
    k = tl.arange(0, SCALED)
    a = x + row[:, None] * x_stride + k[None, :]
    b = weight + col[None, :] * weight_stride + k[:, None]
    row_scale = x_scale + row * x_scale_stride
    col_scale = weight_scale + block_n.to(tl.int64) * BLOCK_N // SCALED * weight_scale_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, SCALED):
        live = k < K - first
        left = _decoded(tl.load(a, mask=live[None, :], other=0.0))
        right = _decoded(tl.load(b, mask=live[:, None], other=0.0))
        scale = tl.load(row_scale) * tl.load(col_scale)
        total += _restored(tl.dot(left, right), x) * scale[:, None]
        a += SCALED
        b += SCALED
        row_scale += x_scale_colstride
        col_scale += weight_scale_colstride
    _store(total, m, n, bias, out, M, N, out_stride)


@triton.jit
def scaled_matmul_bt_block_split(
    x,
    weight,
    x_scale,
    weight_scale,
    bias,
    out,
    partials,
    arrivals,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    x_scale_stride,
    x_scale_colstride,
    weight_scale_stride,
    weight_scale_colstride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Few rows: the inner dimension is split over SPLITS programs, whose f32 totals the last to arrive adds in
    order. Rows of weight are the long side of the product, [BLOCK_N, 128] · [128, BLOCK_M].

    arrivals holds one i32 a block of the output; they are 0 before and after.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    across = tl.cdiv(N, BLOCK_N)
    block_n = tile % across
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, col = tl.where(m < M, m, 0), tl.where(n < N, n, 0)
    groups = tl.cdiv(K, SCALED)
    begin = groups * split // SPLITS
    end = groups * (split + 1) // SPLITS
    k = begin * SCALED + tl.arange(0, SCALED)
    a = weight + col[:, None] * weight_stride + k[None, :]
    b = x + row[None, :] * x_stride + k[:, None]
    row_scale = x_scale + row * x_scale_stride + begin * x_scale_colstride
    col_scale = weight_scale + block_n.to(tl.int64) * BLOCK_N // SCALED * weight_scale_stride
    col_scale += begin * weight_scale_colstride
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(begin, end):
        live = tl.arange(0, SCALED) < K - group * SCALED
        left = _decoded(tl.load(a, mask=live[None, :], other=0.0))
        right = _decoded(tl.load(b, mask=live[:, None], other=0.0))
        scale = tl.load(row_scale) * tl.load(col_scale)
        total += _restored(tl.dot(left, right), x) * scale[None, :]
        a += SCALED
        b += SCALED
        row_scale += x_scale_colstride
        col_scale += weight_scale_colstride
    if SPLITS == 1:
        _store(tl.trans(total), m, n, bias, out, M, N, out_stride)
    else:
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partials + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + inside
        tl.store(mine + split * (BLOCK_N * BLOCK_M), total)
        # Every thread has written before one says so; acquire and release order that for the other programs.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            total = tl.load(mine, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(mine + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            _store(tl.trans(total), m, n, bias, out, M, N, out_stride)
