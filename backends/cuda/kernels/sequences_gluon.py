"""What `sequences` does, in Gluon: boundaries made monotonic and kept inside the rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def added(a, b):
    """For scans."""
    return a + b


@gluon.jit
def _sequences(cu_seqlens, SEQS, T, LANES: gl.constexpr):
    """(number, begin, end) of LANES sequences; those beyond SEQS are empty."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    n = gl.arange(0, LANES, layout=flat)
    edge = gl.load(cu_seqlens + n, mask=(n > 0) & (n < SEQS), other=0)
    begin = gl.minimum(gl.maximum(gl.associative_scan(edge, 0, _larger), 0), T)
    after = gl.load(cu_seqlens + n + 1, mask=n + 1 < SEQS, other=0)
    end = gl.maximum(begin, gl.minimum(after, T))
    return n, gl.where(n < SEQS, begin, T), gl.where(n + 1 < SEQS, end, T)


@gluon.jit
def sequence_rows(cu_seqlens, which, SEQS, T, PIECE: gl.constexpr, LANES: gl.constexpr):
    """(begin, end, pieces before it) of a sequence."""
    n, begin, end = _sequences(cu_seqlens, SEQS, T, LANES)
    before = gl.sum(gl.where(n < which, (end - begin + PIECE - 1) // PIECE, 0), 0)
    own = n == which
    return gl.sum(gl.where(own, begin, 0), 0), gl.sum(gl.where(own, end, 0), 0), before


@gluon.jit
def piece_rows(cu_seqlens, piece, SEQS, T, PIECE: gl.constexpr, LANES: gl.constexpr):
    """(first row, end) of a piece; the same row twice where there are fewer."""
    if SEQS == 1:
        first = gl.minimum(piece * PIECE, T)
        stop = gl.minimum(first + PIECE, T)
    else:
        _, begin, end = _sequences(cu_seqlens, SEQS, T, LANES)
        total = gl.associative_scan((end - begin + PIECE - 1) // PIECE, 0, added)
        past = total <= piece
        start = gl.max(gl.where(past, end, 0), 0)
        first = gl.minimum(start + (piece - gl.max(gl.where(past, total, 0), 0)) * PIECE, T)
        stop = gl.minimum(first + PIECE, gl.min(gl.where(past, T, end), 0))
    return first, stop
