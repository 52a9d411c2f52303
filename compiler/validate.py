"""Whether declarations hold together: checked when a catalog is loaded, so that a mistake is told with the
op's name and file:line before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kiln.compiler.blame import blamed, parameters_fault
from kiln.compiler.signatures import signature_json
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.language import FOREIGN
from kiln.ir.record import Call, Recorder, record
from kiln.ir.signature import operand_shape
from kiln.ir.spec import ANY, DTypeVar, Op, Ship
from kiln.ir.structural import STRUCTURAL
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
        except Exception as error:  # bodies are not ours: anything may be wrong with them
            raise blamed(error, op, location_of(op)) from None


def _kind(op: Op) -> str:
    return "recipe" if op.is_recipe else "op"


def _faults(op: Op, ops: Mapping[str, Op]) -> Iterator[str]:
    yield from _signature_faults(op)
    yield from _kind_faults(op)
    for number, ship in enumerate(op.ship):
        yield from (f"ship entry {number}: {fault}" for fault in _ship_faults(op, ship))
        if op.steps is not None:
            yield from _step_faults(op, ship, ops)
        elif op.is_recipe:
            yield from _recipe_faults(op, ship, ops)
        elif op.body is not None:
            record(op, ship.dtypes, _attrs(op, ship), ship.absent, inline=True)


def _kind_faults(op: Op) -> Iterator[str]:
    """Whether the op says what it computes, in one way."""
    ways = {"body": op.body, "reference": op.reference, "steps": op.steps}
    given = [name for name, value in ways.items() if value is not None]
    legal = ("body", "steps") if op.is_recipe else ("body", "reference")
    if len(given) != 1 or given[0] not in legal:
        found = " and ".join(given) or "neither body nor reference nor steps"
        meaning = "calls ops in one row" if op.is_recipe else "is expressible in one row"
        kind = "a recipe" if op.is_recipe else "an op"
        yield f"has {found}; {kind} has body= where it {meaning}, else {legal[1]}="
    for function in filter(None, (op.body, op.reference)):
        fault = parameters_fault(function, op)
        yield from [fault] if fault is not None else []
    if op.is_recipe and len(op.operands) > MAX_OPERANDS:
        yield f"has {len(op.operands)} operands, a recipe at most {MAX_OPERANDS}; split it"


def _signature_faults(op: Op) -> Iterator[str]:
    """What any manifest would refuse."""
    try:
        signature = parse_signature(signature_json(op), f"{_kind(op)} {op.name}")
    except KilnError as error:
        raise DeclarationError(str(error), location_of(op)) from None
    if (
        not op.name.isascii()
        or not op.name.islower()
        or not op.name.isidentifier()
        or op.name.startswith("_")
    ):
        yield "its name must be snake_case: lower-case letters, digits and _, a letter first"
    if op.name in STRUCTURAL:
        yield f"its name is taken by the IR itself, as are {', '.join(STRUCTURAL)}"
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
            legal = (
                ", ".join(map(repr, choices.get(name, ())))
                or f"the attributes {', '.join(choices) or 'none'}"
            )
            yield f"attribute {name} is {value!r}, legal are {legal}"
    optional = [t.name for t in op.tensors if t.optional]
    for name in ship.absent:
        if name not in optional:
            yield f"leaves out {name!r}; the optional operands are {', '.join(optional) or 'none'}"
    for width in (w for w in ship.widths if w != ANY):
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
        first = recorder.operations[0][0]
        yield f"computes {first} itself; a recipe calls ops, arithmetic belongs into an op's body"
    yield from _count_faults(len(calls))
    yield from _foreign_faults(op, calls)
    yield from _unknown([call.op for call in calls], ops)
    yield from _result_faults(op, ship, recorder, [None if r is None else str(r.data) for r in results])


def _count_faults(count: int) -> Iterator[str]:
    if not 1 <= count <= MAX_STEPS:
        yield f"calls {count} ops, expected 1 to {MAX_STEPS}; " + (
            "split it" if count else "a recipe composes ops"
        )


def _unknown(called: Iterable[Op], ops: Mapping[str, Op]) -> Iterator[str]:
    for op in called:
        if ops.get(op.name) is not op:
            yield (
                f"calls {op.name}, which no catalog of this build lists; add it to your catalog's ops, or "
                "the catalog that has it (--catalog)"
            )


def _foreign_faults(op: Op, calls: Iterable[Call]) -> Iterator[str]:
    """Matrices of other columns than the rows' are for primitive ops."""
    foreign = {t.name: t for t in op.inputs if operand_shape(op, t) == FOREIGN}
    for called in calls:
        for name in called.operands.values():
            if name in foreign and called.op.body is not None:
                shape = ", ".join(map(str, foreign[name].shape))
                yield (
                    f"hands {name} [{shape}] to {called.op.name}, which computes rows of {op.width}; only "
                    "primitive ops read other columns"
                )


def _step_faults(op: Op, ship: Ship, ops: Mapping[str, Op]) -> Iterator[str]:
    """A pipeline: steps whose operands are all bound, to operands that exist, and results for every
    written one.
    """
    steps = op.steps(_attrs(op, ship)) if op.steps is not None else ()
    yield from _count_faults(len(steps))
    yield from _unknown((step.op for step in steps), ops)
    tensors, scalars = {t.name for t in op.tensors}, {s.name for s in op.scalars}
    written: set[str | None] = set()
    for number, step in enumerate(steps):
        where = f"step {number} ({step.op.name})"
        own = {t.name for t in step.op.tensors}
        if step.bind.keys() != own:
            yield f"{where} binds {', '.join(sorted(step.bind))}; expected {', '.join(sorted(own))}"
        for given, legal in ((step.bind.values(), tensors), (step.scalars.values(), scalars)):
            yield from (
                f"{where} names {n!r}, which is no operand of the recipe"
                for n in given
                if n and n not in legal
            )
        written |= {step.bind.get(t.name) for t in step.op.outputs}
    for tensor in op.outputs:
        if tensor.name not in written:
            yield f"no step writes {tensor.name}"


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
            both = f"{owners[value]} and {tensor.name}"
            yield f"returns one value as {both}; each written operand needs a value of its own"
        owners[value] = tensor.name
        if tensor.role == "inout":
            for name in _late_readers(recorder, tensor.name, value):
                late = f"{name} reads {tensor.name} after it was overwritten"
                yield f"{late}; use its new value, or copy the old one first"


def _late_readers(recorder: Recorder, operand: str, written: str) -> Iterator[str]:
    """Calls that need both an operand's old value and, directly or not, the value that takes its place."""
    dependent = {written}
    for call in recorder.calls:
        read = set(call.operands.values())
        if read & dependent:
            dependent |= set(call.results.values())
            if operand in read:
                yield call.op.name
