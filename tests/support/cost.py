"""What calls may cost, on any machine: CPU time in units of a fixed calculation."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import process_time

TRIES = 3


def yardstick() -> float:
    """Seconds of CPU time that a fixed calculation takes now: 0.02 on a CPU of 2023, more on a slow or shared
    one."""
    began = process_time()
    seen: dict[int, int] = {}
    for i in range(100_000):
        seen[i % 1000] = seen.get(i * 7919 % 1000, 0) + i
    return process_time() - began


def check_cost(call: Callable[[], object], most: float) -> None:
    """Fail if a call takes more than so many yardsticks each time of a few: once, it may have met others."""
    least = inf
    for _ in range(TRIES):
        before = yardstick()
        began = process_time()
        call()
        spent = process_time() - began
        least = min(least, spent / max(before, yardstick()))
        if least <= most:
            return
    raise AssertionError(f"took {least:.1f} yardsticks, expected at most {most}")
