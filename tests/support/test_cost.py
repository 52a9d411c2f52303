"""Costs are told apart by what is calculated, not by how long it takes here."""

import pytest

from kiln.tests.support.cost import TRIES, check_cost, yardstick


def several(count: int) -> None:
    for _ in range(count):
        yardstick()


def test_a_cheap_call_passes() -> None:
    check_cost(lambda: several(3), 30)


def test_a_dear_call_is_found() -> None:
    with pytest.raises(AssertionError, match="yardsticks, expected at most 3"):
        check_cost(lambda: several(30), 3)


def test_a_call_that_met_others_is_tried_again() -> None:
    counts = [30, 1]
    check_cost(lambda: several(counts.pop(0)), 10)
    assert counts == []


def test_it_is_not_tried_for_ever() -> None:
    tries: list[int] = []

    def dear() -> None:
        tries.append(1)
        several(10)

    with pytest.raises(AssertionError):
        check_cost(dear, 0.1)
    assert len(tries) == TRIES
