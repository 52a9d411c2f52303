"""Epilogues of recipes in hand-scheduled kernels: which kernels host which, and the launch contract of one.
Imports neither Triton nor MLIR."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.backends.cuda.schedule import HEAVY_FUNCTIONS, LONG_FUNCTIONS
from kiln.compiler.epilogue import Epilogue, epilogue_of
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import F32
from kiln.ir.signature import resolve
from kiln.ir.spec import Op, Ship

EXTRA, EPILOGUE = "extra", "EPILOGUE"
"""A hosting kernel's parameters for what an epilogue reads and for its function; None where it has none."""


@dataclass(frozen=True)
class Hosted:
    """A recipe's specialization in a kernel of its primitive op."""

    row: CudaPrimitive
    ship: Ship
    epilogue: Epilogue

    @property
    def variant(self) -> str:
        """Its name."""
        return f"{variant_name(self.ship)}_{self.row.variant}"


def hosted(op: Op, rows: Iterable[CudaPrimitive]) -> Iterator[Hosted]:
    """Every pair of a recipe's specializations and the kernels that host them."""
    hosts = [row for row in rows if row.hosts != "none"]
    for ship in op.ship:
        made = epilogue_of(op, ship) if hosts and not ship.rare else ""
        if isinstance(made, Epilogue):
            yield from (Hosted(row, ship, made) for row in hosts if _takes(row, made))


def _takes(row: CudaPrimitive, epilogue: Epilogue) -> bool:
    """Whether a kernel reads what the recipe hands to its primitive op, and has f32 sums to go on with."""
    pointers = {p.operand: p for p in row.params if isinstance(p, Pointer)}
    wanted = {**epilogue.types, **{t.name: F32 for t in epilogue.head.outputs}}
    short = epilogue.operations.isdisjoint(HEAVY_FUNCTIONS | LONG_FUNCTIONS)
    fits = row.op == epilogue.head.name and (short or row.hosts == "any")
    return fits and all(pointers[n].dtype == d.name for n, d in wanted.items())


def entry(op: Op, pair: Hosted) -> dict[str, Any]:
    """The manifest fields that do not depend on the compiled bytes."""
    own = [test for test in pair.row.when[1:] if test[0] != "dtype"]
    return {
        "tier": "fused", "mode": pair.row.mode, "grid": list(pair.row.grid),
        "when": ["and", *type_predicates(op, pair.ship), *own], "priority": pair.row.priority,
        "scratch": [s.json() for s in pair.row.scratch],
    }  # fmt: skip


def params(op: Op, pair: Hosted) -> tuple[dict[str, Any], ...]:
    """The kernel's own parameters; its output has the recipe's type."""
    (out,) = op.outputs
    dtype = resolve(op, out, pair.ship.dtypes).name

    def typed(p: Pointer | Number) -> Pointer | Number:
        return replace(p, dtype=dtype) if isinstance(p, Pointer) and p.operand == out.name else p

    return tuple(typed(p).json() for p in pair.row.params)
