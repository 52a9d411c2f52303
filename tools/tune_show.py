"""What is chosen among an op's candidates, call by call, and on what basis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kiln.backends.cuda import tuned
from kiln.backends.cuda.backend import own_candidates
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.dispatch import Choice
from kiln.compiler.target import TARGETS
from kiln.compiler.tuning import Shape
from kiln.tools.console import UsageError, nearest, require
from kiln.tools.declared import KILN


def choices(op: str, targets: Sequence[str] | None, database: Path | None) -> list[dict[str, Any]]:
    """A row for every call that the database or the cost model decides.

    Raises:
        UsageError: no such op with candidates, or no such target.
    """
    known = own_candidates()
    if op not in known:
        raise UsageError(nearest(op, known, "op with candidates"))
    cuda = [t.name for t in TARGETS.values() if t.kind == "cuda"]
    require(targets or (), cuda, "CUDA target")
    declared = load_catalogs((KILN,))[op]
    found = []
    for target in targets or cuda:
        tables = tuned.tables(known[op], declared, tuned.database(op, target, database))
        for group, table in tables.items():
            found += [{"target": target, "group": group, **row} for row in _rows(table)]
    return found


def _rows(table: tuned.Table) -> Iterator[dict[str, Any]]:
    for chosen in (table.shapes, table.rows):
        for shape, choice in chosen.items():
            yield {"call": text(shape), "basis": table.basis, **choice_json(choice)}


def text(shape: Shape) -> str:
    """A call as people write it: "M=16 N=4096 K=4096"."""
    order = {"M": 0, "N": 1}
    return " ".join(f"{d}={n}" for d, n in sorted(shape, key=lambda p: (order.get(p[0], 2), p[0])))


def choice_json(choice: Choice) -> Mapping[str, Any]:
    """A choice as JSON; no runner-up has no margin."""
    margin = None if math.isinf(choice.margin) else round(choice.margin, 3)
    return {"candidate": choice.candidate, "runner_up": choice.runner_up, "margin": margin}


def samples(op: str, target: str, candidate: str, dims: Mapping[str, int]) -> list[str]:
    """Sentences on what the database has of a call: the measured extent that decides it, and the times
    there."""
    known = own_candidates().get(op)
    if known is None:
        return []
    declared = load_catalogs((KILN,))[op]
    for group, table in tuned.tables(known, declared, tuned.database(op, target)).items():
        if candidate not in table.candidates or not table.shapes:
            continue
        found = _deciding(table, dims)
        if found is None:
            return [f"no shape of these sizes was measured in group {group}: ranges of {table.along} decide"]
        shape, choice = found
        return [f"measured at {text(shape)}: {choice.candidate} {versus(choice)}"]
    return []


def versus(choice: Choice) -> str:
    """How a chosen candidate compares with its runner-up, which may be the faster one of a tie."""
    if choice.runner_up is None:
        return "alone"
    if choice.margin < 1:
        return f"in a tie with {choice.runner_up}, {1 / choice.margin - 1:.1%} behind; it serves more calls"
    return f"over {choice.runner_up} by {choice.margin - 1:.1%}"


def _deciding(table: tuned.Table, dims: Mapping[str, int]) -> tuple[Shape, Choice] | None:
    """The measured call whose choice a call takes: of its other sizes, the next extent above, or the last."""
    alike = {
        dict(shape)[table.along]: (shape, choice)
        for shape, choice in table.shapes.items()
        if all(dims[d] == n for d, n in shape if d != table.along)
    }
    above = [extent for extent in sorted(alike) if extent >= dims[table.along]]
    return alike[above[0] if above else max(alike)] if alike else None
