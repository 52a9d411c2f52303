"""From the costs of candidates to the predicates that choose among them: one pure rule, the same everywhere.

Of each call the cheapest candidate would do; those within `NEAR` of it count as equal, and a greedy cover
then takes the candidate that serves most calls first (ties by name), so that few kernels are shipped and
noise moves no choice. Along the ranged dimension a call takes the next measured point above it, and the last
beyond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.compiler.tuning import Database, Shape, shape_key

NEAR = 1.02
"""Times up to this factor above the best are ties: medians of two runs differ by about 1 % on an H200."""

MISSING = 4.0
"""What a candidate that was not timed on a call counts as, over the best, where calls are averaged."""

Costs = Mapping[str, float]
"""Candidate -> relative or absolute time."""


@dataclass(frozen=True)
class Choice:
    """What runs a call, and what it was chosen over."""

    candidate: str
    runner_up: str | None
    """The next cheapest candidate; None if there was no other."""
    margin: float
    """The runner-up's time over the chosen one's; below 1 where a tie went to the candidate that serves more
    calls."""


@dataclass(frozen=True, order=True)
class Range:
    """Calls whose ranged dimension is above `above` and, unless it is None, at most `most`."""

    above: int
    most: int | None
    candidate: str


def cover(points: Mapping[Shape, Costs]) -> dict[Shape, Choice]:
    """The candidate of every call, by the module's rule; calls without costs are left out."""
    good = {
        shape: frozenset(c for c, cost in costs.items() if cost <= NEAR * min(costs.values()))
        for shape, costs in points.items()
        if costs
    }
    chosen: dict[Shape, str] = {}
    while open_ := [s for s in good if s not in chosen]:
        counts: dict[str, int] = {}
        for shape in open_:
            for name in good[shape]:
                counts[name] = counts.get(name, 0) + 1
        best = min(counts, key=lambda n: (-counts[n], n))
        chosen |= {shape: best for shape in open_ if best in good[shape]}
    return {shape: _choice(points[shape], chosen[shape]) for shape in sorted(chosen)}


def _choice(costs: Costs, candidate: str) -> Choice:
    others = sorted((cost, name) for name, cost in costs.items() if name != candidate)
    if not others:
        return Choice(candidate, None, math.inf)
    cost, runner_up = others[0]
    return Choice(candidate, runner_up, cost / costs[candidate])


def ranges(points: Mapping[int, str]) -> tuple[Range, ...]:
    """The choice at each measured extent as ranges that cover every extent from 0 up."""
    found: list[Range] = []
    above = -1
    extents = sorted(points)
    for i, extent in enumerate(extents):
        most = None if i + 1 == len(extents) else extent
        if found and found[-1].candidate == points[extent]:
            found[-1] = Range(found[-1].above, most, points[extent])
        else:
            found.append(Range(above, most, points[extent]))
        above = extent
    return tuple(found)


def costs_of(database: Database, group: str, legal: Iterable[str]) -> dict[Shape, Costs]:
    """What the database knows of a group's calls: time over the best of the device's.

    Where several devices of the target measured a call, the geometric mean over them of candidates that all
    of them timed.
    """
    names = frozenset(legal)
    by_device: dict[Shape, dict[str, dict[str, float]]] = {}
    for run in database.runs:
        for row in run.rows:
            if row.group == group:
                times = {n: row.times[n].us for n in names & row.times.keys()}
                by_device.setdefault(shape_key(row.shape), {}).setdefault(run.device, {}).update(times)
    return {shape: found for shape, devices in by_device.items() if (found := _mean(list(devices.values())))}


def _mean(devices: Sequence[Mapping[str, float]]) -> Costs:
    common = frozenset.intersection(*(frozenset(times) for times in devices))
    count = len(devices)
    logs = {n: sum([math.log(times[n]) for times in devices]) / count for n in common}
    least = min(logs.values(), default=0.0)
    # Rounded, so that the last bit of a machine's exp moves no choice.
    return {n: round(math.exp(logs[n] - least), 6) for n in sorted(common)}


def over_shapes(points: Mapping[Shape, Costs], along: str) -> dict[Shape, Costs]:
    """One point for each extent of the ranged dimension: the geometric mean, over all other dimensions, of a
    candidate's cost over the best. Where a candidate has no cost it counts as `MISSING`."""
    by_extent: dict[int, list[Costs]] = {}
    for shape, costs in points.items():
        least = min(costs.values())
        by_extent.setdefault(dict(shape)[along], []).append({n: c / least for n, c in costs.items()})
    return {((along, extent),): _filled_mean(found) for extent, found in sorted(by_extent.items())}


def _filled_mean(found: Sequence[Costs]) -> Costs:
    names = sorted({name for costs in found for name in costs})
    return _mean([{name: costs.get(name, MISSING) for name in names} for costs in found])


def rows_of(choices: Mapping[Shape, Choice], along: str) -> dict[Shape, tuple[Range, ...]]:
    """For every combination of the other dimensions the ranges along the ranged one."""
    points: dict[Shape, dict[int, str]] = {}
    for shape, choice in choices.items():
        rest = tuple((d, n) for d, n in shape if d != along)
        points.setdefault(rest, {})[dict(shape)[along]] = choice.candidate
    return {rest: ranges(found) for rest, found in sorted(points.items())}


def predicate(rows: Mapping[Shape, Sequence[Range]], candidate: str, along: str) -> Any:
    """Where the candidate is chosen, as a predicate of the manifest; None if nowhere.

    Terms are nested by dimension, first the one with most values: a call that is not among them is refused by
    one comparison for each of those.
    """
    terms: dict[Shape, Any] = {}
    for rest, found in rows.items():
        tests = [_range_test(r, along) for r in found if r.candidate == candidate]
        if tests:
            terms[rest] = _any(tests)
    if not terms:
        return None
    order = sorted(
        {d for rest in terms for d, _ in rest},
        key=lambda d: (-len({n for rest in terms for e, n in rest if e == d}), d),
    )
    return _nested(terms, order)


def _nested(terms: Mapping[Shape, Any], order: Sequence[str]) -> Any:
    if not order:
        return _any(list(terms.values()))
    dim, *others = order
    by_extent: dict[int, dict[Shape, Any]] = {}
    for rest, test in terms.items():
        by_extent.setdefault(dict(rest)[dim], {})[rest] = test
    return _any(
        [
            _all([["eq", ["dim", dim], extent], _nested(inner, others)])
            for extent, inner in sorted(by_extent.items())
        ]
    )


def _range_test(r: Range, along: str) -> Any:
    tests: list[Any] = [["gt", ["dim", along], r.above]] if r.above >= 0 else []
    tests += [["le", ["dim", along], r.most]] if r.most is not None else []
    return _all(tests)


def _all(tests: Sequence[Any]) -> Any:
    flat = [t for test in tests if test is not True for t in (test[1:] if test[0] == "and" else [test])]
    return True if not flat else flat[0] if len(flat) == 1 else ["and", *flat]


def _any(tests: Sequence[Any]) -> Any:
    if True in tests:
        return True
    return tests[0] if len(tests) == 1 else ["or", *tests]


def both(a: Any, b: Any) -> Any:
    """The conjunction of two predicates, flat."""
    return _all([a, b])
