"""CUDA realizations of top_k_pairs: short rows in one launch, long ones split into chunks whose lists are
merged by a second launch."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer, PrimitivePlan, Step, Temp, Unit
from kiln.ir.dtypes import BF16, DTYPES, F16, F32
from kiln.recipes.topk import CHUNK_UNIT, MAX_K

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.topk"
PROGRAMS = 1792
"""Programs that a launch aims at by splitting rows: 13 one-warp programs on each of 132 multiprocessors."""
SHORT_ROW = 2048
"""Rows of at most this many columns are not worth a second launch."""

K: Expr = ["arg", "k"]
R: Expr = ["dim", "R"]
V: Expr = ["dim", "V"]
LIMIT: Expr = ["sub", V, ["arg", "num_org_vocab_padding"]]
LISTS: Expr = ["arg", "lists"]
CHUNK: Expr = ["roundup", ["cdiv", V, LISTS], CHUNK_UNIT]
ROW_STRIDE: Expr = ["stride", "scores"]


@dataclass(frozen=True)
class Schedule:
    """How a range of columns is scanned, for k up to `keep`."""

    keep: int
    """Slots of the running list, a power of two."""
    groups: int
    """Groups of a tile whose maxima are compared with the list at once; at least `keep`."""
    tile: int
    warps: int
    wide: bool
    """16-byte loads without masks; needs rows that are multiples of 16 elements, aligned and at least a
    tile."""

    @property
    def name(self) -> str:
        """Part of the variant's name."""
        return f"k{self.keep}_wide" if self.wide else f"k{self.keep}"

    def constants(self, dtype: str) -> dict[str, int | bool]:
        """The constexprs of a scanning kernel."""
        return {
            "TILE": self.tile,
            "GROUPS": self.groups,
            "KEEP": self.keep,
            "LOG_GROUPS": self.groups.bit_length() - 1,
            "LOG_KEEP": self.keep.bit_length() - 1,
            "VEC": 16 // DTYPES[dtype].bytes if self.wide else 1,
            "WHOLE": self.wide,
        }


WIDE = (Schedule(32, 32, 1024, 1, True), Schedule(64, 64, 2048, 2, True))
ANY = (
    Schedule(32, 32, 1024, 1, False),
    Schedule(64, 64, 1024, 1, False),
    Schedule(MAX_K, MAX_K, 2048, 8, False),
)
KEEPS = tuple(s.keep for s in ANY)


def _k_range(keep: int) -> Expr:
    """The k that lists of `keep` slots serve and shorter ones do not."""
    below = max((smaller for smaller in KEEPS if smaller < keep), default=0)
    return ["and", ["gt", K, below], ["le", K, keep]]


def _reads(wide: bool) -> tuple[Pointer | Number, ...]:
    """The scanned rows: row stride, length and the limit beyond which columns count as -inf."""
    unit: Unit = 16 if wide else 1
    return (
        Number("row_stride", "i64", ROW_STRIDE, unit),
        Number("V", "i32", V, unit),
        Number("limit", "i32", LIMIT),
        Number("k", "i32", K),
    )


def _row(dtype: str, schedule: Schedule) -> CudaPrimitive:
    return CudaPrimitive(
        op="top_k_pairs",
        variant=f"row_{dtype}_{schedule.name}",
        kernel=f"{KERNELS}:top_k_row",
        params=(
            Pointer("scores", "scores", dtype),
            Pointer("values", "values", dtype, "write"),
            Pointer("indices", "indices", "i32", "write"),
            *_reads(wide=False),
        ),
        constants=schedule.constants(dtype),
        grid=(R, 1, 1),
        when=["and", ["dtype", "scores", dtype], _k_range(schedule.keep), ["le", V, SHORT_ROW]],
        priority=1,
        num_warps=schedule.warps,
    )


