"""How every matrix product ends: the f32 sums of a tile, through an epilogue if there is one, rounded once
and stored."""

import triton
import triton.language as tl


@triton.jit
def finish(total, m, n, M, N, out, out_stride, extra, EPILOGUE: tl.constexpr):
    """Store the part of a tile that lies inside out [M, N].

    `m` and `n` are the numbers (i64) of the tile's rows and columns. EPILOGUE is a function of the sums, rows
    [.., 1], columns [1, ..], M, N and the values of `extra`, which gives what is rounded; None for the sums.
    """
    rows = m[:, None]
    cols = n[None, :]
    if EPILOGUE is not None:
        total = EPILOGUE(total, rows, cols, M, N, *extra)
    tl.store(out + rows * out_stride + cols, total.to(out.dtype.element_ty), mask=(rows < M) & (cols < N))
