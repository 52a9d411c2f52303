"""CUDA realizations of top_k_pairs: rows are cut into tiles whose best are listed by one launch and merged by
a second; one slow kernel takes every k and row length that the lists do not."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import (
    CudaPrimitive,
    Number,
    Pointer,
    PrimitivePlan,
    Scratch,
    Step,
    Temp,
    Unit,
)
from kiln.ir.dtypes import BF16, DTYPES, F32
from kiln.recipes.topk import MAX_K

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.topk"
WARP = 32

K: Expr = ["arg", "k"]
R: Expr = ["dim", "R"]
V: Expr = ["dim", "V"]
LIMIT: Expr = ["sub", V, ["arg", "num_org_vocab_padding"]]
LISTS: Expr = ["arg", "lists"]
ROW_STRIDE: Expr = ["stride", "scores"]


@dataclass(frozen=True)
class Scan:
    """How a tile of columns is narrowed to the best `used`."""

    dtype: str
    used: int
    """The largest k that it serves; lists have twice as many slots, room for candidates."""
    tile: int
    """Columns of a program; at most 32 a thread."""
    warps: int
    groups: int
    """Disjoint groups whose maxima bound the k-th best; at least `used`."""
    wide: bool
    """16-byte loads, which need aligned rows that are multiples of 16 elements."""

    @property
    def keep(self) -> int:
        """Slots of a list."""
        return 2 * self.used


@dataclass(frozen=True)
class Merge:
    """How at most `lists` lists of a row are merged."""

    dtype: str
    used: int
    lists: int
    warps: int
    groups: int

    @property
    def keep(self) -> int:
        """Slots of a list."""
        return 2 * self.used


@dataclass(frozen=True)
class Split:
    """Which tiles and lists serve a call."""

    dtype: str
    above: int
    """k that a smaller list serves."""
    used: int
    tile: int
    lists: int
    """The most lists that a merge of this size takes, which limits the row length."""
    programs: int | None = None
    """The most tiles over all rows that this split is for; more are better served by longer tiles."""


SCANS = (
    Scan("f32", 16, 2048, 8, 64, True),
    Scan("f32", 16, 8192, 8, 64, True),
    Scan("f32", 64, 8192, 8, 128, True),
    Scan("f32", 64, 8192, 8, 128, False),
    Scan("bf16", 32, 8192, 8, 64, True),
    Scan("bf16", 32, 8192, 8, 64, False),
)
MERGES = (
    Merge("f32", 16, 32, 4, 64),
    Merge("f32", 16, 128, 8, 64),
    Merge("f32", 64, 32, 8, 128),
    Merge("bf16", 32, 32, 8, 64),
)
