"""Bodies run without numbers: what they call and which operations they use. Needs neither MLIR nor NumPy
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kiln.ir import signature
from kiln.ir.dtypes import DType
from kiln.ir.language import SCALAR, Shape, Value
from kiln.ir.spec import Op


@dataclass(frozen=True)
class Call:
    """One op call of a recipe: values are names ("x", "t0"); an absent operand is None."""

    op: Op
    operands: Mapping[str, str | None]
    scalars: Mapping[str, Any]
    attrs: Mapping[str, Any]
    results: Mapping[str, str]


@dataclass
class Recorder:
    """Records operations; `data` of its values is a name."""

    operations: list[tuple[str, Shape]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inline: bool = True
    """Whether called ops are entered (to see their operations) or only listed."""
    types: dict[str, tuple[DType, Shape]] = field(default_factory=dict)

    def constant(self, value: float | int, dtype: DType) -> Value:
        """A constant: its data is the number."""
        return Value(self, value, SCALAR, dtype)

    def emit(self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, **attrs: Any) -> Value:
        """See Machine.emit."""
        self.operations.append((name, shape))
        return Value(self, f"v{len(self.operations)}", shape, dtype)

    def call(self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]) -> Any:
        """Enter the op, or note the call."""
        if self.inline:
            return signature.apply_body(op, args, dtypes, attrs)
        types = signature.bind_types(op, args, dtypes)
        results: list[Value | None] = []
        names: dict[str, str] = {}
        for t in op.outputs:
            if t.role == "inout" and args.get(t.name) is None:
                results.append(None)
                continue
            names[t.name] = f"t{len(self.types)}"
            dtype, shape = signature.resolve(op, t, types), signature.row_kind(op, t, attrs).shape
            self.types[names[t.name]] = (dtype, shape)
            results.append(Value(self, names[t.name], shape, dtype))
        operands = {t.name: None if args.get(t.name) is None else args[t.name].data for t in op.inputs}
        scalars = {
            s.name: getattr(args.get(s.name, s.default), "data", args.get(s.name, s.default))
            for s in op.scalars
        }
        self.calls.append(Call(op, operands, scalars, attrs, names))
        return results


def record(
    op: Op, types: Mapping[str, DType], attrs: Mapping[str, Any], absent: Sequence[str], inline: bool
) -> tuple[Recorder, list[Value | None]]:
    """Run the body of an op or recipe in a recorder; operand values are named after their operands."""
    recorder = Recorder(inline=inline)
    values: dict[str, Any] = {}
    for t in op.inputs:
        shape = signature.operand_shape(op, t, attrs)
        values[t.name] = (
            None if t.name in absent else Value(recorder, t.name, shape, signature.resolve(op, t, types))
        )
    for s in op.scalars:
        values[s.name] = Value(recorder, f"arg:{s.name}", SCALAR, s.dtype)
    return recorder, list(signature.apply_body(op, values, types, attrs))


def expressible(op: Op) -> bool:
    """Whether one row can run the op: it has a body, and calls no primitive op."""
    if op.body is None or not op.is_recipe or not op.ship:
        return op.body is not None
    ship = op.ship[0]
    attrs = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
    calls = record(op, ship.dtypes, attrs, ship.absent, inline=False)[0].calls
    return all(call.op.body is not None for call in calls)


def reduces_rows(op: Op, types: Mapping[str, DType], attrs: Mapping[str, Any], absent: Sequence[str]) -> bool:
    """Whether the body needs whole rows at once: it reduces over them, or reads other columns."""
    recorder, _ = record(op, types, attrs, absent, inline=True)
    return any(
        name == "kiln.permute" or (name == "linalg.reduce" and shape.is_scalar)
        for name, shape in recorder.operations
    )
