"""The gated delta rule along the chunks of a sequence, for Hopper (sm_90a), in Gluon.

The formulas are in `kiln.recipes.gdn_chunk_walk`. A program has a sequence, a value head and a block of its
values. Everything is transposed, values along the rows: then the state and what comes out of one product are
left operands of the next from the registers they lie in (wgmma), and a chunk is three products one after
another, all 128 wide: the state with keys and queries, what keys do not recall with both of the chunk's
matrices, and the state's update.

The next chunk is copied meanwhile, into the other of two stages, by cp.async: it leaves rows of other
sequences out, as TMA could not. bf16 outputs go to memory by way of the place of their values, so that rows
are written whole.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from kiln.backends.cuda.kernels.sequences_gluon import sequence_rows

CHUNK: gl.constexpr = gl.constexpr(64)
KEYS: gl.constexpr = gl.constexpr(128)
SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def _accumulator(block, columns):
    """Of a product: every warp has 16 values."""
    return gl.NVMMADistributedLayout([3, 0], [block // 16, 1], [16, columns, 16])


@gluon.constexpr_function
def _copied(block, columns):
    """16 bytes a thread, along rows."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [block // 16, 1], [1, 0])


@gluon.constexpr_function
def _rows_at_once(block, columns):
    """Rows that all threads together copy."""
    return 256 // columns * (block // 16)


@gluon.jit
def _lanes(stride, BLOCK_V: gl.constexpr, COLUMNS: gl.constexpr):
    """Where the elements lie that a thread has of the rows that are copied at once."""
    layout: gl.constexpr = _copied(BLOCK_V, COLUMNS)
    row = gl.arange(0, _rows_at_once(BLOCK_V, COLUMNS), layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return row[:, None] * stride + column[None, :]


@gluon.jit
def _copy(tile, first, lanes, stride, left, BLOCK_V: gl.constexpr):
    """Begins to copy the rows of a tile; `left` of them there are, zeros follow."""
    layout: gl.constexpr = _copied(BLOCK_V, tile.shape[1])
    ROWS: gl.constexpr = _rows_at_once(BLOCK_V, tile.shape[1])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(tile.shape[0] // ROWS):
        of = first + i * (ROWS * stride) + lanes
        async_copy.async_load(tile.slice(i * ROWS, ROWS, 0), of, mask=(row < left - i * ROWS)[:, None])


@gluon.jit
def _one(stages, stage):
    """The places of a stage."""
    kq, v, b, f = stages
    return kq.index(stage), v.index(stage), b.index(stage), f.index(stage)


@gluon.jit
def _fetch(stages, stage, source, lanes, strides, left, HV, BLOCK_V: gl.constexpr):
    """Begins to copy a chunk into a stage; returns where the next chunk is."""
    k, q, v, blocks, factors = source
    kq_tile, v_tile, b_tile, f_tile = _one(stages, stage)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [BLOCK_V // 16], [0])
    both = gl.arange(0, 2 * CHUNK, layout=layout)
    whole = gl.where(left > 0, 2 * CHUNK, 0)
    _copy(kq_tile.slice(0, CHUNK, 0), k, lanes[0], strides[0], left, BLOCK_V)
    _copy(v_tile, v, lanes[2], strides[2], left, BLOCK_V)
    async_copy.async_load(f_tile, factors + both, mask=gl.zeros_like(both) < left)
    _copy(kq_tile.slice(CHUNK, CHUNK, 0), q, lanes[1], strides[1], left, BLOCK_V)
    _copy(b_tile, blocks, _lanes(CHUNK, BLOCK_V, CHUNK), CHUNK, whole, BLOCK_V)
    async_copy.commit_group()
    return (
        k + CHUNK * strides[0], q + CHUNK * strides[1], v + CHUNK * strides[2],
        blocks + HV * (2 * CHUNK * CHUNK), factors + HV * (2 * CHUNK),
    )  # fmt: skip


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """The left and right halves of an accumulator: other names for its registers."""
    left, right = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, CHUNK)), (0, 2, 1)))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _store_f32(o, whole, out_stride, left, BLOCK_V: gl.constexpr):
    """Outputs of a chunk from registers, [values, tokens]."""
    out, column0, end = whole
    # Hidden from the compiler, which would keep where all 16 tokens of a thread lie in registers.
    token = end - left + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, o.type.layout))
    token = gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )
    column = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, o.type.layout))
    of = (out + token.to(gl.int64) * out_stride + column0)[None, :] + column[:, None]
    gl.store(of, o, mask=(token < end)[None, :])


