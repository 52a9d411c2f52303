"""`once` and `record`: equal values are read once, and nothing but equal values counts as equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kiln.runtime import fields
from kiln.runtime.fields import Mismatch, array, integer, once


class Counted:
    """A reader that gives back what it got, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> list[Any]:
        self.calls += 1
        return [value]


def test_equal_values_are_read_once() -> None:
    inner = Counted()
    reader = once(inner)
    first = reader({"a": [1, "x", None]})
    assert reader({"a": [1, "x", None]}) is first
    assert inner.calls == 1


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0, False), (0.0, -0.0), ([1], (1,)), ("1", 1)]
)
def test_values_that_only_compare_equal_are_read_apart(one: Any, other: Any) -> None:
    reader = once(Counted())
    (found,), (there,) = reader(one), reader(other)
    assert repr((found, there)) == repr((one, other))


def test_what_is_refused_is_refused_again() -> None:
    reader = once(array(integer(0, 9), 3))
    for _ in range(2):
        with pytest.raises(Mismatch, match="an integer from 0 to 9") as refused:
            reader([1, 10])
        assert refused.value.pointer == "/1"
    assert reader([1, 9]) == (1, 9)


@pytest.mark.parametrize("make", [lambda: "x" * (fields._REMEMBERED + 1), object])
def test_big_and_strange_values_are_not_remembered(make: Callable[[], Any]) -> None:
    inner, value = Counted(), make()
    reader = once(inner)
    assert reader(value) == reader(value) == [value]
    assert inner.calls == 2


def test_only_so_many_are_remembered() -> None:
    inner = Counted()
    reader = once(inner, most=2)
    for value in (1, 2, 1, 2, 3, 3, 1):
        assert reader(value) == [value]
    assert inner.calls == 4  # 3 made room for itself
