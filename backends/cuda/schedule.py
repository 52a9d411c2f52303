"""Schedules of generated row kernels: tile, warps, and what a launch may assume. One table for every expressible op and recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kiln.ir.spec import Op, Ship

ELEMENTWISE_BLOCK = 1024
GENERAL = 8192
"""Tile of the kernel that serves widths nobody named and unaligned operands. Wider rows need a named width, at most 16384."""


@dataclass(frozen=True)
class Schedule:
    """One kernel's constants."""

    block: int
    """P: columns of a tile, a power of two."""
    rows: int
    """R: rows of a tile."""
    warps: int
    hinted: bool
    """Whether addresses, widths and strides are multiples of 16 (16-byte accesses)."""
    mode: Literal["exact", "fast"] = "exact"
    width: int | None = None
    """N as a constant: the compiler then drops the part of the tile beyond the row (5120 in a tile of 8192: 0.88 -> 0.95 of the limit)."""

    @property
    def name(self) -> str:
        """Part of the variant's name."""
        parts = [f"p{self.block}" if self.width is None else f"n{self.width}"]
        if not self.hinted:
            parts.append("unaligned")
        if self.mode == "fast":
            parts.append("fast")
        return "_".join(parts)


ROW_TILES = {128: (8, 4), 256: (4, 4), 512: (2, 4), 1024: (1, 4), 2048: (1, 4), 4096: (1, 8), 8192: (1, 8), 16384: (1, 16)}
"""P -> (rows, warps) of kernels that hold whole rows."""


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, (n - 1).bit_length())


def row_schedule(width: int | None, hinted: bool = True, mode: Literal["exact", "fast"] = "exact") -> Schedule:
    """The schedule that holds whole rows of a named width, or of any up to GENERAL."""
    block = max(128, next_power_of_two(width or GENERAL))
    rows, warps = ROW_TILES[block] if hinted else (1, 16)
    return Schedule(block, rows, warps, hinted, mode, width)


def schedules(op: Op, ship: Ship, whole_rows: bool, first: bool) -> Iterator[Schedule]:
    """Kernels to build for one specialization. The first one of an op also serves unaligned operands; a recipe leaves those to its ops."""
    general = first and not op.is_recipe
    for mode in ship.modes:
        for width in (ship.widths or (None,)) if whole_rows else ():
            yield row_schedule(width, mode=mode)
        if not whole_rows:
            yield Schedule(ELEMENTWISE_BLOCK, 1, 4, hinted=True, mode=mode)
    if general and whole_rows:
        yield row_schedule(None, hinted=False)
    elif general:
        yield Schedule(ELEMENTWISE_BLOCK, 1, 4, hinted=False)
