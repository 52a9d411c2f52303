"""Triton text that generated kernels start with, and helpers that some of them need."""

PRELUDE = '''import triton
import triton.language as tl
{imports}

@triton.jit
def pair_sum(x, R: tl.constexpr, P: tl.constexpr, LEVELS: tl.constexpr):
    """Neighbours added level by level; the last +0 makes wider padding give the same bits."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (R, P >> (level + 1), 2)), axis=2)
    return x + 0.0
'''

PACK_E2M1 = '''

@triton.jit
def saturate(x):
    """x within 0 and 1: costs nothing, instructions have it as a modifier."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def e2m1_onto(x, sum, unit: tl.constexpr):
    """The sum plus unit times the e2m1 code of |x|: rounded by the sum's own ulp, which is the unit. Codes
    grow by 2, 1 and 1/2 a unit of x below 2, 4 and 6."""
    a = tl.minimum(tl.abs(x), 8.0)
    sum = tl.fma(saturate(a * 0.5), 4.0 * unit, sum)
    sum = tl.fma(saturate(tl.fma(a, 0.5, -1.0)), 2.0 * unit, sum)
    return tl.fma(saturate(tl.fma(a, 0.5, -2.0)), unit, sum)


@triton.jit
def four_e2m1(x0, x1, x2, x3):
    """Four magnitudes as nibbles: each is rounded at its own place of one sum, from the highest down."""
    sum = e2m1_onto(x3, 34359738368.0, 4096.0)
    sum = e2m1_onto(x2, sum - 32212254720.0, 256.0)
    sum = e2m1_onto(x1, sum - 2013265920.0, 16.0)
    sum = e2m1_onto(x0, sum - 125829120.0, 1.0)
    return sum.to(tl.uint32, bitcast=True) & 0xFFFF


@triton.jit
def shift_in(x, signs):
    """The sign of x at the top of a nibble of its own; lower bits of a nibble are not defined."""
    return (signs << 4) | (x.to(tl.uint32, bitcast=True) >> 28)


@triton.jit
def alternate(x, R: tl.constexpr, P: tl.constexpr):
    """Columns of even and of odd number."""
    return tl.split(tl.reshape(x, (R, P // 2, 2)))


@triton.jit
def pack_e2m1(x, R: tl.constexpr, P: tl.constexpr):
    """Eight e2m1 codes a word, the first in the lowest nibble."""
    even, odd = alternate(x, R, P)
    x04, x26 = alternate(even, R, P // 2)
    x15, x37 = alternate(odd, R, P // 2)
    x0, x4 = alternate(x04, R, P // 4)
    x2, x6 = alternate(x26, R, P // 4)
    x1, x5 = alternate(x15, R, P // 4)
    x3, x7 = alternate(x37, R, P // 4)
    signs = shift_in(x4, shift_in(x5, shift_in(x6, shift_in(x7, 0))))
    signs = shift_in(x0, shift_in(x1, shift_in(x2, shift_in(x3, signs))))
    return four_e2m1(x0, x1, x2, x3) | (four_e2m1(x4, x5, x6, x7) << 16) | (signs & 0x88888888)
'''

BYTES_OF = '''

@triton.jit
def bytes_of(words, R: tl.constexpr, P: tl.constexpr):
    """The bytes of P words a row."""
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (R, P * 2))
    return tl.reshape(tl.join(halves & 0xFF, halves >> 8), (R, P * 4)).to(tl.uint8)
'''