@gluon.jit
def _store(o, place, to, lanes, out_stride, rows, BLOCK_V: gl.constexpr):
    """Outputs of a chunk, `rows` of them, [values, tokens], by way of a place in shared memory."""
    layout: gl.constexpr = _copied(BLOCK_V, BLOCK_V)
    ROWS: gl.constexpr = _rows_at_once(BLOCK_V, BLOCK_V)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    place.permute((1, 0)).store(o.to(place.dtype))
    for i in gl.static_range(CHUNK // ROWS):
        some = place.slice(i * ROWS, ROWS, 0).load(layout)
        gl.store(to + i * (ROWS * out_stride) + lanes, some, mask=(row < rows - i * ROWS)[:, None])


@gluon.jit
def walk(
    q, k, v, blocks, factors, initial_state, cu_seqlens, out, final_state, T, SEQS, HV, HEADS, scale,
    q_stride, k_stride, v_stride, out_stride,
    BLOCK_V: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Program ids: (block of values, sequence and value head). The state is held as [BLOCK_V, KEYS]."""
    wide: gl.constexpr = _accumulator(BLOCK_V, KEYS)
    half: gl.constexpr = _accumulator(BLOCK_V, CHUNK)
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    by_token: gl.constexpr = gl.SliceLayout(0, half)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [BLOCK_V // 16], [0])
    kind: gl.constexpr = k.dtype.element_ty
    n, hv, value = gl.program_id(1) // HV, gl.program_id(1) % HV, gl.program_id(0) * BLOCK_V
    h = hv // (HV // HEADS)
    first, end, before = sequence_rows(cu_seqlens, n, SEQS, T, CHUNK, LANES)
    row = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, wide))[:, None] * KEYS
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, wide))[None, :]
    at = (n.to(gl.int64) * HV + hv) * (KEYS * KEYS) + value * KEYS
    s = gl.load(initial_state + at + row + key)
    stages = (
        gl.allocate_shared_memory(kind, [2, 2 * CHUNK, KEYS], SHARED),
        gl.allocate_shared_memory(kind, [2, CHUNK, BLOCK_V], SHARED),
        gl.allocate_shared_memory(kind, [2, 2 * CHUNK, CHUNK], SHARED),
        gl.allocate_shared_memory(gl.float32, [2, 2 * CHUNK], PLAIN),
    )
    strides = (k_stride, q_stride, v_stride, out_stride)
    # 32 bits: what is kept of a stride in every thread is for the rows of one copy.
    lanes = (
        _lanes(k_stride.to(gl.int32), BLOCK_V, KEYS), _lanes(q_stride.to(gl.int32), BLOCK_V, KEYS),
        _lanes(v_stride.to(gl.int32), BLOCK_V, BLOCK_V), _lanes(out_stride.to(gl.int32), BLOCK_V, BLOCK_V),
    )  # fmt: skip
    row0, chunk = first.to(gl.int64), before.to(gl.int64) * HV + hv
    source = (
        k + row0 * k_stride + h * KEYS, q + row0 * q_stride + h * KEYS,
        v + row0 * v_stride + (hv * KEYS + value), blocks + chunk * (2 * CHUNK * CHUNK),
        factors + chunk * (2 * CHUNK),
    )  # fmt: skip
    to = out + row0 * out_stride + (hv * KEYS + value)
    left, stage = end - first, 0
    source = _fetch(stages, 0, source, lanes, strides, left, HV, BLOCK_V)
    zero = gl.zeros([BLOCK_V, 2 * CHUNK], gl.float32, layout=wide)
    while left > 0:
        kq_tile, v_tile, b_tile, f_tile = _one(stages, stage)
        async_copy.wait_group(0)
        source = _fetch(stages, 1 - stage, source, lanes, strides, left - CHUNK, HV, BLOCK_V)
        state = gl.convert_layout(s.to(kind), operand)
        both = warpgroup_mma(state, kq_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        given = v_tile.permute((1, 0)).load(half)
        rise = f_tile.slice(0, CHUNK, 0).load(by_token)
        recalled, asked = _halves(warpgroup_mma_wait(0, [both]), half)
        fresh = gl.convert_layout((given.to(gl.float32) - recalled * rise[None, :]).to(kind), operand)
        both = warpgroup_mma(fresh, b_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        # Beyond a short chunk the sum of decays stays what it is: the last factor is the whole chunk's.
        s = s * gl.sum(f_tile.slice(CHUNK - 1, 1, 0).load(one), 0)
        o = asked * (rise * scale)[None, :]
        fall = f_tile.slice(CHUNK, CHUNK, 0).load(by_token)
        new, own = _halves(warpgroup_mma_wait(0, [both]), half)
        kept = gl.convert_layout((new * fall[None, :]).to(kind), operand)
        s = warpgroup_mma(kept, kq_tile.slice(0, CHUNK, 0), s, is_async=True)
        if out.dtype.element_ty == gl.float32:
            _store_f32(o + own, (out, hv * KEYS + value, end), out_stride, left, BLOCK_V)
        else:
            _store(o + own, v_tile, to, lanes[3], out_stride, left, BLOCK_V)
            to += CHUNK * out_stride
        s = warpgroup_mma_wait(0, [s])
        left -= CHUNK
        stage = 1 - stage
    gl.store(final_state + at + row + key, s)
