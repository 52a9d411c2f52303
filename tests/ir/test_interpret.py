"""The oracle's own arithmetic: the fused multiply-add, the order of sums, rounding, shapes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.ir.dtypes import BF16, F16, F32, I32
from kiln.ir.interpret import NumpyMachine, fma32, pair_sum, run
from kiln.ir.language import ROW, row_max, row_sum
from kiln.ir.spec import DTypeVar, Op, Scalar, Tensor
from kiln.tests.recipes.literals import literal
from kiln.tests.support.numbers import Array, bits32, codes, lcg_row, single


def rounded(value: Fraction) -> float:
    """The f32 nearest to an exact value, ties to even: by integer arithmetic alone."""
    if value == 0:
        return 0.0
    sign, magnitude = (-1 if value < 0 else 1), abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    steps = magnitude / quantum
    whole, rest = divmod(steps.numerator, steps.denominator)
    whole += 2 * rest > steps.denominator or (2 * rest == steps.denominator and whole % 2)
    result = whole * quantum
    return sign * (float("inf") if result >= Fraction(2) ** 128 else float(result))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=500, deadline=None)
@given(FLOATS, FLOATS, FLOATS)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    with np.errstate(all="ignore"):
        got = float(fma32(*(np.array([v], np.float32) for v in (a, b, c)))[0])
    assert got == rounded(Fraction(a) * Fraction(b) + Fraction(c))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(2**23, 2**24 - 1),
    st.integers(2**23, 2**24 - 1),
    st.integers(-60, 40),
    st.integers(1, 2**24 - 1),
)
def test_fma_rounds_once_near_ties(a: int, b: int, shift: int, c: int) -> None:
    """Products of 48 bits with an addend far below: where rounding twice goes wrong."""
    parts = [np.float32(a), np.float32(b), np.float32(float(c) * 2.0**shift)]
    got = float(fma32(*(np.array([p]) for p in parts))[0])
    assert got == rounded(Fraction(float(parts[0])) * Fraction(float(parts[1])) + Fraction(float(parts[2])))


def test_rounding_the_product_first_is_something_else() -> None:
    a, c = single([1 + 2.0**-12]), single([-1])
    assert float(fma32(a, a, c)[0]) == 2.0**-11 + 2.0**-24
    assert float((a * a + c)[0]) == 2.0**-11


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        ((np.inf, 1, 1), np.inf),
        ((np.inf, 0, 1), np.nan),
        ((1, 1, np.nan), np.nan),
        ((np.inf, 1, -np.inf), np.nan),
        ((3e38, 3e38, 0), np.inf),
        ((0.0, -1, 0.0), 0.0),
        ((-0.0, 1, -0.0), -0.0),
        ((2.0**-100, 2.0**-100, 0), 0.0),
    ],
)
def test_fma_of_special_values(parts: Any, want: float) -> None:
    with np.errstate(all="ignore"):
        got = fma32(*(np.array([p], np.float32) for p in parts))
    assert bits32(np.abs(got) if np.isnan(want) else got) == bits32([want])


def _recursive(x: Array) -> Array:
    """The order by its definition: padded to a power of two, halves of neighbours summed."""
    width = 1 << max(0, (len(x) - 1).bit_length())
    padded = [*x, *[np.float32(0)] * (width - len(x))]

    def total(low: int, high: int) -> Any:
        if high - low == 1:
            return padded[low]
        middle = (low + high) // 2
        return total(low, middle) + total(middle, high)

    return np.asarray(total(0, width) + np.float32(0))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 127, 128, 129, 1000])
def test_sums_have_the_order_of_pairs(width: int) -> None:
    x = np.random.default_rng(width).standard_normal((2, width)).astype(np.float32)
    assert bits32(pair_sum(x)) == bits32([_recursive(row) for row in x])


def test_wider_padding_gives_the_same_bits() -> None:
    x = single([[-0.0, -0.0, -0.0], [1, 2, 3]])
    wide = np.concatenate([x, np.zeros((2, 13), np.float32)], axis=1)
    assert bits32(pair_sum(x)) == bits32(pair_sum(wide))


@pytest.mark.parametrize(
    ("seed", "width", "pairs", "inverse"),
    [
        pytest.param(165, 2048, "45c6ad9c", "3f114be0", marks=literal("act/4.2048.pair")),
        pytest.param(1, 1000, "453e3adb", "3f12bcc0", marks=literal("act/4.1000.pair")),
        pytest.param(5, 5120, "46702bcb", "3f13bfbe", marks=literal("act/4.5120.pair")),
    ],
)
def test_literals_that_tell_orders_apart(seed: int, width: int, pairs: str, inverse: str) -> None:
    x = lcg_row(seed, width).astype(np.float32)
    total = pair_sum(x * x)
    assert bits32(total) == [pairs]
    assert bits32(_inverse(total, width)) == [inverse]


def _inverse(total: Any, width: int) -> Any:
    return np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(1e-6))


@pytest.mark.parametrize(
    ("seed", "width", "sums", "inverses"),
    [
        pytest.param(
            165,
            2048,
            ["45c6ad9b", "45c6ad69"],
            ["3f114be1", "3f114bf3"],
            marks=literal("act/4.2048.strided", "act/4.2048.sequential"),
        ),
        pytest.param(
            1,
            1000,
            ["453e3adc", "453e3ac5"],
            ["3f12bcbf"],
            marks=literal("act/4.1000.strided", "act/4.1000.sequential"),
        ),
        pytest.param(
            5,
            5120,
            ["46702bca", "46702b6a"],
            ["3f13bfbf"],
            marks=literal("act/4.5120.strided", "act/4.5120.sequential"),
        ),
    ],
)
def test_other_orders_give_other_bits(seed: int, width: int, sums: list[str], inverses: list[str]) -> None:
    """256 strided partials that are halved, and one after another: what the literals above exclude."""
    x = lcg_row(seed, width).astype(np.float32)[0] ** 2
    partials = np.zeros(256, np.float32)
    for j, value in enumerate(x):
        partials[j % 256] += value
    while len(partials) > 1:
        partials = partials[: len(partials) // 2] + partials[len(partials) // 2 :]
    total = np.float32(0)
    for value in x:
        total += value
    totals = [partials[0], total]
    assert bits32(totals) == sums
    assert [bits32([_inverse(t, width)])[0] for t in totals][: len(inverses)] == inverses


@literal("act/4.2048.codes")
def test_the_first_values_of_the_generator() -> None:
    assert codes(lcg_row(165, 4)) == "bf9a bfc4 3fe4 3fd4"


def test_maxima_ignore_nan_and_sums_do_not() -> None:
    machine = NumpyMachine(3, 2, ideal=False)
    x = machine.value([[1, np.nan], [np.nan, np.nan], [-np.inf, 2]], ROW, F32)
    assert row_max(x).data.tolist() == [[1], [-np.inf], [2]]
    assert np.isnan(row_sum(x).data[:2]).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_narrowing_rounds_once_to_nearest_even(dtype: Any) -> None:
    machine = NumpyMachine(1, 4, ideal=False)
    half = dtype.epsilon / 2
    x = machine.value([[1 + half, 1 + 3 * half, 1 + half * 1.001, 1 - half / 2]], ROW, F32)
    got = x.to(dtype).data.astype(np.float64)[0]
    assert got.tolist() == [1.0, 1 + 4 * half, 1 + 2 * half, 1.0]


T = DTypeVar("T", (BF16, F32))
SCALED = Op(
    "scaled", "F", (Tensor("x", T, ("M", "N")), Scalar("k", F32, 2.0), Tensor("out", T, ("M", "N"), "out")),
    body=lambda x, k: x.to(F32) * k,
)  # fmt: skip


def test_leading_dimensions_are_rows_and_defaults_are_used() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    (out,) = run(SCALED, {"x": x})
    assert out is not None
    assert (out.shape, out.dtype) == ((4, 3), np.dtype(np.float32))
    assert (out.reshape(2, 2, 3) == 2 * x).all()


def test_the_ideal_is_float64_without_rounding() -> None:
    x = np.array([[1.0, 3.0]], ml_dtypes.bfloat16)
    (out,) = run(SCALED, {"x": x, "k": 1 / 3}, ideal=True)
    assert out is not None
    assert out.dtype == np.float64
    assert out.tolist() == [[1 / 3, 1.0]]


def test_a_value_of_one_number_is_spread_over_the_rows() -> None:
    constant = Op(
        "ones", "F", (Tensor("x", F32, ("M", "N")), Tensor("out", F32, ("M",), "out")),
        body=lambda x: row_max(x) * 0.0 + 1.0,
    )  # fmt: skip
    (out,) = run(constant, {"x": np.zeros((3, 2), np.float32)})
    assert out is not None
    assert out.tolist() == [1, 1, 1]


def test_an_operation_without_meaning_is_refused() -> None:
    machine = NumpyMachine(1, 1, ideal=False)
    with pytest.raises(KeyError, match="operation math\\.cos has no NumPy meaning"):
        machine.emit("math.cos", (machine.constant(1.0, F32),), ROW, F32)


def test_integer_constants_wrap() -> None:
    machine = NumpyMachine(1, 1, ideal=False)
    assert machine.constant(0xFFFFFFFF, I32).data.tolist() == [[-1]]
