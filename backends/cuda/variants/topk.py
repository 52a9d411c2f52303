"""CUDA realizations of top_k_pairs: rows are cut into tiles whose best are listed by one launch and merged by
a second; one slow kernel takes every k and row length that the lists do not."""

from dataclasses import dataclass, replace
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
NARROW = 80
"""Registers of a thread that let three blocks of 8 warps share a multiprocessor."""

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
    registers: int | None = None
    """The most registers of a thread, so that more blocks share a multiprocessor: 64x131072 k64 takes 24.6 us
    with 80, 27.3 without. Blocks of 16 warps need 64: the assembler would take spills for a third (sm_80)."""

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
    used: int
    """The largest k."""
    tile: int
    lists: int
    """The most lists that a merge takes, which limits the row length."""
    wide: bool
    """Only aligned rows have such tiles."""
    programs: int | None = None
    """The most tiles over all rows: more are better served by longer tiles."""


SCANS = (
    Scan("f32", 16, 2048, 8, 64, True),
    Scan("f32", 16, 8192, 8, 32, True, registers=NARROW),
    Scan("f32", 64, 8192, 8, 128, True, registers=NARROW),
    Scan("f32", 64, 8192, 16, 128, False, registers=64),
    Scan("bf16", 32, 8192, 8, 64, True, registers=NARROW),
    Scan("bf16", 32, 8192, 16, 64, False, registers=64),
)
MERGES = (
    Merge("f32", 16, 128, 8, 64),
    Merge("f32", 64, 16, 8, 128),
    Merge("f32", 64, 32, 8, 128),
    Merge("bf16", 32, 32, 8, 64),
)
SPLITS = (
    Split("f32", 16, 2048, 128, True, 1056),
    Split("f32", 16, 8192, 128, True),
    Split("f32", 64, 8192, 16, False),
    Split("f32", 64, 8192, 32, False),
    Split("bf16", 32, 8192, 32, False),
)
"""The first that fits a call is taken. 1056 programs are 8 on each of 132 multiprocessors."""


def _aligned() -> list[Expr]:
    return [["divisible", V, 16], ["divisible", ROW_STRIDE, 16], ["aligned", "scores", 16]]


def _keeps(dtype: str, keep: int) -> list[Expr]:
    return ["and", ["dtype", "scores", dtype], ["eq", ["arg", "keep"], keep]]


def _outputs(dtype: str) -> tuple[Pointer, ...]:
    return (
        Pointer("values", "values", dtype, "write"),
        Pointer("indices", "indices", "i32", "write"),
        Pointer("scratch", "scratch:candidates", "i64", "write"),
    )


def _candidates(keep: int) -> tuple[Scratch, ...]:
    return (Scratch("candidates", ["mul", R, 8 * keep]),)


def _tiles(s: Scan) -> tuple[CudaPrimitive, ...]:
    """One row; two where sm_120 and up would spill at the limit that the others gain from."""
    limit = {} if s.registers is None else {"maxnreg": s.registers}
    if s.registers != NARROW:
        return (_scan(s, limit),)
    return (
        replace(_scan(s, limit), max_sm=119),
        replace(_scan(s, {}), min_sm=120),
    )


def _scan(s: Scan, options: dict[str, int]) -> CudaPrimitive:
    unit: Unit = 16 if s.wide else 1
    when = [*_keeps(s.dtype, s.keep), ["eq", ["arg", "tile"], s.tile]]
    return CudaPrimitive(
        op="top_k_tiles",
        variant=f"{s.dtype}_k{s.used}_tile{s.tile}{'_wide' if s.wide else ''}",
        kernel=f"{KERNELS}:top_k_tiles",
        params=(
            Pointer("scores", "scores", s.dtype, align=unit),
            Pointer("packed", "packed", "i64", "write"),
            Number("row_stride", "i64", ROW_STRIDE, unit),
            Number("V", "i32", V, unit),
            Number("limit", "i32", LIMIT),
            Number("k", "i32", K),
            Number("lists", "i32", LISTS),
        ),
        constants={
            "TILE": s.tile,
            "THREADS": WARP * s.warps,
            "GROUPS": s.groups,
            "KEEP": s.keep,
            "VEC": 16 // DTYPES[s.dtype].bytes if s.wide else 1,
        },
        grid=(R, LISTS, 1),
        when=[*when, *_aligned()] if s.wide else when,
        priority=1 if s.wide else 0,
        num_warps=s.warps,
        options=options,
    )


