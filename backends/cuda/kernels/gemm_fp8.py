"""Products of 8-bit codes with scales: out = x_scale * (weight_scale * (x · weightᵀ)) + bias, and with a
scale for every 128 of the inner dimension.

As in the dense product, rows beyond M and N are read from row 0 and never stored, and an element's bits do
not depend on its neighbours. Codes are e4m3 or i8, or, where tensor cores know no e4m3, bytes that are
decoded to f16: every e4m3 value is exact there.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.gemm import _block


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
    """Add the bias, round once, store what lies inside. An absent bias is a null pointer; adding -0 instead
    changes no bit."""
    given = (bias.to(tl.int64) != 0) & (n < N)
    total += tl.load(bias + n, mask=given, other=-0.0).to(tl.float32)[None, :]
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

    x_scale is None, or indexed by rows times x_scale_step (0: one for all); weight_scale likewise by columns.
    azp and azp_adj are those of i8 codes, null where absent. IMPRECISE is Triton's max_num_imprecise_acc.
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
    if kind == tl.int32:
        shift = tl.load(azp + row * x_scale_step, mask=(m < M) & (azp.to(tl.int64) != 0), other=0)
        sums = tl.load(azp_adj + col, mask=(n < N) & (azp_adj.to(tl.int64) != 0), other=0)
        total -= shift[:, None] * sums[None, :]
    total = tl.load(weight_scale + col * weight_scale_step)[None, :] * _restored(total.to(tl.float32), x)
    if x_scale is not None:
        total = tl.load(x_scale + row * x_scale_step)[:, None] * total
    _store(total, m, n, bias, out, M, N, out_stride)


@triton.jit
def _scales(row_scale, col_scale, row, more):
    """The scales of one block along k, if there is one more. They are loaded a block ahead and multiplied
    when they are needed. (Two ahead, Triton 3.9 does not overlap copies and products any more.)"""
    return tl.load(row_scale, mask=(row >= 0) & more, other=0.0), tl.load(col_scale, mask=more, other=0.0)


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
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a block of the output: a product over each BLOCK_K of k (128: a scale's) is scaled and
    added to an f32 total."""
    block_m, block_n = _block(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, col = tl.where(m < M, m, 0), tl.where(n < N, n, 0)
    k = tl.arange(0, BLOCK_K)
    a = x + row[:, None] * x_stride + k[None, :]
    b = weight + col[None, :] * weight_stride + k[:, None]
    row_scale = x_scale + row * x_scale_stride
    col_scale = weight_scale + block_n.to(tl.int64) * BLOCK_N // BLOCK_K * weight_scale_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_now, col_now = _scales(row_scale, col_scale, row, K > 0)
    for first in range(0, K, BLOCK_K):
        live = k < K - first
        left = _decoded(tl.load(a, mask=live[None, :], other=0.0))
        right = _decoded(tl.load(b, mask=live[:, None], other=0.0))
        a += BLOCK_K
        b += BLOCK_K
        row_scale += x_scale_colstride
        col_scale += weight_scale_colstride
        row_later, col_later = _scales(row_scale, col_scale, row, first + BLOCK_K < K)
        total += _restored(tl.dot(left, right), x) * (row_now * col_now)[:, None]
        row_now, col_now = row_later, col_later
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
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Few rows: the inner dimension is split over SPLIT programs, whose f32 totals the last to arrive adds in
    order. Blocks of fewer than 64 rows are multiplied transposed, rows of weight being the long side.

    arrivals holds one i32 a block of the output; they are 0 before and after.
    """
    SWAP: tl.constexpr = BLOCK_M < 64
    tile = tl.program_id(0)
    split = tl.program_id(1)
    across = tl.cdiv(N, BLOCK_N)
    block_n = tile % across
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, col = tl.where(m < M, m, 0), tl.where(n < N, n, 0)
    groups = tl.cdiv(K, BLOCK_K)
    begin = groups * split // SPLIT
    end = groups * (split + 1) // SPLIT
    k = begin * BLOCK_K + tl.arange(0, BLOCK_K)
    a = x + row[:, None] * x_stride + k[None, :]
    b = weight + col[:, None] * weight_stride + k[None, :]
    row_scale = x_scale + row * x_scale_stride + begin * x_scale_colstride
    col_scale = weight_scale + block_n.to(tl.int64) * BLOCK_N // BLOCK_K * weight_scale_stride
    col_scale += begin * weight_scale_colstride
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    row_now, col_now = _scales(row_scale, col_scale, row, begin < end)
    for group in range(begin, end):
        live = tl.arange(0, BLOCK_K) < K - group * BLOCK_K
        left = _decoded(tl.load(a, mask=live[None, :], other=0.0))
        right = _decoded(tl.load(b, mask=live[None, :], other=0.0))
        a += BLOCK_K
        b += BLOCK_K
        row_scale += x_scale_colstride
        col_scale += weight_scale_colstride
        row_later, col_later = _scales(row_scale, col_scale, row, group + 1 < end)
        if SWAP:
            total += _restored(tl.dot(right, tl.trans(left)), x) * (row_now * col_now)[None, :]
        else:
            total += _restored(tl.dot(left, tl.trans(right)), x) * (row_now * col_now)[:, None]
        row_now, col_now = row_later, col_later
    if SPLIT == 1:
        _store(tl.trans(total) if SWAP else total, m, n, bias, out, M, N, out_stride)
    else:
        size: tl.constexpr = BLOCK_M * BLOCK_N
        wide: tl.constexpr = total.shape[1]
        inside = tl.arange(0, total.shape[0])[:, None] * wide + tl.arange(0, wide)[None, :]
        first = partials + tile.to(tl.int64) * (SPLIT * size) + inside
        tl.store(first + split * size, total)
        # Every thread has written before one says so; acquire and release order that for the other programs.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals + tile, 0)
            total = tl.load(first, cache_modifier=".cg")
            for other in range(1, SPLIT):
                total += tl.load(first + other * size, cache_modifier=".cg")
            _store(tl.trans(total) if SWAP else total, m, n, bias, out, M, N, out_stride)
