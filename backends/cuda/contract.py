"""The launch contract of a generated kernel, as manifest entries: parameters, grid, predicate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kiln.backends.cuda.schedule import Schedule
from kiln.backends.cuda.triton_emitter import Parameter, TritonKernel
from kiln.compiler.plan import type_predicates
from kiln.ir import signature
from kiln.ir.dtypes import DTYPES, DType
from kiln.ir.spec import Op, Ship, Tensor

MAX_GRID_Y = 65535
"""The most programs along y or z that a device takes."""


def operand_of(op: Op, p: Parameter) -> Tensor:
    """The tensor behind a pointer, stride or table-size parameter."""
    name = p.operand.removesuffix(":out")
    return next(t for t in op.tensors if t.name == name)


def is_hinted(op: Op, p: Parameter, attrs: Mapping[str, Any]) -> bool:
    """Whether an aligned schedule promises Triton a multiple of 16 for this parameter: whole rows and
    packed halves, not scales.
    """
    if p.kind == "N":
        return True
    if p.kind not in ("ptr", "stride"):
        return False
    kind = signature.row_kind(op, operand_of(op, p), attrs)
    if kind.table and len(operand_of(op, p).dims) == 1:
        return False
    fraction = kind.shape.fraction
    return fraction is not None and fraction >= signature.HALF


def _number(name: str, dtype: str, value: Any, hinted: bool) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "scalar",
        "dtype": dtype,
        "value": value,
        "divisible_by": 16 if hinted else 1,
    }


def parameter_json(op: Op, p: Parameter, types: Mapping[str, DType], hinted: bool) -> dict[str, Any]:
    """The PARAM entry."""
    operand = p.operand.removesuffix(":out")
    match p.kind:
        case "ptr":
            dtype = signature.resolve(op, operand_of(op, p), types)
            return {
                "name": p.name, "kind": "ptr", "dtype": dtype.name, "operand": operand,
                "access": "write" if p.operand.endswith(":out") else "read",
                "align": 16 if hinted else dtype.bytes,
            }  # fmt: skip
        case "stride":
            return _number(p.name, "i64", ["stride", operand], hinted)
        case "colstride":
            return _number(p.name, "i64", ["colstride", operand], False)
        case "rows":
            return _number(p.name, "i32", operand_of(op, p).dims[0], False)
        case "scalar":
            scalar = next(s for s in op.scalars if s.name == p.operand)
            return _number(p.name, scalar.dtype.name, ["arg", p.operand], False)
    return _number(p.name, "i32", ["dim", op.rows if p.kind == "M" else op.width], hinted)


def triton_type(entry: Mapping[str, Any]) -> str:
    """The parameter's type in a Triton signature."""
    name = DTYPES[entry["dtype"]].triton
    return f"*{name}" if entry["kind"] == "ptr" else name


def grid_json(op: Op, kernel: TritonKernel, schedule: Schedule) -> list[Any]:
    """Row groups along x; where rows are cut, column blocks along x and row groups along y, with whole y
    axes along z: a division of the program number cost 8 % (NVFP4 of 16384x5120: 69.0 against 63.5 us).
    """
    rows: Any = ["dim", op.rows]
    if kernel.padded_rows:
        rows = ["roundup", rows, 128]
    if schedule.rows > 1:
        rows = ["cdiv", rows, schedule.rows]
    if kernel.whole_rows:
        return [rows, 1, 1]
    planes = ["max", 1, ["cdiv", rows, MAX_GRID_Y]]
    return [["cdiv", ["dim", op.width], schedule.block], ["cdiv", rows, planes], planes]


def when_json(op: Op, ship: Ship, kernel: TritonKernel, schedule: Schedule) -> list[Any]:
    """Types, attributes, absent operands, and the rows and widths it is for. What the hints promise of
    addresses, widths and strides stands in the parameters (`align`, `divisible_by`) and is tested there.
    """
    tests: list[Any] = ["and", *type_predicates(op, ship)]
    if schedule.most_rows is not None:
        tests.append(["le", ["dim", op.rows], schedule.most_rows])
    if schedule.width is not None:
        tests.append(["eq", ["dim", op.width], schedule.width])
    elif kernel.whole_rows:
        tests.append(["le", ["dim", op.width], schedule.block])
    return tests


def priority(schedule: Schedule) -> int:
    """A kernel made for this width first, then for few rows, then aligned before unaligned."""
    return (
        100
        + 100 * schedule.hinted
        + 100 * (schedule.width is not None)
        + 50 * (schedule.most_rows is not None)
    )