def _merge(m: Merge) -> CudaPrimitive:
    return CudaPrimitive(
        op="top_k_merge",
        variant=f"{m.dtype}_k{m.used}_lists{m.lists}",
        kernel=f"{KERNELS}:top_k_merge",
        params=(
            Pointer("packed", "packed", "i64", align=16),
            Pointer("scores", "scores", m.dtype),
            *_outputs(m.dtype),
            Number("row_stride", "i64", ROW_STRIDE),
            Number("limit", "i32", LIMIT),
            Number("k", "i32", K),
            Number("lists", "i32", LISTS),
        ),
        constants={
            "LISTS": m.lists,
            "KEEP": m.keep,
            "USED": m.used,
            "THREADS": WARP * m.warps,
            "GROUPS": m.groups,
            "VEC": 2,
        },
        grid=(R, 1, 1),
        when=[*_keeps(m.dtype, m.keep), ["le", LISTS, m.lists], ["aligned", "packed", 16]],
        priority=-m.lists,
        num_warps=m.warps,
        scratch=_candidates(m.keep),
    )


ROW_TILE = 512
ROW = CudaPrimitive(
    op="top_k_pairs",
    variant="row_f32",
    kernel=f"{KERNELS}:top_k_row",
    params=(
        Pointer("scores", "scores", F32.name),
        *_outputs(F32.name),
        Number("row_stride", "i64", ROW_STRIDE),
        Number("V", "i32", V),
        Number("limit", "i32", LIMIT),
        Number("k", "i32", K),
    ),
    constants={"TILE": ROW_TILE, "KEEP": 2 * MAX_K},
    grid=(R, 1, 1),
    when=["and", ["dtype", "scores", F32.name], ["le", V, 2**31 - ROW_TILE]],
    priority=-1,
    num_warps=8,
    scratch=_candidates(2 * MAX_K),
)
"""Any k and row length, f32: slow, a program a row."""


def _split(s: Split, priority: int) -> PrimitivePlan:
    lists: Expr = ["max", 1, ["cdiv", V, s.tile]]
    args: dict[str, Expr] = {
        "k": K,
        "keep": 2 * s.used,
        "lists": lists,
        "num_org_vocab_padding": ["arg", "num_org_vocab_padding"],
    }
    when: list[Expr] = ["and", ["dtype", "scores", s.dtype], ["le", K, s.used], ["le", V, s.tile * s.lists]]
    if s.programs is not None:
        when.append(["le", ["mul", R, lists], s.programs])
    if s.wide:
        when += _aligned()
    scan = {"scores": "scores", "packed": "temp:packed"}
    return PrimitivePlan(
        op="top_k_pairs",
        variant=f"split_{s.dtype}_k{s.used}_tile{s.tile}_lists{s.lists}",
        when=when,
        temps=(Temp("packed", "i64", (R, ["mul", lists, 2 * s.used])),),
        steps=(
            Step("top_k_tiles", scan, {**args, "tile": s.tile}),
            Step("top_k_merge", scan | {"values": "values", "indices": "indices"}, args),
        ),
        priority=priority,
    )


DTYPE_NAMES = (F32.name, BF16.name)

PRIMITIVES: tuple[CudaPrimitive, ...] = (
    ROW,
    *(row for s in SCANS for row in _tiles(s)),
    *map(_merge, MERGES),
)
PLANS: tuple[PrimitivePlan, ...] = tuple(_split(s, len(SPLITS) - i) for i, s in enumerate(SPLITS))
