"""Matrix products with few rows of x, out = x · weightᵀ, at the speed at which memory gives the weight.

The weight takes the side of the matrix instruction that has 64 rows (or 16), so that 8 rows of x waste
nothing. Rows of x beyond M are zeros in shared memory and cost no load; rows of weight beyond N are read as
row 0. Neither is stored. An element's bits depend on its own operands and on the kernel's constants alone:
not on M, not on other rows, not on which program of a tile comes last.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.gemm_finish import finish


@triton.jit
def _slice_sum(
    x,
    weight,
    m,
    n,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """The f32 sums [BLOCK_N, BLOCK_M] over slice `split` of SPLIT of the steps of BLOCK_K, in order of k."""
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(K, BLOCK_K)
    first = split * steps // SPLIT
    last = (split + 1) * steps // SPLIT
    a = weight + tl.where(n < N, n, 0)[:, None] * weight_stride + (k + first * BLOCK_K)[None, :]
    b = x + tl.where(m < M, m, 0)[None, :] * x_stride + (k + first * BLOCK_K)[:, None]
    live = (m < M)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        if EVEN_K:
            left = tl.load(a)
            right = tl.load(b, mask=live, other=0.0)
        else:
            here = k < K - step * BLOCK_K
            left = tl.load(a, mask=here[None, :], other=0.0)
            right = tl.load(b, mask=here[:, None] & live, other=0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=IMPRECISE)
        a += BLOCK_K
        b += BLOCK_K
    return total


@triton.jit
def _last_to_arrive(arrivals, tile, SPLIT: tl.constexpr):
    """Whether all other programs of the tile have left their sums, which this one then sees.

    The barrier puts every thread's stores before the one thread's release, its acquire the loads after it.
    """
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


@triton.jit
def _finish(
    total,
    m,
    n,
    M,
    N,
    out,
    out_stride,
    x_scale,
    weight_scale,
    bias,
    x_scale_step,
    weight_scale_step,
    extra,
    EPILOGUE: tl.constexpr,
):
    """Scale the sums of 8-bit codes, add the bias unless it is null; then as every matrix product ends."""
    total = tl.trans(total)
    if weight_scale is not None:
        row, col = tl.where(m < M, m, 0), tl.where(n < N, n, 0)
        total = tl.load(weight_scale + col * weight_scale_step)[None, :] * total
        total = tl.load(x_scale + row * x_scale_step)[:, None] * total
        given = (n < N) & (bias.to(tl.int64) + n * 0 != 0)
        total += tl.load(bias + n, mask=given, other=-0.0).to(tl.float32)[None, :]
    finish(total, m, n, M, N, out, out_stride, extra, EPILOGUE)


@triton.jit
def split_k(
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
    x_scale_step,
    weight_scale_step,
    extra,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """SPLIT programs a tile of the output, each a slice of k. The last to arrive adds the slices in their
    order, its own too: the bits do not depend on who it is.

    `partials` holds SPLIT tiles of f32 for each tile of the output; `arrivals` one i32 for each, zero before
    and after. EVEN_K promises that BLOCK_K divides K. x_scale, weight_scale and bias belong to 8-bit codes,
    IMPRECISE is their max_num_imprecise_acc. For `extra` and EPILOGUE see `gemm_finish`.
    """
    pid = tl.program_id(0)
    split = pid % SPLIT
    tile = pid // SPLIT
    across = tl.cdiv(M, BLOCK_M)
    m = (tile % across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile // across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _slice_sum(
        x, weight, m, n, M, N, K, x_stride, weight_stride, split,
        BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, EVEN_K, IMPRECISE,
    )  # fmt: skip
    if SPLIT == 1:
        _finish(
            total, m, n, M, N, out, out_stride,
            x_scale, weight_scale, bias, x_scale_step, weight_scale_step, extra, EPILOGUE,
        )  # fmt: skip
    else:
        AREA: tl.constexpr = BLOCK_N * BLOCK_M
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partials + pid.to(tl.int64) * AREA + within, total)
        if _last_to_arrive(arrivals, tile, SPLIT):
            slices = partials + tile.to(tl.int64) * (SPLIT * AREA) + within
            total = tl.load(slices, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                total += tl.load(slices + other * AREA, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _finish(
                total, m, n, M, N, out, out_stride,
                x_scale, weight_scale, bias, x_scale_step, weight_scale_step, extra, EPILOGUE,
            )  # fmt: skip


@triton.jit
def one_row(
    x,
    weight,
    out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    extra,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """A program a row of x and BLOCK_N output features, without matrix units: threads multiply and add what
    they load themselves, and the threads of a feature add up at the end."""
    m = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = weight + tl.where(n < N, n, 0)[:, None] * weight_stride + k[None, :]
    b = x + tl.program_id(1).to(tl.int64) * x_stride + k
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = k < K - first
        left = tl.load(a, mask=here[None, :], other=0.0).to(tl.float32)
        right = tl.load(b, mask=here, other=0.0).to(tl.float32)
        sums = tl.fma(left, tl.broadcast_to(right[None, :], (BLOCK_N, BLOCK_K)), sums)
        a += BLOCK_K
        b += BLOCK_K
    finish(tl.sum(sums, 1)[None, :], m, n, M, N, out, out_stride, extra, EPILOGUE)
