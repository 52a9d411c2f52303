"""Composite plans: a recipe as its ops, one after another, with temporaries. The graph is a NetworkX DAG;
slots are shared by liveness.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import networkx as nx

from kiln.ir.dtypes import DType
from kiln.ir.language import Shape
from kiln.ir.record import Call, Recorder, record
from kiln.ir.spec import DTypeVar, Op, Ship

PRIORITY = 0


def recipe_graph(recorder: Recorder, kept: Mapping[str, str]) -> nx.DiGraph[int]:
    """Calls as nodes 0..n-1; an edge where one reads what the other wrote, or overwrites what the other
    reads.

    `kept` names the operand that a result is written to: for an in/out operand, over the value it had.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    writer: dict[str, int] = {}
    for n, call in enumerate(recorder.calls):
        graph.add_node(n, call=call)
        for value in call.operands.values():
            if value in writer:
                graph.add_edge(writer[value], n)
        writer |= dict.fromkeys(call.results.values(), n)
    overwritten = {kept[value]: n for value, n in writer.items() if value in kept}
    for n, call in enumerate(recorder.calls):
        for value in call.operands.values():
            if value in overwritten and overwritten[value] != n:
                graph.add_edge(n, overwritten[value])
    return graph


def slots(
    graph: nx.DiGraph[int],
    order: list[int],
    kept: Mapping[str, str],
    types: Mapping[str, tuple[DType, Shape]],
) -> dict[str, str]:
    """A scratch slot per temporary: two of one type and shape share one if the first is dead when the
    second is written.
    """
    last: dict[str, int] = {}
    for position, n in enumerate(order):
        for value in graph.nodes[n]["call"].operands.values():
            if value is not None:
                last[value] = position
    assigned: dict[str, str] = {}
    free: dict[tuple[DType, Shape], list[str]] = {}
    for position, n in enumerate(order):
        call: Call = graph.nodes[n]["call"]
        for value in call.results.values():
            if value in kept:
                continue
            pool = free.setdefault(types[value], [])
            assigned[value] = pool.pop() if pool else f"s{len(set(assigned.values()))}"
        for value in dict.fromkeys(call.operands.values()):  # one read twice is freed once
            if value in assigned and last[value] == position:
                free.setdefault(types[value], []).append(assigned[value])
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
    graph = recipe_graph(recorder, kept)
    order = list(nx.lexicographical_topological_sort(graph))
    assigned = slots(graph, order, kept, recorder.types)

    def place(value: str | None) -> str | None:
        if value is None:
            return None
        return kept.get(value) or (f"temp:{assigned[value]}" if value in assigned else value)

    temps = {s: recorder.types[v] for v, s in assigned.items()}
    steps = []
    for n in order:
        call: Call = graph.nodes[n]["call"]
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
