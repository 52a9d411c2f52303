"""Sequences of any lengths over the rows of an operand: which rows a program's piece covers.

Boundaries are made monotonic and kept inside the rows, so that no value of cu_seqlens leads outside an
operand.
"""

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def sequences(cu_seqlens, SEQS, T, PIECE: tl.constexpr, LANES: tl.constexpr):
    """(begin, end, pieces up to and with it) of LANES sequences; those beyond SEQS are empty."""
    n = tl.arange(0, LANES)
    edge = tl.load(cu_seqlens + n, mask=(n > 0) & (n < SEQS), other=0)
    begin = tl.minimum(tl.maximum(tl.associative_scan(edge, 0, _larger), 0), T)
    after = tl.load(cu_seqlens + n + 1, mask=n + 1 < SEQS, other=0)
    end = tl.maximum(begin, tl.minimum(after, T))
    begin = tl.where(n < SEQS, begin, T)
    end = tl.where(n + 1 < SEQS, end, T)
    return begin, end, tl.cumsum((end - begin + PIECE - 1) // PIECE, 0)


@triton.jit
def pick(values, index, LANES: tl.constexpr):
    """Element `index`; 0 where there is none."""
    return tl.sum(tl.where(tl.arange(0, LANES) == index, values, 0), axis=0)


@triton.jit
def piece_rows(cu_seqlens, piece, SEQS, T, PIECE: tl.constexpr, LANES: tl.constexpr):
    """(sequence, its begin, its end, first row, end) of a piece; both last ones T where there are fewer."""
    _, ends, total = sequences(cu_seqlens, SEQS, T, PIECE, LANES)
    before = total <= piece
    n = tl.sum(before.to(tl.int32), axis=0)
    begin = tl.max(tl.where(before, ends, 0), axis=0)
    end = tl.min(tl.where(before, T, ends), axis=0)
    first = begin + (piece - tl.max(tl.where(before, total, 0), axis=0)) * PIECE
    stop = tl.minimum(first + PIECE, end)
    return n, begin, end, tl.where(n < SEQS, first, T), tl.where(n < SEQS, stop, T)
