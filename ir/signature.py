"""What a declaration says about its operands: row shapes, element types, sizes. Shared by interpreter,
tracer and emitters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from kiln.ir.diagnostics import DeclarationError, TypeCheckError
from kiln.ir.dtypes import U8, DType, dtype_of
from kiln.ir.language import FOREIGN, SCALAR, Shape, Value
from kiln.ir.spec import DTypeVar, Expr, Op, Tensor

HALF = Fraction(1, 2)
"""Fraction of a row that packed pairs have."""


@dataclass(frozen=True)
class RowKind:
    """How an operand looks from one row: its shape there, whether it moves with the row, or is a table
    rows are taken from.
    """

    shape: Shape
    per_row: bool
    table: bool = False


def fraction_of(expr: Expr, width: str) -> Fraction | None:
    """Size `expr` as a multiple of the width; None if it does not depend on it."""
    match expr:
        case ["dim", name]:
            return Fraction(1) if name == width else None
        case ["mul", int(k), list(inner)] | ["mul", list(inner), int(k)]:
            part = fraction_of(inner, width)
            return None if part is None else part * k
        case ["floordiv" | "cdiv", list(inner), int(k)]:
            part = fraction_of(inner, width)
            return None if part is None else part / k
        case ["roundup", list(inner), int()]:
            return fraction_of(inner, width)
    return None


def _names_rows(expr: Expr, rows: str) -> bool:
    return expr == ["dim", rows] or (
        isinstance(expr, list) and expr[0] == "roundup" and expr[1] == ["dim", rows]
    )


def with_attrs(expr: Expr, attrs: Mapping[str, Any]) -> Expr:
    """`expr` with attribute values in place of ["attr", name]."""
    if not isinstance(expr, list):
        return expr
    if expr[0] == "attr":
        return int(attrs[str(expr[1])])
    return [expr[0], *(with_attrs(e, attrs) if isinstance(e, list) else e for e in expr[1:])]


def row_kind(op: Op, tensor: Tensor, attrs: Mapping[str, Any] | None = None) -> RowKind:
    """The operand's row view; DeclarationError for a shape that rows of this op cannot have."""
    chosen = {a.name: (attrs or {}).get(a.name, a.default) for a in op.attrs}
    dims = tuple(with_attrs(d, chosen) for d in tensor.dims)
    if len(dims) == 1 and _names_rows(dims[0], op.rows):
        return RowKind(SCALAR, per_row=True)
    fraction = fraction_of(dims[-1], op.width)
    if fraction is None and len(dims) == 2 and dims[1] == 1 and _names_rows(dims[0], op.rows):
        return RowKind(SCALAR, per_row=True)
    if not _names_rows(dims[0], op.rows) and fraction is None and len(dims) <= 2:
        return RowKind(SCALAR if len(dims) == 1 else Shape(Fraction(1)), per_row=False, table=True)
    if fraction is None or len(dims) > 2:
        raise DeclarationError(
            f"op {op.name}: operand {tensor.name} has shape {list(dims)}; a row operand is "
            f"({op.rows}, k*{op.width}), ({op.rows},) or ({op.width},)"
        )
    if len(dims) == 1:
        return RowKind(Shape(fraction), per_row=False)
    return RowKind(Shape(fraction), per_row=True, table=not _names_rows(dims[0], op.rows))


def operand_shape(op: Op, tensor: Tensor, attrs: Mapping[str, Any] | None = None) -> Shape:
    """The operand's shape in a row; FOREIGN for a matrix of other columns, which primitive ops read."""
    if op.is_recipe and len(tensor.dims) == 2 and fraction_of(tensor.dims[1], op.width) is None:
        if isinstance(tensor.dims[1], list) and tensor.dims[1][0] == "dim":
            return FOREIGN
    return row_kind(op, tensor, attrs).shape


def array_dtype(tensor: Tensor, array: np.ndarray) -> DType:
    """Kiln type of an operand's array; raw fp8 bytes count as u8."""
    dtype = dtype_of(array.dtype)
    return U8 if tensor.dtype is U8 else dtype


