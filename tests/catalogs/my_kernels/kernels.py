"""Triton kernels, as someone else would write them."""

import triton
import triton.language as tl


@triton.jit
def _leak(x, slope):
    return tl.where(x > 0.0, x, x * slope)


@triton.jit
def leaky_relu_kernel(x, out, stride_xm, stride_om, n_cols, slope, BLOCK: tl.constexpr):
    """x above 0, slope * x below: one program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < n_cols
    value = tl.load(x + row * stride_xm + cols, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * stride_om + cols, _leak(value, slope).to(out.dtype.element_ty), mask=live)


@triton.jit
def add_scaled_kernel(
    x,
    acc,
    HAS_BIAS: tl.constexpr,
    bias,
    acc_out,
    scale,
    x_stride,
    acc_stride,
    acc_out_stride,
    M,
    N,
    BLOCK: tl.constexpr = 128,
):
    """acc += scale * (x + bias), in place or not; the bias may be absent."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < N
    value = tl.load(x + row * x_stride + cols, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + cols, mask=live, other=0.0).to(tl.float32)
    total = tl.load(acc + row * acc_stride + cols, mask=live, other=0.0) + scale * value
    tl.store(acc_out + row * acc_out_stride + cols, total, mask=live)
