"""Transcendental functions and code conversions, spelled out in IEEE operations so that every machine
gives the same bits.

Each row of `FUNCTIONS` has the *exact* expansion (in the tensor language: the contract), the *ideal* one
(NumPy float64: the oracle) and the name of the native instruction that gives the same result where a target
has it. Polynomial coefficients are minimax fits of ours; the error against float64 over dense samples is in
tests/ir/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kiln.ir import language as L
from kiln.ir.dtypes import F32, I32, U8, DType
from kiln.ir.language import Value

LOG2E = 1.4426950408889634
LN2_HIGH = 0.693145751953125
"""ln 2 to 16 bits, so that n * LN2_HIGH is exact for |n| < 256."""
LN2_LOW = 1.4286067653301870e-06
ROUND_MAGIC = 12582912.0
"""1.5 * 2**23: adding it rounds an f32 below 2**22 to an integer, held in the low bits."""
ROUND_MAGIC_BITS = 0x4B400000
LOGISTIC_END = 86.63
"""exp(86.63) < 2**125."""
RECIPROCAL_MAGIC = 0x7EF311C7

EXP_POLY = (
    0.0013814534759148955,
    0.00836874544620514,
    0.04166839271783829,
    0.1666652113199234,
    0.4999999403953552,
    1.0,
    1.0,
)
TANH_POLY = (
    -0.0057049961760640144,
    0.020639097318053246,
    -0.05373971909284592,
    0.13331441581249237,
    -0.3333328068256378,
)
ERF_POLY = (
    7.854129216866568e-05, -0.0008010281017050147, 0.005188338924199343, -0.02685381844639778,
    0.1128358542919159, -0.3761262595653534, 0.12837916612625122,
)  # fmt: skip
ERFC_POLY = (
    2.144572135875933e-05, -0.0004385316278785467, 0.004190863575786352, -0.025171827524900436,
    0.10836157947778702, 0.6332724094390869, 1.1295520067214966, -0.0001824625360313803,
)  # fmt: skip


def _horner(x: Value, coefficients: tuple[float, ...]) -> Value:
    """Polynomial by fused multiply-adds, highest power first."""
    acc = L.fma(x, coefficients[0], coefficients[1])
    for c in coefficients[2:]:
        acc = L.fma(acc, x, c)
    return acc


def exact_exp(x: Value) -> Value:
    """2**n * p(r): n = round(x / ln 2), r by two-step reduction, p of degree 6. Overflows to inf, goes
    through subnormals to 0.
    """
    clamped = L.minimum(L.maximum(x, -104.0), 89.0)
    t = L.fma(clamped, LOG2E, ROUND_MAGIC)
    n = t - ROUND_MAGIC
    r = L.fma(n, -LN2_LOW, L.fma(n, -LN2_HIGH, clamped))
    p = _horner(r, EXP_POLY)
    whole = t.bits() - ROUND_MAGIC_BITS
    half = whole >> 1
    # Two exact scalings: n runs from -150 to 128, and one power of two holds -126..127 only.
    first = ((half << 23) + 0x3F800000).as_f32()
    second = (((whole - half) << 23) + 0x3F800000).as_f32()
    return p * first * second


def exact_logistic(x: Value) -> Value:
    """1 / (1 + exp(-x)) without a branch or a division: 0 below -86.6, where exp(-x) would leave the range
    that the reciprocal covers.
    """
    y = L.minimum(L.maximum(-x, -87.0), LOGISTIC_END)
    t = L.fma(y, LOG2E, ROUND_MAGIC)
    n = t - ROUND_MAGIC
    r = L.fma(n, -LN2_LOW, L.fma(n, -LN2_HIGH, y))
    # The low bits of t hold n, and the magic number's own shift out: one power of two is enough between
    # 2**-126 and 2**125.
    e = _horner(r, EXP_POLY) * ((t.bits() << 23) + 0x3F800000).as_f32()
    return L.select(x < -LOGISTIC_END, _f32(x, 0.0), _reciprocal(e + 1.0))


def _reciprocal(d: Value) -> Value:
    """1 / d within 1.5 ulp for 1 <= d < 2**126: a guess within 5.9 % from the exponent, one cubic and one
    quadratic Newton step.
    """
    guess = (_i32(d, RECIPROCAL_MAGIC) - d.bits()).as_f32()
    error = L.fma(-d, guess, 1.0)
    better = L.fma(guess, L.fma(error, error, error), guess)
    return L.fma(better, L.fma(-d, better, 1.0), better)


def exact_tanh(x: Value) -> Value:
    """Odd polynomial below 0.625, (1 - e) / (1 + e) with e = exp(-2|x|) above."""
    a = L.absolute(x)
    square = x * x
    small = L.fma(square * a, _horner(square, TANH_POLY), a)
    e = exact_exp(a * -2.0)
    # The sign comes last: the polynomial of -0 would be +0.
    return _copy_sign(L.select(a < 0.625, small, (1.0 - e) / (1.0 + e)), x)


def exact_erf(x: Value) -> Value:
    """x + x p(x**2) below 1, 1 - exp(-q(|x|)) above."""
    a = L.absolute(x)
    small = L.fma(_horner(x * x, ERF_POLY), x, x)
    # erf rounds to 1 above 3.92; the clamp keeps q inside its fitted interval.
    q = _horner(L.minimum(a, 4.0), ERFC_POLY)
    large = _copy_sign(1.0 - exact_exp(-q), x)
    return L.select(a < 1.0, small, large)


def _copy_sign(magnitude: Value, sign: Value) -> Value:
    return ((magnitude.bits() & 0x7FFFFFFF) | (sign.bits() & -0x80000000)).as_f32()


def exact_to_e4m3(x: Value) -> Value:
    """Integer rounding of the f32 pattern: normals keep 3 mantissa bits, below 2**-6 the step is 2**-9."""
    bits = x.bits()
    magnitude = bits & 0x7FFFFFFF
    clamped = L.min_number(magnitude.as_f32(), 448.0)
    pattern = clamped.bits()
    # Round to nearest even at bit 20, then rebias the exponent from 127 to 7.
    normal = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - (120 << 3)
    # 2**14 has an ulp of 2**-9: the sum's low bits are the subnormal code.
    subnormal = (clamped + 16384.0).bits() - 0x46800000
    code = L.select(clamped < 0.015625, subnormal, normal)
    signed = code | ((bits >> 24) & 0x80)
    return L.select(L.is_nan(x), _i32(x, 0x7F), signed).to(U8)


def exact_to_e2m1(x: Value) -> Value:
    """The least of three roundings. Codes grow by 2, 1 and 1/2 a unit below 2, 4 and 6: |x| -> min(2a, a +
    2, a/2 + 4, 7) is that curve.

    Each line is rounded to an integer by the ulp of 2**23, in one operation, and rounding commutes with the
    minimum. The code is in the low four bits; those above are not defined.
    """
    # The sign of a NaN differs between machines: a NaN is +7.
    return _e2m1(x, L.select(L.is_nan(x), _i32(x, 0), x.bits()))


def canonical_to_e2m1(x: Value) -> Value:
    """The same where arithmetic gives one positive NaN (CUDA): no test is needed."""
    return _e2m1(x, x.bits())


def _e2m1(x: Value, sign: Value) -> Value:
    a = L.absolute(x)
    below_two, below_four = L.fma(a, 2.0, 8388608.0), a + 8388610.0
    below_six = L.min_number(L.fma(a, 0.5, 8388612.0), 8388615.0)
    code = L.min_number(L.min_number(below_two, below_four), below_six)
    return code.bits() | ((sign >> 28) & 8)


def exact_pack_e2m1(x: Value) -> Value:
    """Codes of neighbours, one in each nibble."""
    return _pairs(exact_to_e2m1(x))


def canonical_pack_e2m1(x: Value) -> Value:
    """The same where arithmetic gives one positive NaN."""
    return _pairs(canonical_to_e2m1(x))


def _pairs(codes: Value) -> Value:
    pairs = L.group(codes, 2)
    return ((L.pick(pairs, 0) & 15) | (L.pick(pairs, 1) << 4)).to(U8)


def _i32(like: Value, value: int) -> Value:
    return like.machine.constant(value, I32)


def _f32(like: Value, value: float) -> Value:
    return like.machine.constant(value, F32)


def exact_from_e4m3(code: Value) -> Value:
    """Exponent and mantissa moved into place; subnormals are multiples of 2**-9."""
    c = code.to(I32)
    normal = ((c << 20) + (120 << 23)).as_f32()
    return L.select(c < 8, c.to(F32) * 0.001953125, normal)


def _ideal_e4m3(x: np.ndarray) -> np.ndarray:
    clipped = np.clip(np.nan_to_num(x, nan=0.0, posinf=448.0, neginf=-448.0), -448.0, 448.0)
    codes = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def _ideal_e2m1(x: np.ndarray) -> np.ndarray:
    a = np.minimum(np.where(np.isnan(x), 6.0, np.abs(x)), 6.0)
    code = (
        (a > 0.25).astype(np.int32)
        + (a >= 0.75)
        + (a > 1.25)
        + (a >= 1.75)
        + (a > 2.5)
        + (a >= 3.5)
        + (a > 5.0)
    )
    signed: np.ndarray = code | np.where(np.signbit(x) & ~np.isnan(x), 8, 0).astype(np.int32)
    return signed


def _ideal_pack_e2m1(x: np.ndarray) -> np.ndarray:
    codes = _ideal_e2m1(x)
    pairs: np.ndarray = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    return pairs


def _ideal_from_e4m3(code: np.ndarray) -> np.ndarray:
    values: np.ndarray = code.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values


def _ideal_logistic(x: np.ndarray) -> np.ndarray:
    values: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return values


def _ideal_erf(x: np.ndarray) -> np.ndarray:
    from math import erf

    values: np.ndarray = np.vectorize(erf, otypes=[np.float64])(x)
    return values


@dataclass(frozen=True)
class Function:
    """One named function: its contract, its oracle, and the target feature that has it as an instruction
    with the same results.
    """

    exact: Callable[[Value], Value]
    ideal: Callable[[Any], Any]
    result: DType = F32
    feature: str | None = None
    canonical: Callable[[Value], Value] | None = None
    """A cheaper expansion, equal where arithmetic gives only the positive quiet NaN (feature
    `canonical_nan`).
    """


FUNCTIONS = {
    "math.exp": Function(exact_exp, np.exp),
    "kiln.logistic": Function(exact_logistic, _ideal_logistic, feature="logistic"),
    "math.tanh": Function(exact_tanh, np.tanh),
    "math.erf": Function(exact_erf, _ideal_erf),
    "kiln.to_e4m3": Function(exact_to_e4m3, _ideal_e4m3, U8, feature="e4m3"),
    "kiln.to_e2m1": Function(exact_to_e2m1, _ideal_e2m1, I32, canonical=canonical_to_e2m1),
    "kiln.pack_e2m1": Function(
        exact_pack_e2m1, _ideal_pack_e2m1, U8, feature="e2m1_words", canonical=canonical_pack_e2m1
    ),
    "kiln.from_e4m3": Function(exact_from_e4m3, _ideal_from_e4m3, F32, feature="e4m3"),
}
"""Functions by the name the IR uses."""
