"""Dense matrix product: out = x · weightᵀ with a row of weight for each output feature, or x · weight.

Rows beyond M, and rows of weight beyond N, are read from row 0 instead of under a mask, so that only the
inner dimension needs one; they are never stored. The inner loop is the same for every block of an output,
whatever its position: an element's bits do not depend on its neighbours.
"""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.gemm_finish import finish


@triton.jit
def _block(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The (row, column) block of a program: GROUP row blocks are walked column by column, so that weights
    stay in L2."""
    across = tl.cdiv(N, BLOCK_N)
    span = GROUP * across
    first = pid // span * GROUP
    size = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    return first + pid % span % size, pid % span // size


@triton.jit
def _product(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """One block of out; f32 accumulation over k in order of BLOCK_K. For `extra` and EPILOGUE see `finish`."""
    block_m, block_n = _block(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = x + tl.where(m < M, m, 0)[:, None] * x_stride + k[None, :]
    if BT:
        b = weight + tl.where(n < N, n, 0)[None, :] * weight_stride + k[:, None]
    else:
        b = weight + k.to(tl.int64)[:, None] * weight_stride + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        live = k < K - first
        left = tl.load(a, mask=live[None, :], other=0.0)
        if BT:
            right = tl.load(b, mask=live[:, None], other=0.0)
            b += BLOCK_K
        else:
            right = tl.load(b, mask=live[:, None] & (n < N)[None, :], other=0.0)
            b += BLOCK_K * weight_stride
        total = tl.dot(left, right, total, input_precision="ieee")
        a += BLOCK_K
    finish(total, m, n, M, N, out, out_stride, extra, EPILOGUE)


@triton.jit
def matmul(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """One program a block of the output. BT: weight is [N, K], else [K, N]."""
    _product(
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
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP,
        BT,
        EPILOGUE,
    )


@triton.jit
def matmul_batched(
    x,
    weight,
    out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    x_batch,
    weight_batch,
    out_batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a block of the output of one product, which the second axis counts; weights are [N, K]."""
    b = tl.program_id(1).to(tl.int64)
    _product(
        x + b * x_batch,
        weight + b * weight_batch,
        out + b * out_batch,
        M,
        N,
        K,
        x_stride,
        weight_stride,
        out_stride,
        None,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP,
        True,
        None,
    )
