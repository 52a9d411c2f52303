"""Whether declarations hold together: checked when a catalog is loaded, so that a mistake is told with the op's name
and file:line before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kiln.compiler.plan import plan_json
from kiln.compiler.signatures import signature_json
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.record import Recorder, record
from kiln.ir.spec import DTypeVar, Op, Ship
from kiln.runtime.consistency import faults
from kiln.runtime.entities import Manifest
from kiln.runtime.errors import KilnError
from kiln.runtime.expr import Env, names, parse_pred, why_not
from kiln.runtime.manifest import parse_signature

MAX_STEPS = 8
MAX_OPERANDS = 16
"""Limits of a recipe: what one row kernel and one composite plan are made for."""


def location_of(op: Op) -> str:
    """file:line of what the op computes; empty where it says nothing."""
    code = getattr(op.body or op.reference, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def validate(ops: Mapping[str, Op]) -> None:
    """Check every op, and every recipe against the ops it calls.

    Raises:
        DeclarationError: with the op's name, what was found, what is legal, and file:line.
    """
    for op in ops.values():
        try:
            for fault in _faults(op, ops):
                raise DeclarationError(f"{_kind(op)} {op.name}: {fault}", location_of(op))
        except DeclarationError as error:
            raise error if error.location else type(error)(error.message, location_of(op)) from None


def _kind(op: Op) -> str:
    return "recipe" if op.is_recipe else "op"


def _faults(op: Op, ops: Mapping[str, Op]) -> Iterator[str]:
    yield from _signature_faults(op)
    if (op.body is None) == (op.reference is None) and not op.is_recipe:
        yield "has a body and a reference; an expressible op has a body, a primitive op a reference" if op.body else (
            "has neither body nor reference; give it body= (expressible) or reference= (primitive)"
        )
    if op.is_recipe and (op.body is None or len(op.operands) > MAX_OPERANDS):
        yield "has no body; a recipe is a function that calls ops" if op.body is None else (
            f"has {len(op.operands)} operands, at most {MAX_OPERANDS} are allowed; split it"
        )
    for number, ship in enumerate(op.ship):
        yield from (f"ship entry {number}: {fault}" for fault in _ship_faults(op, ship))
        if op.is_recipe:
            yield from _recipe_faults(op, ship, ops)
        elif op.body is not None:
            record(op, ship.dtypes, _attrs(op, ship), ship.absent, inline=True)


def _signature_faults(op: Op) -> Iterator[str]:
    """What any manifest would refuse."""
    try:
        signature = parse_signature(signature_json(op), f"{_kind(op)} {op.name}")
    except KilnError as error:
        raise DeclarationError(str(error), location_of(op)) from None
    if not op.name.isascii() or not op.name.islower() or not op.name.isidentifier() or op.name.startswith("_"):
        yield "its name must be snake_case: lower-case letters, digits and _, a letter first"
    for fault in faults(Manifest(1, 1, "cpu-x86_64", {}, {op.name: signature}, (), (), {})):
        yield fault.removeprefix(f"op {op.name}: ")


def _attrs(op: Op, ship: Ship) -> dict[str, Any]:
    return {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}


def _ship_faults(op: Op, ship: Ship) -> Iterator[str]:
    present = [t for t in op.tensors if t.name not in ship.absent]
    variables = {t.dtype.name: t.dtype for t in present if isinstance(t.dtype, DTypeVar)}
    everywhere = {t.dtype.name for t in op.tensors if isinstance(t.dtype, DTypeVar)}
    for name, variable in variables.items():
        legal = "/".join(c.name for c in variable.choices)
        if name not in ship.dtypes:
            yield f"the type {name} is not given; choose {legal}"
        elif ship.dtypes[name] not in variable.choices:
            yield f"the type {name} is {ship.dtypes[name]}, expected {legal}"
    for name in ship.dtypes.keys() - everywhere:
        yield f"gives a type {name!r}, the op's are {', '.join(sorted(everywhere)) or 'none'}"
    choices = {a.name: a.choices for a in op.attrs}
    for name, value in ship.attrs.items():
        if name not in choices or value not in choices[name]:
            legal = ", ".join(map(repr, choices.get(name, ()))) or f"the attributes {', '.join(choices) or 'none'}"
            yield f"attribute {name} is {value!r}, legal are {legal}"
    optional = [t.name for t in op.tensors if t.optional]
    for name in ship.absent:
        if name not in optional:
            yield f"leaves out {name!r}; the optional operands are {', '.join(optional) or 'none'}"
    for width in ship.widths:
        yield from (f"width {width}: {why}" for why in _width_faults(op, ship, width))


def _width_faults(op: Op, ship: Ship, width: int) -> Iterator[str]:
    if width < 1:
        yield "expected at least 1"
    env = Env()
    env.dims, env.attrs = {op.width: width}, _attrs(op, ship)
    for predicate, sentence in op.constraints:
        parsed = parse_pred(predicate)
        if all((head, name) == ("dim", op.width) or head == "attr" for head, name in names(parsed)):
            if why_not(parsed, env) is not None:
                yield sentence


def _recipe_faults(op: Op, ship: Ship, ops: Mapping[str, Op]) -> Iterator[str]:
    recorder, results = record(op, ship.dtypes, _attrs(op, ship), ship.absent, inline=False)
    calls = recorder.calls
    if recorder.operations:
        yield f"computes {recorder.operations[0][0]} itself; a recipe calls ops, arithmetic belongs into an op's body"
    if not calls:
        yield "calls no op; a recipe is a composition of one to eight ops"
    if len(calls) > MAX_STEPS:
        yield f"calls {len(calls)} ops, at most {MAX_STEPS} are allowed; split it"
    for call in calls:
        if ops.get(call.op.name) is not call.op:
            yield (
                f"calls {call.op.name}, which no catalog of this build lists; add it to your catalog's ops, or the "
                "catalog that has it (--catalog)"
            )
    yield from _result_faults(op, ship, recorder, [None if r is None else str(r.data) for r in results])
    plan_json(op, ship)  # refuses an order in which an in/out operand is overwritten before it is read


def _result_faults(op: Op, ship: Ship, recorder: Recorder, produced: list[str | None]) -> Iterator[str]:
    """Every written operand must be the result of one op, and of one only."""
    made = {name for call in recorder.calls for name in call.results.values()}
    owners: dict[str, str] = {}
    for tensor, value in zip(op.outputs, produced, strict=True):
        if tensor.name in ship.absent or value is None:
            continue
        if value not in made:
            yield f"returns {value} as {tensor.name}: no op writes it; call one, such as copy"
        elif value in owners:
            yield f"returns one value as {owners[value]} and {tensor.name}; each written operand needs a value of its own"
        owners[value] = tensor.name
