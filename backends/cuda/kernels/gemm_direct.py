"""Skinny matrix products whose operands go from memory to the matrix units' registers, without shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _bases(ctas, axis, rank):
    """Each block of a cluster takes its own part of an axis."""
    return [[(1 << i) * (a == axis) for a in range(rank)] for i in range(ctas.bit_length() - 1)]


@gluon.jit
def direct(
    x,
    weight,
    out,
    x_scale,
    weight_scale,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SLICES: gl.constexpr,
    WIDTH: gl.constexpr,
    CTAS: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Each warp sums its own part of every step of BLOCK_K; the sums meet in shared memory at the end."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, 1], [1, 16, 8], _bases(CTAS, 0, 3))
    wl: gl.constexpr = gl.DotOperandLayout(0, mma, WIDTH)
    xl: gl.constexpr = gl.DotOperandLayout(1, mma, WIDTH)
    PARTS: gl.constexpr = SLICES * CTAS
    SLICE: gl.constexpr = BLOCK_K // PARTS
    n0 = gl.program_id(0).to(gl.int64) * BLOCK_N
    m0 = gl.program_id(1).to(gl.int64) * BLOCK_M

    ws = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, wl)))
    wn = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, wl)))
    wk = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, wl)))
    ws = gl.expand_dims(gl.expand_dims(ws, 1), 2) * SLICE
    wn = gl.expand_dims(gl.expand_dims(wn, 0), 2)
    wk = ws + gl.expand_dims(gl.expand_dims(wk, 0), 1)
    a = weight + gl.where(wn < N, wn, 0) * weight_stride + wk

    xs = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, xl)))
    xm = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, xl)))
    xk = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(2, xl)))
    xs = gl.expand_dims(gl.expand_dims(xs, 1), 2) * SLICE
    xm = gl.expand_dims(gl.expand_dims(xm, 0), 1)
    xk = xs + gl.expand_dims(gl.expand_dims(xk, 0), 2)
    b = x + gl.where(xm < M, xm, 0) * x_stride + xk

    sums = gl.zeros((PARTS, BLOCK_N, BLOCK_M), gl.float32, layout=mma)
    for first in range(0, K, BLOCK_K):
        if EVEN_K:
            left = gl.load(a, eviction_policy="evict_first")
            right = gl.load(b)
        else:
            left = gl.load(a, mask=wk < K - first, other=0.0, eviction_policy="evict_first")
            right = gl.load(b, mask=xk < K - first, other=0.0)
        sums = mma_v2(left, right, sums)
        a += BLOCK_K
        b += BLOCK_K
    gather: gl.constexpr = gl.BlockedLayout([PARTS, 1, 1], [1, 32, 1], [1, 1, SLICES], [0, 1, 2], _bases(CTAS, 1, 3))
    if CTAS > 1:
        sums = gl.convert_layout(sums, gather)
    total = gl.sum(sums, 0)
    fl: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, SLICES], [0, 1], _bases(CTAS, 0, 2))
    total = gl.convert_layout(total, fl)
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, fl))
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, fl))
    keep = gl.expand_dims(n < N, 1) & gl.expand_dims(m < M, 0)
    if weight_scale is not None:
        total = total * gl.expand_dims(gl.load(weight_scale + n, mask=n < N, other=0.0), 1)
        total = total * gl.expand_dims(gl.load(x_scale + m, mask=m < M, other=0.0), 0)
    where = out + gl.expand_dims(m, 0) * out_stride + gl.expand_dims(n, 1)
    gl.store(where, total.to(out.dtype.element_ty), mask=keep)