def bind_sizes(op: Op, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Dimension sizes from operand shapes (leading dimensions collapsed into rows)."""
    sizes: dict[str, int] = {}
    for t in op.tensors:
        shape = shapes.get(t.name)
        if shape is None:
            continue
        collapsed = _collapse(t, shape)
        for expr, size in zip(t.dims, collapsed, strict=True):
            match expr:
                case ["dim", str(name)]:
                    sizes.setdefault(name, size)
                case ["mul", int(k), ["dim", str(name)]]:
                    sizes.setdefault(name, size // k)
    return sizes


def _collapse(t: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(t.dims) == 2:
        return (int(np.prod(shape[:-1])), shape[-1])
    return (int(np.prod(shape)),)


def bind_types(op: Op, args: Mapping[str, Any], given: Mapping[str, DType]) -> dict[str, DType]:
    """Element types of the op's type variables from argument values and explicit choices; TypeCheckError
    where they disagree.
    """
    types = dict(given)
    for t in op.inputs:
        value = args.get(t.name)
        if not isinstance(value, Value):
            continue
        if isinstance(t.dtype, DTypeVar):
            bound = types.setdefault(t.dtype.name, value.dtype)
            if value.dtype not in t.dtype.choices or bound is not value.dtype:
                legal = bound.name if bound is not value.dtype else "/".join(c.name for c in t.dtype.choices)
                raise TypeCheckError(f"{op.name}: operand {t.name} is {value.dtype}, expected {legal}")
        elif value.dtype is not t.dtype:
            raise TypeCheckError(f"{op.name}: operand {t.name} is {value.dtype}, expected {t.dtype}")
    return types


def resolve(op: Op, tensor: Tensor, types: Mapping[str, DType]) -> DType:
    """The element type of an operand, given its variables."""
    if isinstance(tensor.dtype, DType):
        return tensor.dtype
    if tensor.dtype.name not in types:
        legal = "/".join(c.name for c in tensor.dtype.choices)
        raise TypeCheckError(
            f"{op.name}: the type of {tensor.name} is free; give dtypes={{{tensor.dtype.name!r}: {legal}}}"
        )
    return types[tensor.dtype.name]


def apply_body(
    op: Op, args: Mapping[str, Any], dtypes: Mapping[str, DType], attrs: Mapping[str, Any]
) -> list[Value]:
    """Run an op's body on values of any machine: types bound and checked, each result rounded once to its
    output's type.
    """
    if op.body is None:
        raise TypeCheckError(f"{op.name} is a primitive op: it has no body to run inside a row")
    machine = next((v.machine for v in args.values() if isinstance(v, Value)), None)
    if machine is None:
        raise TypeCheckError(f"{op.name} was called without any value of the row")
    types = bind_types(op, args, dtypes)
    scalars = {s.name: args.get(s.name, s.default) for s in op.scalars}
    types_of_scalars = {s.name: s.dtype for s in op.scalars}
    values = {t.name: args.get(t.name) for t in op.inputs}
    for name, value in scalars.items():
        values[name] = value if isinstance(value, Value) else machine.constant(value, types_of_scalars[name])
    chosen = {a.name: attrs.get(a.name, a.default) for a in op.attrs}
    location = f"{op.body.__code__.co_filename}:{op.body.__code__.co_firstlineno}"
    returned = op.body(**values, **chosen)
    results = list(returned) if isinstance(returned, tuple | list) else [returned]
    if len(results) != len(op.outputs):
        names = ", ".join(t.name for t in op.outputs)
        raise TypeCheckError(
            f"{op.name} returns {len(results)} values, declared are {len(op.outputs)} ({names})", location
        )
    return [_checked(op, t, r, types, chosen, location) for t, r in zip(op.outputs, results, strict=True)]


def _checked(
    op: Op, tensor: Tensor, value: Any, types: Mapping[str, DType], attrs: Mapping[str, Any], location: str
) -> Value:
    if value is None and tensor.role == "inout" and tensor.optional:
        return value  # type: ignore[return-value]  # an absent in/out operand has no result
    if not isinstance(value, Value):
        raise TypeCheckError(
            f"{op.name} returns {type(value).__name__} for {tensor.name}, expected a value of the row",
            location,
        )
    kind = row_kind(op, tensor, attrs)
    if value.shape != kind.shape and not (value.shape.is_scalar and kind.per_row):
        raise TypeCheckError(
            f"{op.name} returns shape {value.shape} for {tensor.name}, declared is {kind.shape}", location
        )
    return value.to(resolve(op, tensor, types))
