"""Which hand-scheduled candidates a target ships, and for which calls: the tuning database turned into rows.

A variants file exports `CANDIDATES`, whose `when` says only what each kernel needs, and `DEFAULTS`, names of
candidates in the order in which calls that nothing else takes try them. A shipped candidate has up to three
manifest entries of one cubin: `NAME.shapes` for the calls it was measured best on, `NAME.rows` for ranges of
rows of every other shape, and `NAME` for whatever its needs admit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import kiln.backends.cuda as here
from kiln.backends.cuda.cost_model import modelled, operand_types
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.compiler.dispatch import (
    Choice,
    Costs,
    Range,
    both,
    costs_of,
    cover,
    over_shapes,
    predicate,
    rows_of,
)
from kiln.compiler.target import TARGETS
from kiln.compiler.tuning import MAX_BYTES, Database, Shape, group_of, parse_database
from kiln.ir.spec import Op
from kiln.recipes.tuning import SPACES, Space
from kiln.runtime.errors import SchemaError

Basis = Literal["measured", "stale", "model", "default"]
"""What a choice rests on: samples of the target, samples of a kernel that has changed since, the declared
cost model, or the table's own order."""

PRIORITY: Mapping[str, int] = {"shapes": 3000, "rows": 2000, "default": 1000, "other": 0}
"""Of a candidate's entries; defaults count down from theirs."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of one op, of which a target ships those that some call takes."""

    rows: tuple[CudaPrimitive, ...] = ()
    defaults: tuple[str, ...] = ()
    """Names, in the order in which calls that nothing else takes try them."""
    general: frozenset[str] = frozenset()
    """Of the defaults, those that ship where nothing was measured: each kernel is 20 KB in each tree, and
    guesses are not worth that."""


@dataclass(frozen=True)
class Entry:
    """One manifest entry of a shipped candidate."""

    variant: str
    when: Any
    priority: int
    tuned: Basis

    def selection(self) -> dict[str, Any]:
        """The manifest fields that it sets."""
        return {
            "variant": self.variant, "when": self.when, "priority": self.priority, "tuned": self.tuned,
        }  # fmt: skip


@dataclass(frozen=True)
class Shipped:
    """A candidate that a target ships."""

    row: CudaPrimitive
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """Everything that dispatch of one group of calls on one target rests on."""

    candidates: Mapping[str, CudaPrimitive]
    basis: Basis
    along: str
    """The ranged dimension."""
    shapes: Mapping[Shape, Choice]
    """Calls that were measured; none where the basis is the model."""
    rows: Mapping[Shape, Choice]
    """Of every other shape, by extent of the ranged dimension alone."""

    @property
    def chosen(self) -> frozenset[str]:
        """Candidates that some call takes."""
        return frozenset(c.candidate for c in (*self.shapes.values(), *self.rows.values()))


def folder() -> Path:
    """Where the databases lie."""
    return Path(next(iter(here.__path__))) / "tuning"


def database(op: str, target: str, where: Path | None = None) -> Database:
    """What was measured of an op on a target; nothing where there is no file.

    Raises:
        SchemaError: the file is not of the schema, or is another op's or target's.
    """
    path = (where or folder()) / f"{op}.{target}.json"
    if not path.is_file():
        return Database(op, target)
    return _read(path, path.stat().st_mtime_ns, op, target)


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, op: str, target: str) -> Database:
    with path.open("rb") as file:
        found = parse_database(file.read(MAX_BYTES + 1), str(path))
    if (found.op, found.target) != (op, target):
        raise SchemaError(f"{path}: samples of {found.op} on {found.target}; the file's name says otherwise.")
    return found


def group(row: CudaPrimitive) -> str:
    """The group of calls a candidate competes in: types of its operands, and attributes that it asks for."""
    return group_of(operand_types(row), attrs_of(row))


def attrs_of(row: CudaPrimitive) -> dict[str, bool | int | str]:
    """Attributes that a candidate asks for."""
    tests = row.when[1:] if isinstance(row.when, list) else ()
    return {p[1]: p[2] for p in tests if p[0] == "attr"}


def legal(candidates: Iterable[CudaPrimitive], target: str) -> tuple[CudaPrimitive, ...]:
    """Those that a target can have."""
    return tuple(c for c in candidates if c.min_sm <= TARGETS[target].capability <= c.max_sm)


def tables(own: Candidates, op: Op, known: Database) -> dict[str, Table]:
    """By group: what is chosen among an op's candidates on the database's target."""
    groups: dict[str, dict[str, CudaPrimitive]] = {}
    for row in legal(own.rows, known.target):
        groups.setdefault(group(row), {})[row.variant] = row
    return {name: _table(name, rows, own, op, known) for name, rows in sorted(groups.items())}


def _table(name: str, rows: Mapping[str, CudaPrimitive], own: Candidates, op: Op, known: Database) -> Table:
    points: Mapping[Shape, Costs] = costs_of(known, name, rows)
    if points:
        return Table(rows, "measured", op.rows, cover(points), cover(over_shapes(points, op.rows)))
    space = SPACES.get(op.name, Space())
    rows = {name: row for name, row in rows.items() if name in own.general}
    points = modelled(rows.values(), op, space.outline(), space.derived, TARGETS[known.target])
    return Table(rows, "model", op.rows, {}, cover(over_shapes(points, op.rows)))


def shipped(own: Candidates, op: Op, known: Database, old: Collection[str] = ()) -> tuple[Shipped, ...]:
    """The candidates that a target ships: those chosen somewhere, and the defaults.

    Args:
        own: the op's.
        op: the op.
        known: what was measured.
        old: candidates whose samples are stale: the choice stands, and is marked.
    """
    found: list[Shipped] = []
    for table in tables(own, op, known).values():
        ranked = [n for n in own.defaults if n in table.candidates]
        ranges = {
            "shapes": rows_of(table.shapes, table.along),
            "rows": rows_of(table.rows, table.along),
        }
        for name in sorted(table.chosen | set(ranked)):
            row = table.candidates[name]
            basis = "stale" if table.basis == "measured" and name in old else table.basis
            found.append(Shipped(row, tuple(_entries(row, table.along, ranges, ranked, basis))))
    return tuple(found)


def _entries(
    row: CudaPrimitive,
    along: str,
    ranges: Mapping[str, Mapping[Shape, Sequence[Range]]],
    ranked: Sequence[str],
    basis: Basis,
) -> Iterator[Entry]:
    for kind, rows in ranges.items():
        where = predicate(rows, row.variant, along)
        if where is not None:
            yield Entry(f"{row.variant}.{kind}", both(row.when, where), PRIORITY[kind], basis)
    if row.variant in ranked:
        yield Entry(row.variant, row.when, PRIORITY["default"] - ranked.index(row.variant), "default")
    else:
        yield Entry(row.variant, row.when, PRIORITY["other"], "default")


def stale(known: Database, now: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(candidate, sentence) for samples whose kernel is gone or was made of other inputs.

    Args:
        known: the samples.
        now: inputs digest of every candidate.
    """
    newest: dict[str, tuple[str, str]] = {}
    for run in known.runs:
        for name in {n for row in run.rows for n in row.times}:
            newest[name] = max(newest.get(name, ("", "")), (run.date, run.candidates[name]))
    for name, (date, digest) in sorted(newest.items()):
        if name not in now:
            yield name, f"It was measured on {date}, but is no candidate any more; measure the op again."
        elif now[name] != digest:
            yield (
                name,
                (
                    f"It was measured on {date} with inputs {digest[:12]}, which are {now[name][:12]} now; "
                    "measure the op again with kiln tune."
                ),
            )
