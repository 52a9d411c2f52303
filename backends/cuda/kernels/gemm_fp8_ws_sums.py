"""Sums of products of e4m3 codes by a warpgroup of Hopper, out of a ring of stages that another warp fills.

Tensor cores of sm_90 keep about 14 bits of a running sum, so the products of a stage, 128 of the inner dimension,
start from nothing and are then added to an f32 total, with scales of their own if there are any. Meanwhile the
tensor cores have the other warpgroup's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kiln.backends.cuda.kernels.gemm_hopper import _next

ROWS: gl.constexpr = gl.constexpr(64)
"""Rows of a warpgroup's tile."""
DEPTH: gl.constexpr = gl.constexpr(128)
"""Codes of the inner dimension in a stage, a row of 128 bytes; they share a block scale."""


@gluon.jit
def _here(value):
    """The value, computed before what follows: the compiler would put it behind the next products."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], value.dtype, is_pure=False, pack=1)


@gluon.jit
def _scaled(part, scale, column):
    """Products times the scales of their rows and their block of columns."""
    if scale is None:
        return part
    else:
        return part * (scale * column)[:, None]


@gluon.jit
def _loaded(pointers, live):
    """The scales of a step, if there is one."""
    return gl.load(pointers, mask=live, other=0.0)


@gluon.jit
def one_piece(a, b, full, empty, stage, phase, steps, scales, STAGES: gl.constexpr, AREG: gl.constexpr):
    """(total, stage, phase) of a tile of one piece of columns.

    scales: None, or pointers to those of the rows [64] and of the piece for the first step, and how far the next
    step's are from them.
    """
    W: gl.constexpr = b.shape[1]
    BLOCKS: gl.constexpr = scales is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total = nothing
    scale = None
    column = None
    if BLOCKS:
        rows, columns, _, rows_step, columns_step = scales
        scale, column = _loaded(rows, steps > 0), _loaded(columns, steps > 0)
        rows += rows_step
        columns += columns_step
        next_scale, next_column = _loaded(rows, steps > 1), _loaded(columns, steps > 1)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        left = a.index(stage)
        if AREG:
            left = left.load(gl.DotOperandLayout(0, layout, 4))
        part = warpgroup_mma(
            left, b.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        if BLOCKS:  # those of the step after the next: memory takes longer than one piece's products
            rows += rows_step
            columns += columns_step
            later, later_column = _loaded(rows, step + 2 < steps), _loaded(columns, step + 2 < steps)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        total += _scaled(part, scale, column)
        if BLOCKS:
            scale, column = next_scale, next_column
            next_scale, next_column = later, later_column
        stage, phase = _next(stage, phase, STAGES)
    return total, stage, phase


@gluon.jit
def two_pieces(a, b0, b1, full, empty, stage, phase, steps, scales, STAGES: gl.constexpr, AREG: gl.constexpr):
    """(left total, right total, stage, phase) of a tile of two pieces of the same width. The second piece's
    products lie in the registers of the first one's: both together do not fit beside totals and scales."""
    W: gl.constexpr = b0.shape[1]
    BLOCKS: gl.constexpr = scales is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total0 = nothing
    total1 = nothing
    scale = None
    column0 = None
    column1 = None
    if BLOCKS:
        rows, columns0, columns1, rows_step, columns_step = scales
        scale = _loaded(rows, steps > 0)
        column0, column1 = _loaded(columns0, steps > 0), _loaded(columns1, steps > 0)
        rows += rows_step
        columns0 += columns_step
        columns1 += columns_step
        next_scale = _loaded(rows, steps > 1)
        next0, next1 = _loaded(columns0, steps > 1), _loaded(columns1, steps > 1)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        left = a.index(stage)
        if AREG:
            left = left.load(gl.DotOperandLayout(0, layout, 4))
        part0 = warpgroup_mma(
            left, b0.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        if BLOCKS:  # those of the step after the next: memory takes longer than one piece's products
            rows += rows_step
            columns0 += columns_step
            columns1 += columns_step
            later = _loaded(rows, step + 2 < steps)
            later0, later1 = _loaded(columns0, step + 2 < steps), _loaded(columns1, step + 2 < steps)
        part0 = warpgroup_mma_wait(0, deps=[part0])
        total0 = _here(total0 + _scaled(part0, scale, column0))
        part1 = warpgroup_mma(
            left, b1.index(stage).permute([1, 0]), part0 if BLOCKS else nothing,
            use_acc=False, is_async=True,
        )  # fmt: skip
        part1 = warpgroup_mma_wait(0, deps=[part1])
        mbarrier.arrive(empty.index(stage))
        total1 += _scaled(part1, scale, column1)
        if BLOCKS:
            scale, column0, column1 = next_scale, next0, next1
            next_scale, next0, next1 = later, later0, later1
        stage, phase = _next(stage, phase, STAGES)
    return total0, total1, stage, phase
