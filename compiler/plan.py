"""Composite plans: a recipe as its ops, one after another, with temporaries. The graph of a recipe whose
calls can't run as they are written is a NetworkX DAG; slots are shared by liveness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kiln.ir.dtypes import DType
from kiln.ir.language import Shape
from kiln.ir.record import Call, Recorder, record
from kiln.ir.spec import DTypeVar, Op, Ship

PRIORITY = 0


def order_of(recorder: Recorder, kept: Mapping[str, str]) -> Sequence[int]:
    """Positions of a recipe's calls in an order that they can run in: as they are written, or else the
    least topological order.

    `kept` names the operand that a result is written to: for an in/out operand, over the value it had.
    """
    as_written = range(len(recorder.calls))
    edges = list(_edges(recorder, kept))
    if all(before < after for before, after in edges):
        return as_written
    import networkx as nx  # 0.1 s, and no recipe of Kiln's own needs it

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(as_written)
    graph.add_edges_from(edges)
    return list(nx.lexicographical_topological_sort(graph))


def _edges(recorder: Recorder, kept: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """(earlier, later) where the later call reads what the other wrote, or overwrites what the other
    reads."""
    writer: dict[str, int] = {}
    for n, call in enumerate(recorder.calls):
        yield from ((writer[value], n) for value in call.operands.values() if value in writer)
        writer |= dict.fromkeys(call.results.values(), n)
    overwritten = {kept[value]: n for value, n in writer.items() if value in kept}
    for n, call in enumerate(recorder.calls):
        for value in call.operands.values():
            if value in overwritten and overwritten[value] != n:
                yield n, overwritten[value]


def slots(
    calls: Sequence[Call], kept: Mapping[str, str], types: Mapping[str, tuple[DType, Shape]]
) -> dict[str, str]:
    """A scratch slot per temporary of calls in the order in which they run: two of one type and shape share
    one if the first is dead when the second is written.
    """
    last = {
        value: position
        for position, call in enumerate(calls)
        for value in call.operands.values()
        if value is not None
    }
    assigned: dict[str, str] = {}
    free: dict[tuple[DType, Shape], list[str]] = {}
    for position, call in enumerate(calls):
        for value in call.results.values():
            if value in kept:
                continue
            pool = free.setdefault(types[value], [])
            assigned[value] = pool.pop() if pool else f"s{len(set(assigned.values()))}"
        for operand in dict.fromkeys(call.operands.values()):  # one read twice is freed once
            if operand in assigned and last[operand] == position:
                free.setdefault(types[operand], []).append(assigned[operand])
    return assigned


def _extent(op: Op, fraction: Fraction) -> Any:
    size: Any = ["dim", op.width]
    if fraction.numerator != 1:
        size = ["mul", fraction.numerator, size]
    return size if fraction.denominator == 1 else ["floordiv", size, fraction.denominator]


def _shape(op: Op, shape: Shape) -> list[Any]:
    rows: list[Any] = [["dim", op.rows]]
    return rows if shape.fraction is None else [*rows, _extent(op, shape.fraction)]


def _argument(value: Any) -> Any:
    return ["arg", value.removeprefix("arg:")] if isinstance(value, str) else value


def variant_name(ship: Ship) -> str:
    """A readable name of a specialization: types, then attributes that are set, then what is left out."""
    parts = list(dict.fromkeys(d.name for d in ship.dtypes.values())) or ["any"]
    if len(parts) > 1:
        parts = [d.name for d in ship.dtypes.values()]
    parts += [k if v is True else f"{k}{v}" if v is not False else f"no{k}" for k, v in ship.attrs.items()]
    parts += [f"no_{n}" for n in ship.absent]
    return "_".join(parts)


def type_predicates(op: Op, ship: Ship) -> list[Any]:
    """The part of `when` that a specialization's types, attributes and absent operands give."""
    found: list[Any] = []
    for t in op.tensors:
        if t.optional:
            found.append(["absent" if t.name in ship.absent else "present", t.name])
        if isinstance(t.dtype, DTypeVar) and t.dtype.name in ship.dtypes and t.name not in ship.absent:
            found.append(["dtype", t.name, ship.dtypes[t.dtype.name].name])
    found += [["attr", a.name, ship.attrs.get(a.name, a.default)] for a in op.attrs]
    return found


def plan_json(recipe: Op, ship: Ship) -> dict[str, Any]:
    """The recipe's PLAN entry of a manifest for one specialization."""
    if recipe.steps is not None:
        return _pipeline_json(recipe, ship)
    attrs = {a.name: ship.attrs.get(a.name, a.default) for a in recipe.attrs}
    recorder, results = record(recipe, ship.dtypes, attrs, ship.absent, inline=False)
    kept = {
        r.data: t.name
        for t, r in zip(recipe.outputs, results, strict=True)
        if r is not None and t.name not in ship.absent
    }
    calls = [recorder.calls[n] for n in order_of(recorder, kept)]
    assigned = slots(calls, kept, recorder.types)

    def place(value: str | None) -> str | None:
        if value is None:
            return None
        return kept.get(value) or (f"temp:{assigned[value]}" if value in assigned else value)

    temps = {s: recorder.types[v] for v, s in assigned.items()}
    steps = []
    for call in calls:
        bind = {k: place(v) for k, v in {**call.operands, **_outputs(call)}.items()}
        args = {k: _argument(v) for k, v in call.scalars.items()}
        steps.append({"op": call.op.name, "bind": bind, "args": args, "attrs": dict(call.attrs)})
    return {
        "op": recipe.name,
        "variant": f"composite.{variant_name(ship)}",
        "tier": "composite",
        "mode": "exact",
        "when": ["and", *type_predicates(recipe, ship)],
        "priority": PRIORITY,
        "temps": [
            {"name": s, "dtype": d.name, "shape": _shape(recipe, shape)}
            for s, (d, shape) in sorted(temps.items())
        ],
        "steps": steps,
    }


def _pipeline_json(op: Op, ship: Ship) -> dict[str, Any]:
    """The PLAN entry of a pipeline: its steps as they are declared."""
    attrs = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
    steps = [
        {
            "op": step.op.name,
            "bind": dict(step.bind),
            "args": {name: ["arg", source] for name, source in step.scalars.items()},
            "attrs": {a.name: step.attrs.get(a.name, a.default) for a in step.op.attrs},
        }
        for step in (op.steps(attrs) if op.steps is not None else ())
    ]
    return {
        "op": op.name,
        "variant": f"composite.{variant_name(ship)}",
        "tier": "composite",
        "mode": "exact",
        "when": ["and", *type_predicates(op, ship)],
        "priority": PRIORITY,
        "temps": [],
        "steps": steps,
    }


def _outputs(call: Call) -> dict[str, str]:
    """Where a call writes: an in/out operand's written side is its own name."""
    return dict(call.results)
