"""Who computes what of a product on Hopper: blocks of the output, and steps along K, over persistent
programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def block(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """(row, column) of a block: GROUP rows of blocks are walked column by column, so that what programs load
    together stays in L2."""
    across = gl.cdiv(N, BLOCK_N)
    span = GROUP * across
    first = tile // span * GROUP
    size = gl.minimum(gl.cdiv(M, BLOCK_M) - first, GROUP)
    return first + tile % span % size, tile % span // size


@gluon.jit
def share(M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT: gl.constexpr):
    """(blocks that are taken whole, own steps in those, first step of the own share of the rest, own steps).

    A step is BLOCK_K of one block. With SPLIT, whole blocks go round as long as one and up to two for every
    program remain; the steps of these are cut into even shares, one run of steps for each program.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    depth = gl.cdiv(K, BLOCK_K)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    if SPLIT:
        whole = gl.maximum(tiles // programs - 1, 0) * programs
        rest = ((tiles - whole) * depth).to(gl.int64)
        begin = (rest * pid // programs).to(gl.int32)
        end = (rest * (pid + 1) // programs).to(gl.int32)
        own = whole // programs * depth
        return whole, own, begin, own + end - begin
    else:
        own = gl.cdiv(gl.maximum(tiles - pid, 0), programs) * depth
        return tiles, own, 0, own


@gluon.jit
def segment(done, whole, own, begin, steps, K, BLOCK_K: gl.constexpr, SPLIT: gl.constexpr):
    """(block, first step in it, steps in it) of what comes after `done` own steps."""
    depth = gl.cdiv(K, BLOCK_K)
    turn = gl.program_id(0) + done // depth * gl.num_programs(0)
    if SPLIT:
        at = begin + done - own
        divided = done >= own
        tile = gl.where(divided, whole + at // depth, turn)
        first = gl.where(divided, at % depth, 0)
        return tile, first, gl.minimum(depth - first, steps - done)
    else:
        return turn, 0, depth


@gluon.jit
def sharers(tile, whole, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    """(first, last) program with steps in a block; the same number twice for whole blocks."""
    programs = gl.num_programs(0)
    depth = gl.cdiv(K, BLOCK_K)
    rest = ((gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) - whole) * depth).to(gl.int64)
    at = ((tile - whole) * depth).to(gl.int64)
    first = (((at + 1) * programs - 1) // rest).to(gl.int32)
    last = (((at + depth) * programs - 1) // rest).to(gl.int32)
    return gl.where(tile < whole, 0, first), gl.where(tile < whole, 0, last)
