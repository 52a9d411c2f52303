"""How a product on Hopper ends: parts of shared blocks are added, scales and what else follows applied,
and the values rounded and stored by TMA, a chunk of 128 bytes of every row at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def scales_of(scales, index, size, step):
    """One scale for each index, or (step 0) the same for all; no address depends on the step, so that
    loads are of whole vectors."""
    return gl.load(scales + index, mask=(index < size) & (step != 0), other=gl.load(scales))


@gluon.jit
def bias_of(bias, index, size):
    """Entries of a bias, -0 of one that is null: adding it changes no bit."""
    return gl.load(bias + index, mask=(bias.to(gl.int64) != 0) & (index < size), other=-0.0)


@gluon.jit
def slot_of(program, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where a program's part of a block lies. It has one for a block that it starts with, and one for a block
    that it ends with, which is a block that it begins; each holds both warpgroups' halves."""
    return (2 * program + (program == first).to(gl.int32)) * (2 * ROWS * COLUMNS)


@gluon.jit
def last(total, parts, counter, p0, p1):
    """Lays `total` down as this program's part of a block; whether all other parts lie there already."""
    layout: gl.constexpr = total.type.layout
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    slot = parts + slot_of(gl.program_id(0), p0, ROWS, COLUMNS)
    gl.store(slot + row[:, None] * COLUMNS + column[None, :], total)
    gl.barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == p1 - p0
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _summed(
    total, parts, p0, p1, ROWS: gl.constexpr, SHIFT: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """A chunk of columns of a block that programs p0 to p1 share: two parts are added as they are, more in
    the order of K."""
    layout: gl.constexpr = total.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, total.shape[1], gl.SliceLayout(0, layout)) + SHIFT
    lane = row[:, None] * WIDTH + column[None, :]
    if p1 == p0 + 1:
        total += gl.load(parts + slot_of(p0 + p1 - gl.program_id(0), p0, ROWS, WIDTH) + lane)
    elif p1 > p0:
        total = gl.load(parts + slot_of(p0, p0, ROWS, WIDTH) + lane)
        for p in range(p0 + 1, p1 + 1):
            total += gl.load(parts + slot_of(p, p0, ROWS, WIDTH) + lane)
    return total


@gluon.jit
def _after(
    total, x_scale, weight_scale, bias, m, n, M, N, ROWS: gl.constexpr, extra, EPILOGUE: gl.constexpr
):  # fmt: skip
    """What follows the sums of a chunk at (m, n). EPILOGUE is a function of them, of the numbers (i64) of
    rows [.., 1] and columns [1, ..], M, N and the values of `extra`."""
    layout: gl.constexpr = total.type.layout
    if weight_scale is not None:
        total = gl.convert_layout(weight_scale, gl.SliceLayout(0, layout))[None, :] * total
    if x_scale is not None:
        total = gl.convert_layout(x_scale, gl.SliceLayout(1, layout))[:, None] * total
    if bias is not None:
        total += gl.convert_layout(bias.to(gl.float32), gl.SliceLayout(0, layout))[None, :]
    if EPILOGUE is not None:
        row = m.to(gl.int64) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = n.to(gl.int64) + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
        total = EPILOGUE(total, row[:, None], column[None, :], M, N, *extra)
    return total


@gluon.jit
def store(
    out, c, total, x_scale, weight_scale, bias, m, n, M, N, parts, p0, p1, extra,
    SHIFT: gl.constexpr, WIDTH: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Rounds and stores columns from SHIFT on of WIDTH at (m, n), through as many buffers as there are:
    one for each chunk, or some in turn. x_scale is of the rows, weight_scale and bias of the columns of
    `total`, or None."""
    CHUNK: gl.constexpr = c.shape[2]
    BUFFERS: gl.constexpr = c.shape[0]
    ROWS: gl.constexpr = c.shape[1]
    if total.shape[1] > CHUNK:
        HALF: gl.constexpr = total.shape[1] // 2
        left, right = total.reshape([total.shape[0], 2, HALF]).permute([0, 2, 1]).split()
        scale0 = None
        scale1 = None
        bias0 = None
        bias1 = None
        if weight_scale is not None:
            scale0, scale1 = weight_scale.reshape([2, HALF]).permute([1, 0]).split()
        if bias is not None:
            bias0, bias1 = bias.reshape([2, HALF]).permute([1, 0]).split()
        store(out, c, left, x_scale, scale0, bias0, m, n, M, N, parts, p0, p1, extra,
              SHIFT, WIDTH, EPILOGUE)  # fmt: skip
        store(out, c, right, x_scale, scale1, bias1, m, n, M, N, parts, p0, p1, extra,
              SHIFT + HALF, WIDTH, EPILOGUE)  # fmt: skip
    else:
        AT: gl.constexpr = SHIFT // CHUNK
        ENOUGH: gl.constexpr = BUFFERS * CHUNK >= WIDTH
        if parts is not None:
            total = _summed(total, parts, p0, p1, ROWS, SHIFT, WIDTH)
        total = _after(total, x_scale, weight_scale, bias, m, n + SHIFT, M, N, ROWS, extra, EPILOGUE)
        if not ENOUGH:
            tma.store_wait(BUFFERS - 1)
        elif AT == 0:
            tma.store_wait(0)
        c.index(AT % BUFFERS).store(total.to(c.dtype))
        if not ENOUGH:
            fence_async_shared()
            tma.async_store(out, [m, n + SHIFT], c.index(AT % BUFFERS))
        elif SHIFT + CHUNK >= WIDTH:
            fence_async_shared()
            for i in gl.static_range(WIDTH // CHUNK):
                tma.async_store(out, [m, n + i * CHUNK], c.index(i))
