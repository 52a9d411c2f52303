"""Sums of products of e4m3 codes by a warpgroup of Hopper, out of a ring of stages that another warp fills.

Tensor cores of sm_90 keep about 14 bits of a running sum, so the products of a stage, 128 of the inner
dimension, start from nothing and are then added to an f32 total, with scales of their own if there are any.
Meanwhile the tensor cores have the other warpgroup's products.
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
def _scaled(part, scales):
    """Products times the scales of their rows and their block of columns."""
    return part * (scales[0] * scales[1])[:, None]


@gluon.jit
def _loaded(pointers):
    """The scales of a step."""
    return gl.load(pointers[0]), gl.load(pointers[1])


@gluon.jit
def _if(pointers, live):
    """The scales of a step, if there is one."""
    return gl.load(pointers, mask=live, other=0.0)


@gluon.jit
def _after(pointers, distances, more):
    """The next step's; past the last one, its own again."""
    return pointers[0] + gl.where(more, distances[0], 0), pointers[1] + gl.where(more, distances[1], 0)


@gluon.jit
def _four(at, distances, step, live):
    """The scales of four steps from `step` on, and where the next ones are."""
    s0 = _loaded(at)
    at = _after(at, distances, step + 1 < live)
    s1 = _loaded(at)
    at = _after(at, distances, step + 2 < live)
    s2 = _loaded(at)
    at = _after(at, distances, step + 3 < live)
    s3 = _loaded(at)
    return s0, s1, s2, s3, _after(at, distances, step + 4 < live)


@gluon.jit
def _products(a, b, stage, place):
    """The products of one stage, in the registers of `place`."""
    part = warpgroup_mma(a.index(stage), b.index(stage).permute([1, 0]), place, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def one_piece(a, b, full, empty, stage, phase, steps, scales, STAGES: gl.constexpr):
    """(total, stage, phase) of a tile of one piece of columns.

    scales: None, or pointers to those of the rows [64] and of the piece for the first step, how far the next
    step's are from them, and how many steps have some. Then steps are a multiple of 4, whose scales are
    loaded while those of the four before are in use: a load that is waited for one step later makes each
    step wait.
    """
    W: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total = nothing
    if scales is None:
        for _ in range(steps):
            mbarrier.wait(full.index(stage), phase)
            part = _products(a, b, stage, nothing)
            mbarrier.arrive(empty.index(stage))
            total += part
            stage, phase = _next(stage, phase, STAGES)
    else:
        at, distances, live = scales
        part = nothing
        s0, s1, s2, s3, at = _four(at, distances, 0, live)
        for step in range(0, steps, 4):
            n0, n1, n2, n3, at = _four(at, distances, step + 4, live)
            for i in gl.static_range(4):
                mbarrier.wait(full.index(stage), phase)
                part = _products(a, b, stage, part)
                mbarrier.arrive(empty.index(stage))
                stage, phase = _next(stage, phase, STAGES)
                if i == 0:
                    total = _here(total + _scaled(part, s0))
                if i == 1:
                    total = _here(total + _scaled(part, s1))
                if i == 2:
                    total = _here(total + _scaled(part, s2))
                if i == 3:
                    total = _here(total + _scaled(part, s3))
            s0, s1, s2, s3 = n0, n1, n2, n3
    return total, stage, phase


@gluon.jit
def two_pieces(a, b0, b1, full, empty, stage, phase, steps, scales, right, STAGES: gl.constexpr):
    """(left total, right total, stage, phase) of a tile of two pieces of the same width.

    Scales as for `one_piece`, `right` pointing to those of the right piece, for any number of steps: they are
    loaded two ahead. With them, the right piece's products lie in the registers of the left one's: there are
    no others beside totals and scales.
    """
    W: gl.constexpr = b0.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 32])
    nothing = gl.zeros([ROWS, W], gl.float32, layout)
    total0 = nothing
    total1 = nothing
    if scales is None:
        for _ in range(steps):
            mbarrier.wait(full.index(stage), phase)
            part0 = _products(a, b0, stage, nothing)
            total0 = _here(total0 + part0)
            part1 = _products(a, b1, stage, nothing)
            mbarrier.arrive(empty.index(stage))
            total1 += part1
            stage, phase = _next(stage, phase, STAGES)
    else:
        (rows, columns), (rows_step, columns_step), _ = scales
        scale = _if(rows, steps > 0)
        column0, column1 = _if(columns, steps > 0), _if(right, steps > 0)
        rows += rows_step
        columns += columns_step
        right += columns_step
        next_scale = _if(rows, steps > 1)
        next0, next1 = _if(columns, steps > 1), _if(right, steps > 1)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            part0 = warpgroup_mma(
                a.index(stage), b0.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
            )
            rows += rows_step
            columns += columns_step
            right += columns_step
            later = _if(rows, step + 2 < steps)
            later0, later1 = _if(columns, step + 2 < steps), _if(right, step + 2 < steps)
            part0 = warpgroup_mma_wait(0, deps=[part0])
            total0 = _here(total0 + _scaled(part0, (scale, column0)))
            part1 = _products(a, b1, stage, part0)
            mbarrier.arrive(empty.index(stage))
            total1 += _scaled(part1, (scale, column1))
            scale, column0, column1 = next_scale, next0, next1
            next_scale, next0, next1 = later, later0, later1
            stage, phase = _next(stage, phase, STAGES)
    return total0, total1, stage, phase
