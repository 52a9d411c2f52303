"""Triton's own launcher, to be timed beside others: three pointers and a length, one program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton
import triton.language as tl

WIDTH = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, y, out, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def ways(torch: Any, where: str) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Launches through Triton, from a grid and from one that is bound."""
    x, y, out = (torch.zeros(WIDTH, device=where) for _ in range(3))
    grid = _add[(1,)]
    yield "Triton's launcher", lambda: _add[(1,)](x, y, out, WIDTH, WIDTH=WIDTH), 1
    yield "Triton's launcher, grid bound", lambda: grid(x, y, out, WIDTH, WIDTH=WIDTH), 1
