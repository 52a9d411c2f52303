"""What a tuning bundle holds beside its tree, and which measurements are still to be made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kiln.runtime.errors import UnavailableError
from kiln.runtime.expr import Env, compile_expr, parse_expr
from kiln.runtime.fields import Reader, array, attr_value, choice, integer, mapping, read, record, text
from kiln.runtime.manifest import canonical_json
from kiln.runtime.strictjson import parse

NAME = "tune.json"
TREE = "tree"
"""The folder of a bundle that is an artifact tree."""
SCHEMA = 1

Shape = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Group:
    """Calls that the same candidates compete for."""

    types: Mapping[str, str]
    """Operand -> element type; other operands are absent."""
    attrs: Mapping[str, bool | int | str]
    trusted: str
    """The candidate that the others are compared with."""
    candidates: Mapping[str, str]
    """Candidate -> inputs digest."""
    derived: Mapping[str, Any]
    """Dimensions that follow from those of a shape, as expressions."""

    def dims(self, shape: Mapping[str, int]) -> dict[str, int]:
        """Every dimension of a call."""
        env = Env()
        env.dims = dict(shape)
        return {**shape, **{d: int(compile_expr(e)(env)) for d, e in self.derived.items()}}


@dataclass(frozen=True)
class Plan:
    """What a bundle measures on one target."""

    schema: int
    op: str
    target: str
    along: str
    groups: Mapping[str, Group]
    shapes: tuple[Mapping[str, int], ...]

    @property
    def candidates(self) -> dict[str, str]:
        """Every candidate -> inputs digest."""
        return {name: digest for group in self.groups.values() for name, digest in group.candidates.items()}


@dataclass(frozen=True)
class Call:
    """One shape of one group, with the candidates that are still to be timed on it."""

    group: str
    shape: Mapping[str, int]
    candidates: tuple[str, ...]


_IDENT = text(r"[A-Za-z_][A-Za-z0-9_]*", "an identifier")
_NAME = text(r"[a-z0-9_][a-z0-9_.+-]*", "a variant name")
_LABEL = text(r"[^\x00-\x1f\x7f]+", "a printable text")
_GROUP: Reader[Group] = record(
    Group,
    {
        "types": mapping(_IDENT, _LABEL, 64),
        "attrs": mapping(_IDENT, attr_value, 64),
        "trusted": _NAME,
        "candidates": mapping(_NAME, text(r"[0-9a-f]{64}", "a SHA-256 digest of 64 hex digits"), 4096),
        "derived": mapping(_IDENT, parse_expr, 16),
    },
)
_PLAN: Reader[Plan] = record(
    Plan,
    {
        "schema": choice(SCHEMA),
        "op": _IDENT,
        "target": _LABEL,
        "along": _IDENT,
        "groups": mapping(_LABEL, _GROUP, 256),
        "shapes": array(mapping(_IDENT, integer(0, 2**31 - 1), 16), 100_000),
    },
)
_PLANS: Reader[tuple[Plan, ...]] = array(_PLAN, 64, 1)


def write_plans(bundle: Path, plans: Collection[Plan]) -> None:
    """Write tune.json, canonically."""
    (bundle / NAME).write_bytes(canonical_json([asdict(p) for p in sorted(plans, key=lambda p: p.target)]))


def read_plans(bundle: Path) -> tuple[Plan, ...]:
    """What a bundle measures, by target.

    Raises:
        UnavailableError: the folder is no bundle.
        SchemaError: its tune.json is not of the schema.
    """
    path = bundle / NAME
    if not path.is_file():
        raise UnavailableError(
            f"{bundle} is no tuning bundle: it has no {NAME}; kiln tune OP --out makes one."
        )
    return read(_PLANS, parse(path.read_bytes(), str(path)), str(path))


def shape_key(shape: Mapping[str, int]) -> Shape:
    """A shape as a key, by dimension name."""
    return tuple(sorted(shape.items()))


def calls(plan: Plan, done: Collection[tuple[str, Shape, str]], lost: Collection[str]) -> Iterator[Call]:
    """What is still to be timed, group after group, small shapes first.

    Args:
        done: (group, shape, candidate) that the samples hold.
        lost: candidates that ended a worker; they are not tried again.
    """
    for name, group in plan.groups.items():
        for shape in plan.shapes:
            key = shape_key(shape)
            rest = tuple(c for c in group.candidates if c not in lost and (name, key, c) not in done)
            if rest:
                yield Call(name, shape, rest)


def call_json(call: Call) -> dict[str, Any]:
    """A call as JSON."""
    return {"group": call.group, "shape": dict(call.shape), "candidates": list(call.candidates)}
