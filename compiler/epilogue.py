"""Epilogues: what a recipe computes of a primitive op's f32 result, as an op of its own that the primitive's
kernel can inline.

A recipe has an epilogue if its body calls one primitive op, first, with an f32 result, and everything after
it is element-wise on that result. Any other recipe with a primitive op is its composite plan alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kiln.ir import signature
from kiln.ir.diagnostics import TypeCheckError
from kiln.ir.dtypes import F32, DType
from kiln.ir.language import FOREIGN, Shape, Value
from kiln.ir.record import Call, record
from kiln.ir.spec import Op, Ship, Tensor

TOTAL = "total"
"""The epilogue's operand that holds the primitive's result."""
ELSEWHERE: Mapping[str, str] = {
    "linalg.reduce": "reduces over the row or over groups of it",
    "kiln.permute": "reads other columns of the row",
    "kiln.half": "reads two rows' halves",
    "kiln.take_row": "reads rows of a table",
    "kiln.take_element": "reads elements of a table",
    "kiln.take_columns": "reads elements of a table",
    "kiln.pack_e2m1": "packs neighbours",
    "tensor.expand_shape": "groups neighbours",
}
"""Operations that are not element-wise on a tile of the result, and what they do."""


@dataclass(frozen=True)
class Epilogue:
    """What follows the primitive op of a recipe."""

    op: Op
    """Of `total`, the recipe's operands that the primitive does not read, and its output."""
    head: Op
    types: Mapping[str, DType]
    """The element types of the primitive's operands, by operand."""
    operations: frozenset[str]
    """What its body does, as the IR calls it."""


class _Head:
    """The machine of the operands that the primitive op reads: all it can do is call that op."""

    def __init__(self, total: Value) -> None:
        self.total = total

    def call(self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]) -> Any:
        """The result, which is given; `epilogue_of` has seen that nothing else is called."""
        return [self.total]

    def constant(self, value: float | int, dtype: DType) -> Value:
        """See Machine.constant."""
        return self.total.machine.constant(value, dtype)

    def emit(self, name: str, args: Any, shape: Shape, dtype: DType, **attrs: Any) -> Value:
        """Refused."""
        raise TypeCheckError(f"{name} reads an operand of a primitive op")


def epilogue_of(recipe: Op, ship: Ship) -> Epilogue | str:
    """The epilogue of one specialization, or why it has none: a sentence with the recipe's name."""
    attrs = {a.name: ship.attrs.get(a.name, a.default) for a in recipe.attrs}
    recorder, _ = record(recipe, ship.dtypes, attrs, ship.absent, inline=False)
    first, *rest = recorder.calls
    for why in _faults(recipe, first, rest, {n: d for n, (d, _) in recorder.types.items()}):
        return f"{recipe.name} has no epilogue and stays composite: {why}"
    names = [name for name in first.operands.values() if name is not None]
    read = {name: signature.resolve(recipe, _operand(recipe, name), ship.dtypes) for name in names}
    rest_op = _rest(recipe, read)
    whole, _ = record(rest_op, ship.dtypes, attrs, ship.absent, inline=True)
    operations = frozenset(name for name, _ in whole.operations)
    for name in sorted(operations & ELSEWHERE.keys()):
        return f"{recipe.name} has no epilogue and stays composite: {name} {ELSEWHERE[name]}"
    return Epilogue(rest_op, first.op, read, operations)


def _faults(recipe: Op, first: Call, rest: list[Call], types: Mapping[str, DType]) -> Iterator[str]:
    if first.op.body is not None:
        yield f"its first op, {first.op.name}, is not primitive"
        return
    for call in rest:
        if call.op.body is None:
            yield f"it calls {call.op.name} after {first.op.name}"
        shared = sorted(n for n in call.operands.values() if n is not None and n in first.operands.values())
        if shared:
            yield f"{call.op.name} reads {shared[0]}, which {first.op.name} reads"
    if first.scalars or first.attrs:
        yield f"{first.op.name} takes numbers or attributes"
    results = list(first.results.values())
    if len(results) != 1 or types[results[0]] is not F32:
        yield f"{first.op.name} must have one result, in f32"
    if len(recipe.outputs) != 1 or recipe.outputs[0].shape != (recipe.rows, recipe.width):
        yield f"it must write one [{recipe.rows}, {recipe.width}]"
    own = {t.name: t for t in recipe.tensors}
    for t in first.op.tensors:
        mine = own.get(t.name if t.role == "out" else first.operands.get(t.name) or "")
        if mine is None or (mine.name, mine.dims) != (t.name, t.dims):
            yield f"it must declare {t.name} as {first.op.name} does"


def _operand(recipe: Op, name: str) -> Tensor:
    return next(t for t in recipe.tensors if t.name == name)


def _rest(recipe: Op, read: Mapping[str, DType]) -> Op:
    """The recipe without the operands that its primitive op reads, from `total` on."""

    def body(**values: Any) -> Any:
        machine = _Head(values.pop(TOTAL))
        head = {n: Value(machine, None, FOREIGN, dtype) for n, dtype in read.items()}
        return recipe.body(**head, **values) if recipe.body is not None else None

    operands = (
        Tensor(TOTAL, F32, (recipe.rows, recipe.width)),
        *(o for o in recipe.operands if o.name not in read),
    )
    return replace(recipe, operands=operands, body=body, reference=None, constraints=(), ship=())
