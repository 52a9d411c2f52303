"""Schedules of generated row kernels: tile, warps, and what a launch may assume. One table for every
expressible op and recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kiln.ir.record import record, reduces_rows
from kiln.ir.signature import resolve, row_kind
from kiln.ir.spec import ANY, Op, Ship, Tensor

GENERAL = 8192
"""Tile of the kernel that serves widths nobody named and unaligned operands. Wider rows need a named
width, at most 16384.
"""


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
    most_rows: int | None = None
    """Only for calls of at most so many rows."""
    width: int | None = None
    """N as a constant: the compiler then drops the part of the tile beyond the row (5120 in a tile of
    8192: 0.88 -> 0.95 of the limit).
    """

    @property
    def name(self) -> str:
        """Part of the variant's name."""
        parts = [f"p{self.block}" if self.width is None else f"n{self.width}"]
        if not self.hinted:
            parts.append("unaligned")
        if self.most_rows is not None:
            parts.append(f"m{self.most_rows}")
        if self.mode == "fast":
            parts.append("fast")
        return "_".join(parts)


ROW_TILES = {
    128: (8, 4),
    256: (4, 4),
    512: (2, 4),
    1024: (1, 4),
    2048: (1, 4),
    4096: (1, 4),
    8192: (1, 4),
    16384: (1, 8),
}
"""P -> (rows, warps) of kernels that hold whole rows. On an H200 at 16384x5120, 4 against 8 warps: rms_norm
0.96 / 0.88 of the copy bandwidth, per-token fp8 0.98 / 0.68, NVFP4 0.83 / 0.67."""
STREAMING_WARPS = 8
"""For rows over 4096 with two inputs and one reduction: static fp8 at 8192x7168 0.96 with 8 warps, 0.85
with 4.
"""
HEAD_TILES = {128: (32, 8), 256: (16, 8)}
"""Many short rows with much arithmetic: gated norm over 524288 heads of 128 0.91, with the tile above
0.85.
"""
LIGHT, HEAVY, WIDE, GROUPED, LONG, SMALL = (2048, 4), (1024, 1), (512, 1), (1024, 2), (1024, 4), (512, 4)
"""(P, warps) of kernels that cut rows, measured on an H200. Plain ones have 16 elements a thread, those bound
by arithmetic 32 (silu_mul 8192x7168: 1.00 of the copy bandwidth, with 8 elements 0.92), or 16 where a column
has so many bytes that half as many programs do not bind (silu_mul: 1.00 too, with half the code). Scales of
groups with two warps: 0.88 against 0.85. Few rows have 4 elements a thread: latency binds (silu_and_mul
64x5120 2.1 us against 2.5 with 8, gelu 16x4096 1.6 against 1.8)."""
WIDE_BYTES = 6
"""Bytes read and written a column from which WIDE pays. A device starts 1.6 programs a nanosecond: blocks of
512 columns of 2 and 1 bytes pass at 0.58 of the bandwidth, of 2 + 2 + 2 bytes at 1.00."""
FEW_ROWS = 512
FEW_HEADS = 16384
GENERAL_HEAVY_WARPS = 16
"""Code grows with the elements of a thread: softmax over 8192 columns 52 KB with 4 warps."""
HEAVY_FUNCTIONS = frozenset({"kiln.logistic", "kiln.to_e2m1", "kiln.pack_e2m1"})
"""Cheap enough to be worth 32 elements a thread."""
LONG_FUNCTIONS = frozenset({"math.exp", "math.tanh", "math.erf"})
"""So long that 32 copies of them would be 40 KB of code."""


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, (n - 1).bit_length())


@dataclass(frozen=True)
class Traits:
    """What a schedule depends on: read off a recorded body, never off an op's name."""

    whole_rows: bool
    reductions: int
    row_inputs: int
    heavy: bool
    long: bool
    grouped: bool
    """Whether groups of columns are reduced, and more than codes of four bits follow."""
    bytes: float
    """Read and written a column by operands that have rows."""


def traits_of(op: Op, ship: Ship) -> Traits:
    """Run the body in a recorder."""
    recorder, _ = record(op, ship.dtypes, ship.attrs, ship.absent, inline=True)
    names = [name for name, _ in recorder.operations]
    inputs = [t for t in op.inputs if t.name not in ship.absent and row_kind(op, t, ship.attrs).per_row]
    return Traits(
        reduces_rows(op, ship.dtypes, ship.attrs, ship.absent),
        names.count("linalg.reduce"),
        len(inputs),
        not HEAVY_FUNCTIONS.isdisjoint(names),
        not LONG_FUNCTIONS.isdisjoint(names),
        any(n == "linalg.reduce" and not s.is_scalar for n, s in recorder.operations)
        and "kiln.pack_e2m1" not in names,
        sum(_bytes(op, t, ship) for t in (*op.inputs, *op.outputs) if t.name not in ship.absent),
    )


def _bytes(op: Op, tensor: Tensor, ship: Ship) -> float:
    kind = row_kind(op, tensor, ship.attrs)
    if not kind.per_row or kind.table or kind.shape.fraction is None:
        return 0.0
    return float(kind.shape.fraction) * resolve(op, tensor, ship.dtypes).bytes


def row_schedules(
    traits: Traits, width: int | None, mode: Literal["exact", "fast"], latency: bool
) -> Iterator[Schedule]:
    """Kernels that hold whole rows of a named width, or of any up to GENERAL."""
    block = max(128, next_power_of_two(width or GENERAL))
    rows, warps = ROW_TILES[block]
    if traits.heavy and block in HEAD_TILES:
        yield Schedule(block, *HEAD_TILES[block], hinted=True, mode=mode, width=width)
        if latency:
            yield Schedule(block, rows, warps, hinted=True, mode=mode, width=width, most_rows=FEW_HEADS)
        return
    if block > 4096 and traits.row_inputs > 1 and traits.reductions == 1:
        warps = STREAMING_WARPS
    if traits.long and width is None:
        warps = GENERAL_HEAVY_WARPS
    yield Schedule(block, rows, warps, hinted=True, mode=mode, width=width)


def cut_schedules(traits: Traits, mode: Literal["exact", "fast"], latency: bool) -> Iterator[Schedule]:
    """Kernels that cut rows into blocks."""
    yield Schedule(*_cut(traits), hinted=True, mode=mode)
    if latency:
        block, warps = SMALL
        yield Schedule(block, 1, warps, hinted=True, mode=mode, most_rows=FEW_ROWS)


def _cut(traits: Traits) -> tuple[int, int, int]:
    if traits.long:
        block, warps = LONG
    elif traits.heavy and traits.grouped:
        block, warps = GROUPED
    elif traits.heavy:
        block, warps = WIDE if traits.bytes >= WIDE_BYTES else HEAVY
    else:
        block, warps = LIGHT
    return block, 1, warps


def schedules(op: Op, ship: Ship) -> Iterator[Schedule]:
    """Kernels to build for one specialization."""
    traits = traits_of(op, ship)
    for mode in ship.modes:
        latency = ship.latency and mode == "exact"
        if traits.whole_rows:
            for width in ship.widths or (ANY,):
                yield from row_schedules(traits, width or None, mode, latency)
        else:
            yield from cut_schedules(traits, mode, latency)
    if ship.unaligned:
        tile = (GENERAL, 1, 16) if traits.whole_rows else (1024, 1, 4)
        yield Schedule(*tile, hinted=False)
