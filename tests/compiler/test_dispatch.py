"""The rule that turns costs into dispatch: ties, cover, ranges, and predicates that choose what the rule says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.compiler.dispatch import (
    MISSING,
    Choice,
    Range,
    both,
    costs_of,
    cover,
    over_shapes,
    predicate,
    ranges,
    rows_of,
)
from kiln.compiler.tuning import Database, Row, Run, Shape, Time
from kiln.runtime.expr import Env, parse_pred, why_not


def call(m: int, n: int = 64, k: int = 32) -> Shape:
    return (("K", k), ("M", m), ("N", n))


def chosen(points: dict[Shape, dict[str, float]]) -> dict[int, str]:
    return {dict(shape)["M"]: choice.candidate for shape, choice in cover(points).items()}


def test_the_fastest_wins_with_its_runner_up_and_margin() -> None:
    found = cover({call(1): {"a": 10.0, "b": 12.0, "c": 15.0}})
    assert found == {call(1): Choice("a", "b", 1.2)}


def test_a_tie_goes_to_the_candidate_that_serves_more_calls() -> None:
    points = {call(1): {"a": 10.0, "b": 10.1}, call(2): {"a": 30.0, "b": 20.0}, call(4): {"a": 9.0, "b": 20.0}}
    assert chosen(points) == {1: "b", 2: "b", 4: "a"} or chosen(points) == {1: "a", 2: "b", 4: "a"}
    more = points | {call(8): {"a": 50.0, "b": 20.0}}
    assert chosen(more) == {1: "b", 2: "b", 4: "a", 8: "b"}
    assert cover(more)[call(1)] == Choice("b", "a", 10.0 / 10.1)


def test_a_tie_of_equals_goes_by_name() -> None:
    assert chosen({call(1): {"b": 10.0, "a": 10.1}}) == {1: "a"}


@pytest.mark.parametrize(("cost", "winner"), [(10.2, "b"), (10.21, "a")])
def test_two_percent_is_near(cost: float, winner: str) -> None:
    points = {call(1): {"a": 10.0, "b": cost}, call(2): {"a": 9.0, "b": 1.0}, call(4): {"a": 9.0, "b": 1.0}}
    assert chosen(points)[1] == winner


def test_a_candidate_alone_has_no_runner_up() -> None:
    choice = cover({call(1): {"a": 3.0}, call(2): {}})
    assert list(choice) == [call(1)]
    assert (choice[call(1)].runner_up, choice[call(1)].margin) == (None, float("inf"))


def test_extents_between_take_the_next_above_and_beyond_the_last() -> None:
    assert ranges({1: "a", 4: "a", 16: "b", 64: "a"}) == (
        Range(-1, 4, "a"),
        Range(4, 16, "b"),
        Range(16, None, "a"),
    )
    assert ranges({8: "a"}) == (Range(-1, None, "a"),)
    assert ranges({}) == ()


def test_the_mean_over_shapes_counts_what_is_missing() -> None:
    points = {call(8, 64): {"a": 1.0, "b": 2.0}, call(8, 128): {"a": 3.0}}
    found = over_shapes(points, "M")[("M", 8),]
    assert found["a"] == 1.0
    assert found["b"] == pytest.approx((2.0 * MISSING) ** 0.5)


def run_on(device: str, date: str, times: dict[str, float], group: str = "g") -> Run:
    row = Row(group, {"M": 1, "N": 64, "K": 32}, {n: Time(t, 0.1) for n, t in times.items()})
    return Run(device, "1", "c", "p", date, dict.fromkeys(times, "0" * 64), (row,))


def test_costs_are_relative_and_a_mean_over_devices() -> None:
    runs = (
        run_on("one", "2026-01-01T00:00:00Z", {"a": 2.0, "b": 4.0, "gone": 1.0}),
        run_on("two", "2026-01-01T00:00:00Z", {"a": 8.0, "b": 4.0, "late": 1.0}),
    )
    found = costs_of(Database("op", "t", runs), "g", ["a", "b", "late"])
    assert found == {call(1): {"a": 1.0, "b": 1.0}}
    assert costs_of(Database("op", "t", runs), "other", ["a"]) == {}


def test_a_newer_run_of_a_device_counts() -> None:
    runs = (
        run_on("one", "2026-01-01T00:00:00Z", {"a": 2.0, "b": 4.0}),
        run_on("one", "2026-01-02T00:00:00Z", {"a": 8.0}),
    )
    assert costs_of(Database("op", "t", runs), "g", ["a", "b"]) == {call(1): {"a": 2.0, "b": 1.0}}


def holds(pred: Any, m: int, n: int, k: int) -> bool:
    env = Env()
    env.dims = {"M": m, "N": n, "K": k}
    return why_not(parse_pred(pred), env) is None


NAMES = ("a", "b", "c")
SIZES = ((64, 32), (64, 48), (128, 32), (256, 256))
EXTENTS = (1, 2, 8, 64)
COSTS = st.fixed_dictionaries(
    {}, optional={name: st.floats(1.0, 2.0).map(lambda v: round(v, 2)) for name in NAMES}
)


@settings(max_examples=60, deadline=None)
@given(st.lists(COSTS, min_size=len(SIZES) * len(EXTENTS), max_size=len(SIZES) * len(EXTENTS)))
def test_predicates_choose_what_the_rule_says(costs: list[dict[str, float]]) -> None:
    calls = [call(m, n, k) for m, (n, k) in itertools.product(EXTENTS, SIZES)]
    points = dict(zip(calls, costs, strict=True))
    choices = cover(points)
    rows = rows_of(choices, "M")
    preds = {name: predicate(rows, name, "M") for name in NAMES}
    for n, k in (*SIZES, (64, 256), (1, 1)):
        measured = sorted(dict(s)["M"] for s in choices if (dict(s)["N"], dict(s)["K"]) == (n, k))
        for m in (0, 1, 2, 3, 8, 9, 63, 64, 65, 10**6):
            taken = [name for name, pred in preds.items() if pred is not None and holds(pred, m, n, k)]
            if not measured:
                assert taken == []
                continue
            above = next((e for e in measured if e >= m), measured[-1])
            assert taken == [choices[call(above, n, k)].candidate]


def test_conjunctions_are_flat() -> None:
    a, b = ["le", ["dim", "M"], 4], ["gt", ["dim", "M"], 1]
    assert both(["and", ["dtype", "x", "bf16"], a], b) == ["and", ["dtype", "x", "bf16"], a, b]
    assert both(True, b) == b
    assert both(True, True) is True
