"""The tuning database: what was measured of an op's candidates on a target, as canonical JSON in the
repository.

A run is one measurement on one device; its rows hold the times of all candidates that were timed on one call.
Merging is a set union in which the newest sample of a (device, group, shape, candidate) stays, so that the
order in which runs are accepted never shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from kiln.runtime.fields import (
    Mismatch,
    Reader,
    array,
    choice,
    integer,
    mapping,
    number,
    read,
    record,
    text,
)
from kiln.runtime.manifest import canonical_json
from kiln.runtime.strictjson import parse

SCHEMA = 1
MAX_BYTES = 64 << 20
MAX_US = 1e12
"""The longest time of a call: 12 days."""


class Time(NamedTuple):
    """One candidate on one call: median and spread in microseconds."""

    us: float
    spread_us: float


@dataclass(frozen=True)
class Row:
    """One call and the times of the candidates on it; only those whose numbers were checked are timed."""

    group: str
    """Types (and attributes) of the call, as `group_of` writes them: candidates compete within a group."""
    shape: Mapping[str, int]
    """Extent of every dimension."""
    times: Mapping[str, Time]


@dataclass(frozen=True)
class Run:
    """One measurement."""

    device: str
    driver: str
    clocks: str
    """What the device said of its clocks, such as "sm 1980 MHz, memory 3201 MHz"."""
    assembler: str
    date: str
    """UTC, as 2026-01-31T12:00:00Z."""
    candidates: Mapping[str, str]
    """Candidate -> inputs digest of the kernel that ran."""
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Database:
    """Everything measured of an op on a target."""

    op: str
    target: str
    runs: tuple[Run, ...] = ()


def _times(value: Any) -> Time:
    if type(value) is not list or len(value) != 2:
        raise Mismatch("a median and a spread in microseconds", value)
    us, spread = value
    if type(us) is not float or type(spread) is not float:  # few are not
        us, spread = number(us), number(spread)
    # A samples file is plain JSON lines, in which Python reads NaN, Infinity and integers of any length.
    if not (0 < us <= MAX_US and 0 <= spread <= MAX_US):
        raise Mismatch("a positive median and a spread that is not negative, of finite numbers", value)
    return Time(float(us), float(spread))


def _row(checked: bool, group: str, shape: dict[str, int], times: dict[str, Time]) -> Row:
    return Row(group, shape, times)


def _true(value: Any) -> bool:
    if value is not True:
        raise Mismatch("true: only candidates whose numbers were checked may be timed", value)
    return True


_NAME = text(r"[a-z0-9_][a-z0-9_.+-]*", "a variant name")
_LABEL = text(r"[^\x00-\x1f\x7f]+", "a printable text")
_DATE = text(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "a date as 2026-01-31T12:00:00Z")
_DIGEST = text(r"[0-9a-f]{64}", "a SHA-256 digest of 64 lower-case hex digits")
_IDENT = text(r"[A-Za-z_][A-Za-z0-9_]*", "an identifier")
_ROW: Reader[Row] = record(
    _row,
    {
        "checked": _true,
        "group": _LABEL,
        "shape": mapping(_IDENT, integer(0, 2**31 - 1), 16),
        "times": mapping(_NAME, _times, 4096),
    },
)
_RUN: Reader[Run] = record(
    Run,
    {
        "device": _LABEL,
        "driver": _LABEL,
        "clocks": _LABEL,
        "assembler": _LABEL,
        "date": _DATE,
        "candidates": mapping(_NAME, _DIGEST, 4096),
        "rows": array(_ROW, 100_000, 1),
    },
)


def _database(schema: int, op: str, target: str, runs: tuple[Run, ...]) -> Database:
    for run in runs:
        for row in run.rows:
            stray = sorted(row.times.keys() - run.candidates.keys())
            if stray:
                raise Mismatch("times of the run's own candidates", stray[0])
    return Database(op, target, runs)


_DATABASE: Reader[Database] = record(
    _database,
    {"schema": choice(SCHEMA), "op": _IDENT, "target": _LABEL, "runs": array(_RUN, 1000)},
)


def parse_database(data: bytes, what: str) -> Database:
    """The database in `data`.

    Raises:
        SchemaError: not strict JSON of this schema, or times of a candidate that its run does not list.
    """
    return read(_DATABASE, parse(data, what, MAX_BYTES), what)


def parse_run(value: Any, what: str) -> Run:
    """One run, as a samples file holds it; SchemaError names what is wrong."""
    run = read(_RUN, value, what)
    read(lambda runs: _database(SCHEMA, "op", "target", runs), (run,), what)
    return run


def database_bytes(database: Database) -> bytes:
    """The canonical document."""
    runs = [run_json(run) for run in database.runs]
    return canonical_json({"schema": SCHEMA, "op": database.op, "target": database.target, "runs": runs})


def run_json(run: Run) -> dict[str, Any]:
    """A run as JSON."""
    return {**asdict(run), "rows": [_row_json(row) for row in run.rows]}


def _row_json(row: Row) -> dict[str, Any]:
    times = {name: [t.us, t.spread_us] for name, t in row.times.items()}
    return {"checked": True, "group": row.group, "shape": dict(row.shape), "times": times}


def group_of(types: Mapping[str, str], attrs: Mapping[str, object]) -> str:
    """The group of calls with these operand types and attributes: "out=bf16 weight=bf16 x=bf16"."""
    return " ".join(f"{k}={v}" for k, v in sorted({**types, **attrs}.items()))


Shape = tuple[tuple[str, int], ...]


def shape_key(shape: Mapping[str, int]) -> Shape:
    """A shape as a key, by dimension name."""
    return tuple(sorted(shape.items()))


def merged(database: Database, more: Iterable[Run]) -> Database:
    """With further runs: of each (device, group, shape, candidate) only the newest sample stays.

    A run keeps its list of candidates whole, so that accepting it again changes nothing.
    """
    heads: dict[bytes, Run] = {}
    newest: dict[tuple[str, str, Shape, str], tuple[str, bytes, float, float]] = {}
    for run in (*database.runs, *more):
        head = canonical_json(run_json(replace(run, rows=())))
        heads[head] = run
        for row in run.rows:
            for name, time in row.times.items():
                key = (run.device, row.group, shape_key(row.shape), name)
                sample = (run.date, head, time.us, time.spread_us)
                newest[key] = max(newest.get(key, sample), sample)
    calls: dict[bytes, dict[tuple[str, Shape], dict[str, Time]]] = {}
    for (_, group, shape, name), (_, head, us, spread) in sorted(newest.items()):
        calls.setdefault(head, {}).setdefault((group, shape), {})[name] = Time(us, spread)
    runs = (replace(heads[head], rows=_rows(calls[head])) for head in sorted(calls))
    return Database(database.op, database.target, tuple(sorted(runs, key=lambda r: (r.date, r.device))))


def _rows(calls: Mapping[tuple[str, Shape], Mapping[str, Time]]) -> tuple[Row, ...]:
    return tuple(Row(group, dict(shape), times) for (group, shape), times in sorted(calls.items()))
