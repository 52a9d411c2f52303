"""Transcendental functions and code conversions: accuracy against float64, special values, every code."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kiln.ir.dtypes import F32
from kiln.ir.functions import FUNCTIONS, canonical_to_e2m1
from kiln.ir.interpret import NumpyMachine
from kiln.ir.language import ROW, Value
from kiln.tests.support.numbers import Array, bits32, codes, single

EXACT, IDEAL = NumpyMachine(1, 1, ideal=False), NumpyMachine(1, 1, ideal=True)
SAMPLES = 200_000


def run(name: str, x: Any, machine: NumpyMachine = EXACT) -> Array:
    """A function of a row of numbers."""
    value = machine.value(np.asarray(x, np.float32).reshape(1, -1), ROW, F32)
    result: Array = machine.emit(name, (value,), ROW, FUNCTIONS[name].result).data[0]
    return result


def ulps(got: Array, want: Array) -> float:
    """The largest error, in units of the last place of the f32 result (of the smallest normal below it)."""
    unit = np.spacing(np.maximum(np.abs(want), 2.0**-126).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got.astype(np.float64) - want) / unit))


def _want(name: str, x: Array) -> Array:
    wide = x.astype(np.float64)
    if name == "math.erf":
        return np.array([math.erf(v) for v in wide])
    functions: dict[str, Any] = {
        "math.exp": np.exp,
        "math.tanh": np.tanh,
        "kiln.logistic": lambda v: 1 / (1 + np.exp(-v)),
    }
    return np.asarray(functions[name](wide))


@pytest.mark.parametrize(
    ("name", "low", "high", "bound"),
    [
        ("math.exp", -87.3, 88.7, 0.9),
        ("math.exp", -1.0, 1.0, 0.8),
        ("math.exp", -103.9, -87.3, 1.5),
        ("math.tanh", -10.0, 10.0, 1.6),
        ("math.tanh", -0.7, 0.7, 1.6),
        ("math.tanh", -1e-3, 1e-3, 0.6),
        ("math.erf", -5.0, 5.0, 1.2),
        ("math.erf", -1.2, 1.2, 1.2),
        ("kiln.logistic", -86.0, 20.0, 2.7),
        ("kiln.logistic", -5.0, 5.0, 2.4),
    ],
)
def test_accuracy(name: str, low: float, high: float, bound: float) -> None:
    count = SAMPLES // 8 if name == "math.erf" else SAMPLES
    x = np.random.default_rng(0).uniform(low, high, count).astype(np.float32)
    assert ulps(run(name, x), _want(name, x)) <= bound


def test_the_accuracy_test_can_fail() -> None:
    x = np.linspace(0.1, 1, 1000).astype(np.float32)
    assert ulps(np.nextafter(run("math.exp", x), np.float32(9)), _want("math.exp", x)) > 1
    assert ulps(np.tanh(x.astype(np.float16)).astype(np.float32), _want("math.tanh", x)) > 100


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("math.exp", [0.0, -0.0, -INF, INF, 89.0, -104.0, -200.0], [1, 1, 0, INF, INF, 0, 0]),
        ("math.exp", [-103.97], [2.0**-149]),
        ("math.tanh", [0.0, -0.0, INF, -INF, 20.0, -20.0], [0.0, -0.0, 1, -1, 1, -1]),
        ("math.erf", [0.0, -0.0, INF, -INF, 4.0, -9.0], [0.0, -0.0, 1, -1, 1, -1]),
        ("kiln.logistic", [0.0, INF, -INF, -87.0, -100.0, 30.0], [0.5, 1, 0, 0, 0, 1]),
    ],
)
def test_special_values(name: str, x: list[float], want: list[float]) -> None:
    assert bits32(run(name, x)) == bits32(single(want))


@pytest.mark.parametrize("name", ["math.exp", "math.tanh", "math.erf", "kiln.logistic"])
def test_nan_stays_nan(name: str) -> None:
    assert np.isnan(run(name, [NAN, -NAN])).all()


def test_exp_is_monotonic_across_its_steps() -> None:
    x = np.linspace(-104, 89, 500_001).astype(np.float32)
    got = run("math.exp", x)
    assert (got[1:] >= got[:-1]).all()


def test_odd_functions_are_odd() -> None:
    x = np.random.default_rng(1).uniform(0, 6, 10_000).astype(np.float32)
    for name in ("math.tanh", "math.erf"):
        assert (run(name, -x) == -run(name, x)).all()


def test_literals_of_the_exact_expansions() -> None:
    """The bits are the contract: a change of a coefficient shows here."""
    x = [1.0, -1.0, 0.5, 10.0, -20.5, 3.3]
    assert bits32(run("math.exp", x)) == [
        "402df854",
        "3ebc5ab2",
        "3fd3094c",
        "46ac14ef",
        "30abd1d8",
        "41d8e6af",
    ]
    assert bits32(run("math.tanh", x)) == [
        "3f42f7d5",
        "bf42f7d5",
        "3eec9a9f",
        "3f800000",
        "bf800000",
        "3f7f4def",
    ]
    assert bits32(run("math.erf", x)) == [
        "3f57bb3d",
        "bf57bb3d",
        "3f053f7b",
        "3f800000",
        "bf800000",
        "3f7fffcd",
    ]
    assert bits32(run("kiln.logistic", x)) == [
        "3f3b26a8",
        "3e89b2b1",
        "3f1f597f",
        "3f7ffd06",
        "30abd1d8",
        "3f76e4cf",
    ]


# -- codes
# -----------------------------------------------------------------------------------------------------------


def _every_code_and_between(values: Array) -> Array:
    """Each value, each midpoint of two neighbours, and the f32 next to each of them on both sides; both
    signs.
    """
    ordered = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float64))
    points = np.concatenate([ordered, (ordered[1:] + ordered[:-1]) / 2]).astype(np.float32)
    near = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))]
    both = np.concatenate([*near, *(-p for p in near)])
    extra = single([449, 464, 480, 1e9, 3e38, np.inf, 1e-30, 1e-45, 0])
    return np.concatenate([both, extra, -extra]).astype(np.float32)


def test_e4m3_agrees_with_ml_dtypes_around_every_code() -> None:
    all_values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = _every_code_and_between(all_values)
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (run("kiln.to_e4m3", x) == want).all()


def test_e4m3_agrees_on_random_patterns() -> None:
    x = np.random.default_rng(2).integers(0, 1 << 32, 500_000, np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (run("kiln.to_e4m3", x) == want).all()


def test_e2m1_agrees_with_ml_dtypes_around_every_code() -> None:
    all_values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    x = _every_code_and_between(all_values)
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert (run("kiln.to_e2m1", x) & 15 == want).all()


def test_e2m1_keeps_the_sign_of_zero() -> None:
    assert (run("kiln.to_e2m1", [0.0, -0.0, -0.2, 0.25, -0.25]) & 15).tolist() == [0, 8, 8, 0, 8]


@pytest.mark.parametrize("pattern", [0x7FC00000, 0xFFC00000, 0x7F800001])
def test_codes_of_nan_do_not_depend_on_its_bits(pattern: int) -> None:
    x = np.array([pattern], np.uint32).view(np.float32)
    assert run("kiln.to_e4m3", x).tolist() == [0x7F]
    assert (run("kiln.to_e2m1", x) & 15).tolist() == [7]


def test_the_canonical_e2m1_is_the_same_but_for_negative_nan() -> None:
    x = np.random.default_rng(3).standard_normal(10_000).astype(np.float32) * 4
    x[::100] = np.float32(np.nan)
    value = EXACT.value(x.reshape(1, -1), ROW, F32)
    assert (canonical_to_e2m1(value).data[0] & 15 == run("kiln.to_e2m1", x) & 15).all()


def test_every_positive_e4m3_code_has_its_value() -> None:
    code = np.arange(0x7F, dtype=np.uint8)
    value = Value(EXACT, code.reshape(1, -1), ROW, FUNCTIONS["kiln.to_e4m3"].result)
    got = EXACT.emit("kiln.from_e4m3", (value,), ROW, F32).data[0]
    assert (got == code.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
    assert codes(run("kiln.to_e4m3", got)) == codes(code)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "kiln.from_e4m3"])
def test_the_ideal_is_what_the_exact_one_approximates(name: str) -> None:
    x = np.random.default_rng(4).uniform(-6, 6, 5000).astype(np.float32)
    exact, ideal = run(name, x), run(name, x, IDEAL)
    if name.startswith("kiln.to_"):
        assert (exact & 15 == ideal & 15).all()
    else:
        assert np.allclose(exact, ideal, rtol=1e-6, atol=0)