def _tiles(dtype: str, schedule: Schedule) -> CudaPrimitive:
    when: Expr = ["and", ["dtype", "scores", dtype], ["eq", ["arg", "keep"], schedule.keep]]
    if schedule.wide:
        when += [["divisible", V, 16], ["divisible", ROW_STRIDE, 16], ["aligned", "scores", 16]]
        when += [["ge", V, schedule.tile]]
    unit: Unit = 16 if schedule.wide else 1
    return CudaPrimitive(
        op="top_k_tiles",
        variant=f"{dtype}_{schedule.name}",
        kernel=f"{KERNELS}:top_k_tiles",
        params=(
            Pointer("scores", "scores", dtype, align=unit),
            Pointer("packed", "packed", "i64", "write"),
            *_reads(schedule.wide),
            Number("chunk", "i32", CHUNK, 16),
            Number("lists", "i32", LISTS),
        ),
        constants=schedule.constants(dtype),
        grid=(R, LISTS, 1),
        when=when,
        priority=1 if schedule.wide else 0,
        num_warps=schedule.warps,
    )


MERGES = ((32, 8, 1), (32, 64, 4), (64, 16, 4), (MAX_K, 4, 8))
"""(keep, lists merged at a time, warps): few lists in one warp, many in a block."""


def _merge(dtype: str, keep: int, lists: int, warps: int) -> CudaPrimitive:
    widest = max(n for k, n, _ in MERGES if k == keep)
    when: Expr = ["and", ["dtype", "scores", dtype], ["eq", ["arg", "keep"], keep]]
    return CudaPrimitive(
        op="top_k_merge",
        variant=f"{dtype}_k{keep}_lists{lists}",
        kernel=f"{KERNELS}:top_k_merge",
        params=(
            Pointer("packed", "packed", "i64"),
            Pointer("scores", "scores", dtype),
            Pointer("values", "values", dtype, "write"),
            Pointer("indices", "indices", "i32", "write"),
            Number("row_stride", "i64", ROW_STRIDE),
            Number("limit", "i32", LIMIT),
            Number("k", "i32", K),
            Number("lists", "i32", LISTS),
        ),
        constants={
            "LISTS": lists,
            "KEEP": keep,
            "LOG_ALL": (lists * keep).bit_length() - 1,
            "LOG_KEEP": keep.bit_length() - 1,
        },
        grid=(R, 1, 1),
        when=when if lists == widest else [*when, ["le", LISTS, lists]],
        priority=0 if lists == widest else 1,
        num_warps=warps,
    )


def _split(schedule: Schedule) -> PrimitivePlan:
    """Scan chunks of every row into lists, then merge a row's lists."""
    per_row: Expr = ["cdiv", PROGRAMS, ["max", 1, R]]
    lists: Expr = ["max", 1, ["min", ["cdiv", V, schedule.tile], per_row]]
    args: dict[str, Expr] = {
        "k": K,
        "keep": schedule.keep,
        "lists": lists,
        "num_org_vocab_padding": ["arg", "num_org_vocab_padding"],
    }
    scan = {"scores": "scores", "packed": "temp:packed"}
    return PrimitivePlan(
        op="top_k_pairs",
        variant=f"split_k{schedule.keep}",
        when=_k_range(schedule.keep),
        temps=(Temp("packed", "i64", (R, ["mul", lists, schedule.keep])),),
        steps=(
            Step("top_k_tiles", scan, args),
            Step("top_k_merge", scan | {"values": "values", "indices": "indices"}, args),
        ),
    )


DTYPE_NAMES = tuple(d.name for d in (F32, BF16, F16))

PRIMITIVES: tuple[CudaPrimitive, ...] = (
    *(_row(d, s) for d in DTYPE_NAMES for s in ANY if s.keep < MAX_K),
    *(_tiles(d, s) for d in DTYPE_NAMES for s in ANY),
    *(_tiles(d, s) for d in (F32.name, BF16.name) for s in WIDE),
    *(_merge(d, *m) for d in DTYPE_NAMES for m in MERGES),
)
PLANS: tuple[PrimitivePlan, ...] = tuple(_split(s) for s in ANY)
