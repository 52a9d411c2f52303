"""Hand-written CPU realizations as data: one C template, instantiated per element type and compiled for
every ISA tier."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kiln.ir.spec import Contract

Expr: TypeAlias = Any
"""A closed expression of the manifest, as JSON."""
Pred: TypeAlias = Any
"""A closed predicate of the manifest, as JSON."""


@dataclass(frozen=True)
class CpuPointer:
    """A pointer parameter, in order in the entry's `ptrs`."""

    name: str
    operand: str
    dtype: str
    bytes: int
    access: Literal["read", "write"] = "read"

    def json(self) -> dict[str, Any]:
        """The manifest's PARAM entry."""
        return {
            "name": self.name,
            "kind": "ptr",
            "dtype": self.dtype,
            "operand": self.operand,
            "access": self.access,
            "align": self.bytes,
        }


@dataclass(frozen=True)
class CpuNumber:
    """A scalar parameter: integers go to the entry's `ints`, floats to its `floats`, each in order."""

    name: str
    dtype: Literal["i64", "f64"]
    value: Expr

    def json(self) -> dict[str, Any]:
        """The manifest's PARAM entry."""
        return {
            "name": self.name,
            "kind": "scalar",
            "dtype": self.dtype,
            "value": self.value,
            "divisible_by": 1,
        }


@dataclass(frozen=True)
class CpuPrimitive:
    """One C entry point: a template of `backends/cpu/kernels`, rendered with `entry` and `constants`.

    The rendered source is C with vector extensions and what it uses of the vector headers, the same for every
    tier. Realizations of an op lie one after another in one file: those of one entry are one text, and every
    name of others is prefixed by its entry.
    """

    op: str
    variant: str
    template: str
    entry: str
    params: tuple[CpuPointer | CpuNumber, ...]
    grid: Expr
    """Number of independent tiles; a call computes tiles [begin, end)."""
    when: Pred
    constants: Mapping[str, int | str | bool] = field(default_factory=dict)
    priority: int = 0
    mode: Literal["exact", "fast"] = "exact"
    contract: Contract | None = None
    """What it promises; by default the op's own, or in the fast mode one of that mode."""
    tiers: tuple[str, ...] = ()
    """The ISA tiers that it is for, among them extra ones; by default all but those."""
    part: str = ""
    """Which of the op's C files it lies in, `OP.PART.c`, each an object of its own; by default `OP.c`."""

    def json_params(self) -> list[dict[str, Any]]:
        """The manifest's params."""
        return [p.json() for p in self.params]
