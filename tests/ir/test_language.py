"""The tensor language: what each operation gives, and what it refuses, with file and line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kiln.ir import language as L
from kiln.ir.diagnostics import TypeCheckError
from kiln.ir.dtypes import BF16, BOOL, F16, F32, I32, I64, U8, DType
from kiln.ir.interpret import NumpyMachine
from kiln.ir.language import ROW, SCALAR, Shape, Value
from kiln.ir.record import Recorder
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Tensor

WIDTH = 8
PAIRS, DOUBLE, HALVED = Shape(Fraction(1, 2), 2), Shape(Fraction(2)), Shape(Fraction(1, 2))


def value(dtype: DType = F32, shape: Shape = ROW, start: int = 0) -> Value:
    """1, 2, 3 … (plus start) in a shape, on two rows."""
    machine = NumpyMachine(2, WIDTH, ideal=False)
    if shape.is_scalar:
        return machine.value(np.arange(1, 3)[:, None] + start, shape, dtype)
    extent = int(WIDTH * (shape.fraction or 1)) * shape.inner
    data = np.arange(1, 1 + 2 * extent).reshape(2, -1) + start
    return machine.value(data.reshape(2, -1, shape.inner) if shape.inner > 1 else data, shape, dtype)


def numbers(v: Value) -> list[Any]:
    """The first row."""
    data: np.ndarray[Any, Any] = np.broadcast_to(v.data, (2, *v.data.shape[1:]))
    return np.asarray(data[0], np.float64).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (lambda x, i: x + 1.0, [2, 3, 4, 5, 6, 7, 8, 9]),
        (lambda x, i: 1.0 + x, [2, 3, 4, 5, 6, 7, 8, 9]),
        (lambda x, i: x - 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (lambda x, i: 1.0 - x, [0, -1, -2, -3, -4, -5, -6, -7]),
        (lambda x, i: x * x, [1, 4, 9, 16, 25, 36, 49, 64]),
        (lambda x, i: 2.0 * x, [2, 4, 6, 8, 10, 12, 14, 16]),
        (lambda x, i: x / 2.0, [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]),
        (lambda x, i: 8.0 / L.maximum(x, 4.0), [2, 2, 2, 2, 1.6, 8 / 6, 8 / 7, 1]),
        (lambda x, i: -x, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (lambda x, i: -i, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (lambda x, i: i << 2, [4, 8, 12, 16, 20, 24, 28, 32]),
        (lambda x, i: i >> 1, [0, 1, 1, 2, 2, 3, 3, 4]),
        (lambda x, i: i & 1, [1, 0, 1, 0, 1, 0, 1, 0]),
        (lambda x, i: i | 8, [9, 10, 11, 12, 13, 14, 15, 8]),
        (lambda x, i: L.max_integer(i, 4), [4, 4, 4, 4, 5, 6, 7, 8]),
        (lambda x, i: L.divide(i, i + 1 - i + 2), [0, 0, 1, 1, 1, 2, 2, 2]),
        (lambda x, i: x > 4.0, [0, 0, 0, 0, 1, 1, 1, 1]),
        (lambda x, i: x >= 4.0, [0, 0, 0, 1, 1, 1, 1, 1]),
        (lambda x, i: i < 4, [1, 1, 1, 0, 0, 0, 0, 0]),
        (lambda x, i: i <= 4, [1, 1, 1, 1, 0, 0, 0, 0]),
        (lambda x, i: L.select(i < 4, x, 0.0), [1, 2, 3, 0, 0, 0, 0, 0]),
        (lambda x, i: L.fma(x, x, 1.0), [2, 5, 10, 17, 26, 37, 50, 65]),
        (lambda x, i: L.minimum(x, 3.0), [1, 2, 3, 3, 3, 3, 3, 3]),
        (lambda x, i: L.min_number(x, 3.0), [1, 2, 3, 3, 3, 3, 3, 3]),
        (lambda x, i: L.max_number(x, 6.0), [6, 6, 6, 6, 6, 6, 7, 8]),
        (lambda x, i: L.absolute(x - 4.0), [3, 2, 1, 0, 1, 2, 3, 4]),
        (lambda x, i: L.sqrt(x * x), [1, 2, 3, 4, 5, 6, 7, 8]),
        (lambda x, i: L.is_nan(x), [0] * 8),
        (lambda x, i: L.row_sum(x), [36]),
        (lambda x, i: L.row_max(x), [8]),
        (lambda x, i: L.width_of(x), [8]),
        (lambda x, i: L.group_max(L.group(x, 4)), [4, 8]),
        (lambda x, i: L.ungroup(L.group(x, 4)), [1, 2, 3, 4, 5, 6, 7, 8]),
        (lambda x, i: L.ungroup(L.spread(L.group_max(L.group(x, 4)), 4)), [4, 4, 4, 4, 8, 8, 8, 8]),
        (lambda x, i: L.pick(L.group(x, 2), 1), [2, 4, 6, 8]),
        (lambda x, i: L.columns(x), [0, 1, 2, 3, 4, 5, 6, 7]),
        (lambda x, i: L.permute(x, 7 - L.columns(x)), [8, 7, 6, 5, 4, 3, 2, 1]),
        (lambda x, i: x.bits().as_f32(), [1, 2, 3, 4, 5, 6, 7, 8]),
        (lambda x, i: x.to(BF16).to(F16).to(F32), [1, 2, 3, 4, 5, 6, 7, 8]),
        (lambda x, i: i.to(U8).to(I32).to(F32), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)  # fmt: skip
def test_what_an_operation_gives(build: Callable[[Value, Value], Value], want: list[float]) -> None:
    assert numbers(build(value(), value(I32))) == pytest.approx(want, rel=1e-7)


def test_views_of_a_wide_row() -> None:
    gate, up = L.halves(value(shape=DOUBLE))
    assert (numbers(gate)[:2], numbers(up)[:2], gate.shape) == ([1, 2], [9, 10], ROW)


def test_rows_of_tables() -> None:
    machine = NumpyMachine(2, 3, ideal=False)
    table = machine.value(np.arange(12).reshape(4, 3), ROW, F32)
    index = machine.value([[2], [0]], SCALAR, I32)
    assert L.take_row(table, index).data.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert L.take_columns(table, index, 2 - L.columns(table)).data.tolist() == [[8, 7, 6], [2, 1, 0]]
    vector = machine.value(np.arange(4) * 10, SCALAR, F32)
    assert L.take_element(vector, index).data.tolist() == [[20], [0]]
    assert L.row_number(table).data.tolist() == [[0], [1]]


def test_shapes_combine_with_scalars_and_with_themselves() -> None:
    for shape in (ROW, PAIRS, DOUBLE):
        assert (value(shape=shape) + value(shape=SCALAR)).shape == shape
        assert (value(shape=SCALAR) + value(shape=shape)).shape == shape
        assert (value(shape=shape) + value(shape=shape)).shape == shape


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: value(BF16) + value(BF16),
        "cannot add bf16 and bf16; arithmetic is on f32 or i32, convert with .to(F32)",
    ),
    (lambda: value(F32) * value(I32), "cannot mul f32 and i32"),
    (lambda: value(F16) - 1.0, "cannot sub f16 and f16"),
    (lambda: value(I32) / 2, "/ takes f32, not i32; divide() is for i32"),
    (lambda: 2.0 / value(I32), "/ takes f32, not i32"),
    (lambda: -value(BF16), "- takes f32, not bf16"),
    (lambda: value(BF16) < value(BF16), "cannot compare bf16 with bf16"),
    (lambda: value(F32) >= value(I32), "cannot compare f32 with i32"),
    (lambda: bool(value() > 0.0), "use select() instead of if"),
    (lambda: value() == value(), "values of the row have no ==; compare with < and <="),
    (lambda: value() != 0.0, "values of the row have no =="),
    (lambda: value(F32) << 1, "shli takes i32, not f32; take .bits() of an f32 first"),
    (lambda: value(U8) & 1, "andi takes i32, not u8"),
    (lambda: L.max_integer(value(F32), 1), "maxsi takes i32, not f32"),
    (lambda: L.divide(value(F32), value(F32)), "divsi takes i32, not f32"),
    (lambda: value(F32).to(I64), "no conversion from f32 to i64"),
    (lambda: value(U8).to(F32), "no conversion from u8 to f32"),
    (lambda: value(BF16).bits(), "bits takes f32, not bf16"),
    (lambda: value(F32).as_f32(), "as_f32 takes i32, not f32; only an i32 holds a bit pattern"),
    (lambda: L.exp(value(BF16)), "math.exp takes f32, not bf16; convert with .to(F32) first"),
    (lambda: L.sqrt(value(I32)), "math.sqrt takes f32, not i32"),
    (lambda: L.to_e4m3(value(BF16)), "kiln.to_e4m3 takes f32, not bf16"),
    (lambda: L.from_e4m3(value(I32)), "from_e4m3 takes u8, not i32; make the code with to_e4m3()"),
    (lambda: L.fma(value(BF16), 1.0, 1.0), "fma takes f32, not bf16"),
    (lambda: L.fma(value(F32), value(I32), 1.0), "fma takes f32, not i32"),
    (lambda: L.maximum(value(I32), 0), "arith.maximumf takes f32, not i32"),
    (lambda: L.min_number(value(F32), value(BF16)), "arith.minnumf takes f32, not bf16"),
    (
        lambda: L.select(value(F32) > 0.0, value(F32), value(I32)),
        "select takes two values of one type, not f32 and i32",
    ),
    (
        lambda: L.select(value(F32), value(F32), 0.0),
        "select's condition takes bool, not f32; compare two values",
    ),
    (lambda: L.is_nan(value(I32)), "is_nan takes f32, not i32"),
    (lambda: L.row_sum(value(BF16)), "a reduction takes f32, not bf16"),
    (lambda: L.row_sum(L.group(value(), 4)), "a reduction over the row takes a row"),
    (lambda: L.row_max(value(shape=SCALAR)), "a reduction over the row takes a row"),
    (lambda: L.group_max(value()), "group_max takes a grouped row"),
    (lambda: L.group(value(shape=SCALAR), 4), "group takes a row"),
    (lambda: L.group(L.group(value(), 2), 2), "group takes a row"),
    (lambda: L.ungroup(value()), "ungroup takes a grouped row"),
    (lambda: L.spread(value(shape=SCALAR), 4), "spread takes a vector with one element a group"),
    (lambda: L.spread(L.group(value(), 4), 4), "spread takes a vector with one element a group"),
    (lambda: L.pick(value(), 0), "pick takes element 0 or 1 of groups of two"),
    (lambda: L.pick(L.group(value(), 2), 2), "pick takes element 0 or 1 of groups of two, not 2 of"),
    (lambda: L.halves(value()), "halves takes a row of width 2N"),
    (lambda: L.permute(L.group(value(), 2), value(I32)), "permute takes a row"),
    (lambda: value() + L.group(value(), 2), "do not combine; group or ungroup one of them"),
    (lambda: value() + value(shape=DOUBLE), "do not combine"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeCheckError, match=re.escape(message)) as caught:
        build()
    file, _, line = caught.value.location.rpartition(":")
    assert file == __file__
    assert int(line) == inspect.getsourcelines(build)[1]
    assert str(caught.value).startswith(caught.value.location)


T = DTypeVar("T", (BF16, F32))
OPERANDS = (
    Tensor("x", T, ("M", "N")),
    Tensor("w", T, ("N",), optional=True),
    Scalar("a", F32),
    Scalar("b", F32, 2.0),
)
CALLED = Op(
    "called", "F", (*OPERANDS, Tensor("out", T, ("M", "N"), "out")),
    attrs=(Attr("negate", (False, True), False),),
    body=lambda x, w, a, b, negate: x.to(F32) * (-a if negate else a) + b + (0.0 if w is None else w.to(F32)),
)  # fmt: skip


def test_ops_are_called_by_order_or_name() -> None:
    x, w = value(), value(start=100)
    assert numbers(L.call(CALLED, x, None, 2.0)[0])[:2] == [4, 6]
    assert numbers(L.call(CALLED, x, a=2.0, negate=True)[0])[:2] == [0, -2]
    assert numbers(L.call(CALLED, x, w, 1.0, 0.0)[0])[:2] == [102, 104]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0), {}, "called takes 4 operands (x, w, a, b), got 5"),
        ((), {"c": 1.0}, "called has no free operand or attribute 'c'; it takes x, w, a, b, negate"),
        ((None, None, 1.0), {"a": 2.0}, "called has no free operand or attribute 'a'"),
        ((), {"a": 1.0}, "called needs operand x"),
        ((), {}, "called needs operand x, a"),
        ((None, None, 1.0), {}, "called was called without any value of the row"),
    ],
)
def test_calls_that_do_not_fit(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeCheckError, match=re.escape(message)) as caught:
        L.call(CALLED, *args, **kwargs)
    assert caught.value.location.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: (x, x), "odd returns 2 values, declared are 1 (out)"),
        (lambda x: 3.0, "odd returns float for out, expected a value of the row"),
        (lambda x: L.group(x, 4), "odd returns shape"),
        (lambda x: None, "odd returns NoneType for out"),
    ],
)
def test_bodies_that_return_something_else(body: Callable[[Value], Any], message: str) -> None:
    op = Op("odd", "F", (Tensor("x", F32, ("M", "N")), Tensor("out", F32, ("M", "N"), "out")), body=body)
    with pytest.raises(TypeCheckError, match=re.escape(message)) as caught:
        L.call(op, value())
    assert caught.value.location == f"{__file__}:{body.__code__.co_firstlineno}"


def test_a_primitive_op_has_no_body_to_run() -> None:
    op = Op("product", "F", (Tensor("x", F32, ("M", "N")),), reference=lambda **_: ())
    with pytest.raises(TypeCheckError, match="product is a primitive op"):
        L.call(op, Value(Recorder(), "x", ROW, F32))


def test_comparisons_give_conditions() -> None:
    assert (value() > 0.0).dtype is BOOL


def test_values_can_be_kept_in_dictionaries() -> None:
    a, b = value(), value()
    assert len({a: 1, b: 2}) == 2
