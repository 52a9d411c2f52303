"""Values that the dimensions and integer scalars of a test call may take, read off predicates and grids.

Nothing here knows an op: the numbers that a candidate's own expressions mention, and their neighbours, are
what its tests must straddle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.runtime.entities import Kernel, Plan, Signature
from kiln.runtime.errors import ContractError
from kiln.runtime.expr import Env, names, why_not

ROWS = (3, 130, 1, 17, 2)
"""Row counts; none is a multiple of a tile's rows but 2."""
EXTENTS = (0, 1, 5, 16, 33, 48, 80, 128, 250, 256, 257, 384, 640, 1000, 1040, 1152, 2064, 4112, 16400)
"""Extents of every other dimension: ragged ones, multiples of 16 and of 128, and one that no buffer of a row
holds."""
MOST = 1 << 20
"""The largest extent that a test draws."""
COUNTS = (1, 2, 5)
"""Values of integer scalars, beside their least and default one."""


@dataclass(frozen=True)
class Variable:
    """A dimension, or an integer scalar and the dimension it binds, if any."""

    dim: str | None
    arg: str | None = None

    def put(self, env: Env, value: int) -> None:
        """Give it a value."""
        if self.dim is not None:
            env.dims[self.dim] = value
        if self.arg is not None:
            env.args[self.arg] = value

    @property
    def names(self) -> set[tuple[str, str]]:
        """What expressions call it."""
        found = {("dim", self.dim), ("arg", self.arg)}
        return {(head, name) for head, name in found if name is not None}


def dims_of(sig: Signature) -> list[str]:
    """The dimensions that the op's shapes name, in order."""
    trees = (e for t in sig.tensors for e in t.shape)
    return list(dict.fromkeys(name for e in trees for head, name in names(e) if head == "dim"))


def variables(sig: Signature) -> list[Variable]:
    """Everything of a call that is a whole number."""
    dims = dims_of(sig)
    scalars = [o for o in sig.scalars if o.dtype in ("i32", "i64")]
    bound = {o.name.upper(): o.name for o in scalars if o.name.upper() in dims}
    free = [Variable(None, o.name) for o in scalars if o.name.upper() not in dims]
    return [*(Variable(d, bound.get(d)) for d in dims), *free]


def atoms(pred: Any) -> Iterator[Any]:
    """The predicates that must all hold."""
    if type(pred) is tuple and pred[0] == "and":
        for part in pred[1:]:
            yield from atoms(part)
    elif pred is not True:
        yield pred


def demands(sig: Signature, candidate: Kernel | Plan) -> list[Any]:
    """Every predicate that a call must satisfy for the candidate to take it."""
    return [a for p in (candidate.when, *(c for c, _ in sig.constraints)) for a in atoms(p)]


def expressions(sig: Signature, candidate: Kernel | Plan) -> list[Any]:
    """Predicates and sizes whose constants a test should straddle."""
    found = demands(sig, candidate)
    if isinstance(candidate, Kernel):
        return [*found, *candidate.grid]
    found += [e for t in candidate.temps for e in t.shape]
    return [*found, *(e for s in candidate.steps for e in s.args.values())]


def _constants(tree: Any) -> Iterator[int]:
    if type(tree) is int:
        yield tree
    elif type(tree) is tuple:
        for part in tree[1:]:
            yield from _constants(part)


INTEGERS = ("i32", "i64")


def indexed_dims(sig: Signature) -> set[str]:
    """Dimensions whose rows an index operand selects: the leading one of a table."""
    for t in sig.tensors:
        choices = (t.dtype,) if isinstance(t.dtype, str) else t.dtype.choices
        if t.role == "in" and set(choices) & set(INTEGERS):
            return {str(s.shape[0][1]) for s in sig.tensors if len(s.shape) == 2} - {sig.rows}
    return set()


def table_dims(sig: Signature) -> set[str]:
    """Leading dimensions of two-dimensional inputs that lead no output: of tables that rows are from."""
    return _leading(sig, "in") - _leading(sig, "inout", "out") - {sig.rows, sig.width}


def row_dims(sig: Signature) -> set[str]:
    """Dimensions that are the rows of an output."""
    return _leading(sig, "inout", "out")


def _leading(sig: Signature, *roles: str) -> set[str]:
    firsts = [t.shape[0] for t in sig.tensors if len(t.shape) == 2 and t.role in roles]
    return {first[1] for first in firsts if first[0] == "dim"}


def constants(trees: Iterable[Any]) -> set[int]:
    """The positive whole numbers that expressions and predicates mention, as far as test sizes go."""
    return {c for tree in trees for c in _constants(tree) if 0 < c <= MOST}


def pool(
    sig: Signature,
    candidate: Kernel | Plan,
    variable: Variable,
    attrs: dict[str, Any],
    factors: Iterable[int] = (),
) -> list[int]:
    """Values of one variable that no demand about it alone refuses, in the order in which they are tried.

    `factors` are numbers that the kernels behind a plan mention: sizes are drawn around their multiples too.
    """
    named = variable.names
    near = constants(e for e in expressions(sig, candidate) if named & set(names(e)))
    multiples = ((1, -1), (1, 1), (1, 16), (3, 16), (10, 16), *((f, 16) for f in factors))
    near |= {m * c + d for c in near for m, d in multiples if m * c <= MOST}
    if variable.dim is None or variable.arg is not None:
        scalar = next(o for o in sig.scalars if o.name == variable.arg)
        known = [int(v) for v in (scalar.default, scalar.minimum) if v is not None]
        base: Sequence[int] = tuple(dict.fromkeys((*known, *COUNTS)))
    elif variable.dim == sig.rows:
        base = ROWS
    else:
        base = EXTENTS
    least = 1 if variable.dim in (sig.rows, sig.width, *indexed_dims(sig)) else 0
    values = dict.fromkeys((*base, *sorted(near)))
    return [v for v in values if v >= least and _alone_legal(sig, candidate, variable, v, attrs)]


def _alone_legal(
    sig: Signature, candidate: Kernel | Plan, variable: Variable, value: int, attrs: dict[str, Any]
) -> bool:
    env = Env()
    env.attrs = attrs
    variable.put(env, value)
    for demand in demands(sig, candidate):
        about = {n for n in names(demand) if n[0] != "attr"}
        if about and about <= variable.names:
            try:
                if why_not(demand, env) is not None:
                    return False
            except ContractError:
                return False
    return True
