"""What `kiln explain` says of a choice that measurement made."""

from __future__ import annotations

import math

import pytest

from kiln.compiler.dispatch import Choice
from kiln.tools.tune_show import versus


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice("a", None, math.inf), "alone"),
        (Choice("a", "b", 1.25), "over b by 25.0%"),
        (Choice("a", "b", 1.0), "over b by 0.0%"),
        (Choice("a", "b", 0.99), "in a tie with b, 1.0% behind; it serves more calls"),
    ],
)
def test_a_choice_and_its_runner_up(choice: Choice, said: str) -> None:
    assert versus(choice) == said
