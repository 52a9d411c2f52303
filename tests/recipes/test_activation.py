"""Activations, element-wise glue, casts and copies: hand-worked literals and special values."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from kiln.ir import language as L
from kiln.ir.dtypes import BF16, DTYPES, F32
from kiln.ir.interpret import NumpyMachine, run
from kiln.ir.language import ROW
from kiln.recipes.activation import ACTIVATIONS, ADD, UNARY
from kiln.tests.recipes.conftest import Engine
from kiln.tests.recipes.literals import literal
from kiln.tests.support.numbers import BF16 as bf16_type
from kiln.tests.support.numbers import Array, bf16, bits32, codes, f32, single

INF, NAN = np.inf, np.nan


def _one(engine: Engine, op: str, *, dtypes: Any = None, **arrays: Any) -> Array:
    (out,) = engine(op, arrays, dtypes=dtypes)
    assert out is not None
    return out


@pytest.mark.parametrize(
    ("op", "x", "want"),
    [
        pytest.param(
            "silu",
            [-100, INF, -0.0, 0.0, 1],
            [-0.0, INF, -0.0, 0.0, 0.7310586],
            marks=literal("act/n.silu"),
        ),
        pytest.param(
            "gelu_tanh",
            [1, -1, 3, 0, -0.0],
            [0.841192, -0.158808, 2.9963627, 0, -0.0],
            marks=literal("act/6.gelu_tanh"),
        ),
    ],
)
def test_literals(engine: Engine, op: str, x: list[float], want: list[float]) -> None:
    assert bits32(_one(engine, op, x=f32(*x))) == bits32(want)


@pytest.mark.parametrize(
    ("op", "x", "want"),
    [
        pytest.param("sigmoid", [-100, 100, 0, INF, -INF], [0, 1, 0.5, 1, 0], marks=literal("act/n.sigmoid")),
        ("relu", [-5, -0.0, 0.0, 3, INF, -INF], [0, 0, 0, 3, INF, 0]),
        ("gelu", [0, 1, -1, INF, 10], [0, 0.8413447, -0.15865526, INF, 10]),
        ("gelu_quick", [0, 1, INF], [0, 0.845795, INF]),
    ],
)
def test_literals_in_bf16(engine: Engine, op: str, x: list[float], want: list[float]) -> None:
    assert codes(_one(engine, op, x=bf16(*x))) == codes(bf16(*want))


@pytest.mark.parametrize("op", list(ACTIVATIONS))
def test_nan_stays_nan(engine: Engine, op: str) -> None:
    assert np.isnan(_one(engine, op, x=bf16(NAN, 1)).astype(np.float32)[0, 0])


@literal("act/n.silu_of_minus_infinity")
def test_silu_of_minus_infinity_is_nan(engine: Engine) -> None:
    assert np.isnan(_one(engine, "silu", x=f32(-INF))).all()


@literal("act/6.silu_mul")
def test_silu_times_up(engine: Engine) -> None:
    assert bits32(_one(engine, "silu_mul", gate=f32(1), up=f32(2), dtypes={"O": F32})) == bits32([1.4621172])
    assert codes(_one(engine, "silu_mul", gate=bf16(1), up=bf16(2), dtypes={"O": BF16})) == "3fbb"


def test_the_gate_is_the_first_half(engine: Engine) -> None:
    merged = bf16(1, -0.0, 0, 2, 5, 7)
    assert codes(_one(engine, "silu_and_mul", x=merged)) == codes(
        _one(engine, "silu_mul", gate=merged[:, :3], up=merged[:, 3:], dtypes={"O": BF16})
    )
    assert codes(_one(engine, "silu_and_mul", x=bf16(1, 2))) == "3fbb"
    assert codes(_one(engine, "gelu_and_mul", x=bf16(1, 2))) == codes(bf16(1.6826894))
    assert codes(_one(engine, "gelu_tanh_and_mul", x=bf16(1, 2))) == codes(bf16(1.682384))


@literal("act/6.soft_cap")
@pytest.mark.parametrize(("x", "cap", "want"), [(30, 30, 22.847826), (-100, 50, -48.201378), (0, 5, 0)])
def test_soft_cap_within_two_ulp(engine: Engine, x: float, cap: float, want: float) -> None:
    got = float(_one(engine, "soft_cap", x=f32(x), cap=cap)[0, 0])
    assert abs(got - want) <= 2 * float(np.spacing(np.float32(abs(want))))


def test_soft_cap_divides(engine: Engine) -> None:
    """x / c, not x * (1 / c): they differ for some of these, and the first one goes in."""
    x, cap = np.linspace(-90, 90, 1001, dtype=np.float32).reshape(1, -1), np.float32(49)
    divided, multiplied = x / cap, x * (np.float32(1) / cap)
    assert (divided != multiplied).any()
    machine = NumpyMachine(1, x.size, ideal=False)
    want, other = (cap * L.tanh(machine.value(v, ROW, F32)).data for v in (divided, multiplied))
    got = _one(engine, "soft_cap", x=x, cap=float(cap))
    assert bits32(got) == bits32(want)
    assert bits32(got) != bits32(other)


def test_an_f32_gate_stays_unrounded(engine: Engine) -> None:
    """1 + 2**-10 is no bf16: the two gates give different products."""
    x, gate = bf16(*[1.0] * 64), np.linspace(0.5, 0.6, 64, dtype=np.float32).reshape(1, 64)
    fine = _one(engine, "sigmoid_gate", x=x, gate=gate, dtypes={"O": BF16})
    coarse = _one(engine, "sigmoid_gate", x=x, gate=gate.astype(bf16_type), dtypes={"O": BF16})
    want = (1 / (1 + np.exp(-gate.astype(np.float64)))).astype(bf16_type)
    assert codes(fine) == codes(want)
    assert codes(coarse) != codes(want)


@pytest.mark.parametrize(
    ("op", "arrays", "want"),
    [
        ("add", {"a": bf16(1, 256, 0.5), "b": bf16(256, 1, 0.25)}, [256, 256, 0.75]),
        ("add_bias", {"a": bf16(1, 2), "bias": bf16(3, -2)[0]}, [4, 0]),
        ("mul", {"a": bf16(3, -0.5), "b": bf16(5, 8)}, [15, -4]),
        ("mul_scalar", {"x": bf16(3, -5), "factor": 0.5}, [1.5, -2.5]),
        ("mul_col_vec", {"x": bf16(3, -5), "alpha": single([2, 0.25])}, [6, -1.25]),
        ("copy", {"x": bf16(3, -0.0)}, [3, -0.0]),
    ],
)
def test_glue(engine: Engine, op: str, arrays: dict[str, Any], want: list[float]) -> None:
    assert codes(_one(engine, op, **arrays)) == codes(bf16(*want))


def test_the_sum_has_the_residuals_type(engine: Engine) -> None:
    got = _one(engine, "add", a=bf16(1), b=f32(2.0**-12))
    assert (got.dtype, float(got[0, 0])) == (np.float32, 1 + 2.0**-12)


def test_bf16_sums_are_those_of_a_single_rounding() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << 16, 300_000, np.uint16).view(bf16_type) for _ in range(2))
    finite = np.isfinite(a.astype(np.float32)) & np.isfinite(b.astype(np.float32))
    a, b = a[finite], b[finite]
    (got,) = run(ADD, {"a": a.reshape(1, -1), "b": b.reshape(1, -1)})
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) + b.astype(np.float64)).astype(bf16_type)
    assert codes(got) == codes(want)


@pytest.mark.parametrize(("source", "target"), list(permutations(["f32", "bf16", "f16"], 2)))
def test_casts_round_once_to_nearest_even(engine: Engine, source: str, target: str) -> None:
    values = single([1.00390625, 1.01171875, 65519, 65520, 1e-8, -0.0, INF, 3.4e38, 6e-8, 1 / 3])
    with np.errstate(all="ignore"):
        x = values.astype(DTYPES[source].numpy).reshape(1, -1)
        want = x.astype(np.float32).astype(DTYPES[target].numpy)
    assert codes(_one(engine, "cast", x=x, dtypes={"O": DTYPES[target]})) == codes(want)


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_embedding_takes_rows(engine: Engine, ids: Any) -> None:
    table = np.arange(40, dtype=np.float32).reshape(8, 5).astype(bf16_type)
    got = _one(engine, "embedding", table=table, ids=np.array([7, 0, 7, 3], ids))
    assert codes(got) == codes(table[[7, 0, 7, 3]])


def test_every_bf16_through_every_activation_is_close_to_float64() -> None:
    """Within one ulp of bf16, plus what cancellation leaves where the result is far below the input."""
    x = np.arange(1 << 16, dtype=np.uint16).view(bf16_type)
    x = x[np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) < 80)].reshape(1, -1)
    for op in UNARY:
        (exact,), (ideal,) = (run(op, {"x": x}, ideal=i) for i in (False, True))
        assert exact is not None
        assert ideal is not None
        error = np.abs(exact.astype(np.float64) - ideal)
        unit = np.abs(ideal) * float(BF16.epsilon or 0) + np.abs(x.astype(np.float64)) * 2.0**-20 + 2.0**-133
        assert (error <= unit).all(), op.name
