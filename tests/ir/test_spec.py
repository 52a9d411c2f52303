"""Declarations, and what they say of the operands of a row."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kiln.ir import signature
from kiln.ir.diagnostics import DeclarationError, TypeCheckError
from kiln.ir.dtypes import BF16, F16, F32, I32, U8
from kiln.ir.interpret import NumpyMachine
from kiln.ir.language import ROW, SCALAR, Shape
from kiln.ir.spec import Attr, Contract, DTypeVar, Op, Scalar, Tensor

T, U = DTypeVar("T", (BF16, F32)), DTypeVar("U", (BF16, F16))
X = Tensor("x", T, ("M", "N"))
STREAM = Tensor("stream", U, ("M", "N"), "inout")
OUT = Tensor("out", T, ("M", "N"), "out")
EPS = Scalar("eps", F32, 1e-6)


def _op(*operands: Tensor | Scalar, **fields: Any) -> Op:
    return Op("sample", "F", operands, **{"body": lambda **_: None, **fields})


def test_operands_are_sorted_by_kind_and_role() -> None:
    op = _op(X, EPS, STREAM, OUT)
    assert op.tensors == (X, STREAM, OUT)
    assert op.scalars == (EPS,)
    assert op.inputs == (X, STREAM)
    assert op.outputs == (STREAM, OUT)


def test_returns_give_the_order_of_the_outputs() -> None:
    assert _op(X, STREAM, OUT, returns=("out", "stream")).outputs == (OUT, STREAM)
    with pytest.raises(KeyError):
        _ = _op(X, OUT, returns=("x",)).outputs


def test_shapes_become_expressions() -> None:
    assert Tensor("p", U8, ("M", ["floordiv", ["dim", "N"], 2])).dims == (
        ["dim", "M"],
        ["floordiv", ["dim", "N"], 2],
    )


def test_declarations_are_frozen() -> None:
    for declared in (X, EPS, T, _op(X), Contract(), Attr("a", (1,), 1)):
        with pytest.raises(FrozenInstanceError):
            declared.name = "other"  # type: ignore[union-attr,misc]


@pytest.mark.parametrize(
    ("expr", "want"),
    [
        (["dim", "N"], Fraction(1)),
        (["mul", 2, ["dim", "N"]], Fraction(2)),
        (["mul", ["dim", "N"], 3], Fraction(3)),
        (["floordiv", ["dim", "N"], 16], Fraction(1, 16)),
        (["cdiv", ["mul", 2, ["dim", "N"]], 4], Fraction(1, 2)),
        (["roundup", ["floordiv", ["dim", "N"], 16], 4], Fraction(1, 16)),
        (["dim", "K"], None),
        (["floordiv", ["dim", "K"], 2], None),
        (["mul", 2, ["dim", "K"]], None),
        (7, None),
    ],
)
def test_sizes_are_fractions_of_the_width(expr: Any, want: Fraction | None) -> None:
    assert signature.fraction_of(expr, "N") == want


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        (("M", "N"), signature.RowKind(ROW, per_row=True)),
        (("N",), signature.RowKind(ROW, per_row=False)),
        (("M",), signature.RowKind(SCALAR, per_row=True)),
        (("M", 1), signature.RowKind(SCALAR, per_row=True)),
        (("V", "N"), signature.RowKind(ROW, per_row=True, table=True)),
        (("M", ["mul", 2, ["dim", "N"]]), signature.RowKind(Shape(Fraction(2)), per_row=True)),
        (
            ("M", ["floordiv", ["dim", "N"], ["attr", "size"]]),
            signature.RowKind(Shape(Fraction(1, 64)), per_row=True),
        ),
        (
            (["roundup", ["dim", "M"], 128], ["roundup", ["dim", "N"], 4]),
            signature.RowKind(ROW, per_row=True),
        ),
    ],
)
def test_how_an_operand_looks_from_one_row(shape: Any, want: signature.RowKind) -> None:
    op = _op(X, attrs=(Attr("size", (64, 128), 128),))
    assert signature.row_kind(op, Tensor("t", F32, shape), {"size": 64}) == want


def test_attributes_have_their_defaults() -> None:
    op = _op(X, attrs=(Attr("size", (64, 128), 128),))
    groups = Tensor("t", F32, ("M", ["floordiv", ["dim", "N"], ["attr", "size"]]))
    assert signature.row_kind(op, groups).shape == Shape(Fraction(1, 128))


@pytest.mark.parametrize("shape", [("M", "K", "N"), ("M", "K")])
def test_a_shape_that_rows_cannot_have(shape: Any) -> None:
    with pytest.raises(
        DeclarationError, match=r"op sample: operand t has shape .* a row operand is \(M, k\*N\)"
    ):
        signature.row_kind(_op(X), Tensor("t", F32, shape))


def test_sizes_are_read_from_the_arrays() -> None:
    op = _op(Tensor("x", T, ("M", ["mul", 2, ["dim", "N"]])), Tensor("w", T, ("N",)), OUT)
    assert signature.bind_sizes(op, {"x": (2, 3, 10)}) == {"M": 6, "N": 5}
    assert signature.bind_sizes(op, {"w": (5,)}) == {"N": 5}


def _values(**dtypes: Any) -> dict[str, Any]:
    machine = NumpyMachine(1, 4, ideal=False)
    return {name: machine.value(np.zeros((1, 4)), ROW, dtype) for name, dtype in dtypes.items()}


def test_types_are_bound_by_what_is_given() -> None:
    op = _op(X, Tensor("y", T, ("M", "N")), Tensor("w", I32, ("N",)), OUT)
    assert signature.bind_types(op, _values(x=BF16, y=BF16, w=I32), {}) == {"T": BF16}
    assert signature.resolve(op, OUT, {"T": BF16}) is BF16
    assert signature.resolve(op, Tensor("w", I32, ("N",)), {}) is I32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": F16}, "sample: operand x is f16, expected bf16/f32"),
        ({"x": BF16, "y": F32}, "sample: operand y is f32, expected bf16"),
        ({"w": F32}, "sample: operand w is f32, expected i32"),
    ],
)
def test_types_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    op = _op(X, Tensor("y", T, ("M", "N")), Tensor("w", I32, ("N",)), OUT)
    with pytest.raises(TypeCheckError, match=message):
        signature.bind_types(op, _values(**given), {})


def test_a_free_type_must_be_chosen() -> None:
    with pytest.raises(TypeCheckError, match=r"sample: the type of out is free; give dtypes={'T': bf16/f32}"):
        signature.resolve(_op(X, OUT), OUT, {})


@pytest.mark.parametrize("array", [np.zeros(3, np.uint8), np.zeros(3, np.uint8).view("u1")])
def test_codes_are_bytes(array: Any) -> None:
    assert signature.array_dtype(Tensor("q", U8, ("M", "N")), array) is U8
