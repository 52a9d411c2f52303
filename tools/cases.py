"""Test calls derived from a manifest: for every kernel and every plan, calls that select exactly it.

Sizes, types, attributes and absent operands come from the candidate's own predicate; the runtime's `explain`
is the judge of whether a call selects the candidate. No op is known by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal
from zlib import crc32

import numpy as np

from kiln.runtime.alias import IN_PLACE
from kiln.runtime.arrays import View, contiguous
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.entities import DTypeVar, Kernel, Plan, Scalar, Signature, Tensor
from kiln.runtime.errors import KilnError
from kiln.runtime.expr import Env, compile_expr
from kiln.runtime.operation import Operation
from kiln.tools.pools import Variable, atoms, demands, indexed_dims, pool, row_dims, table_dims, variables

Layout = Literal["dense", "padded", "ragged", "columns", "alias"]
"""Where operands lie: `padded` has row strides and addresses that are multiples of 16 elements, `ragged` of
one; `columns` stores strided operands column by column; `alias` lets an output be the buffer of an input."""
Fill = Literal["normal", "mixed", "special"]

PAGE = 256
"""Alignment of operands; as many bytes of red zone lie before and after each."""
MOST_ELEMENTS = 1 << 17
"""Elements of all operands of a call, unless the candidate's own sizes are larger."""
TRIES = 60
"""Draws of a call's sizes."""
SOONER = 16
"""Draws after which the larger half of every number's values is left out, and so on."""
PATIENCE = 8
"""Draws for which a style's own layout is insisted on."""


@dataclass(frozen=True)
class Style:
    """What one of a candidate's calls tries to be."""

    rows: int
    layout: Layout
    fill: Fill
    wide: bool = False
    """Prefer the largest width."""
    least: bool = False
    """Prefer the least of every dimension but rows and width: an empty sum, a table of one row."""


STYLES = (
    Style(3, "dense", "mixed"),
    Style(130, "padded", "normal"),
    Style(1, "ragged", "special"),
    Style(17, "alias", "mixed"),
    Style(2, "dense", "normal", wide=True),
    Style(130, "columns", "special", least=True),
)
"""One call each; where a candidate cannot have the rows or the layout, the nearest that it can."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor operand of a call lies in the call's memory."""

    tensor: Tensor
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Bytes from the start of the memory."""
    alias: str | None = None
    """The input whose buffer this output is."""

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype]


@dataclass(frozen=True)
class Case:
    """One call of one candidate."""

    op: str
    variant: str
    mode: str
    dims: Mapping[str, int]
    scalars: Mapping[str, int | float]
    attrs: Mapping[str, Any]
    slots: tuple[Slot, ...]
    bytes: int
    """Memory of all operands and their red zones."""
    layout: Layout
    fill: Fill
    seed: int

    def slot(self, name: str) -> Slot:
        """The slot of an operand."""
        return next(s for s in self.slots if s.tensor.name == name)

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in {**self.dims, **self.scalars, **self.attrs}.items())
        return f"{self.op}.{self.variant} {sizes} {self.layout} {self.fill} seed={self.seed}"


@dataclass(frozen=True)
class Judge:
    """Who says whether a call selects a candidate: an op on a device, asked about memory that is none."""

    operation: Operation
    device: int
    """The CPU, or a CUDA ordinal."""
    base: int = 1 << 30
    """An address that stands for the call's memory."""

    def selects(self, case: Case) -> bool:
        """Whether the runtime would run exactly the case's candidate."""
        operands = views(case, self.base, self.device)
        try:
            found = self.operation.explain(**arguments(self.operation.sig, case, operands)).chosen
        except KilnError:
            return False
        return found is not None and found.variant == case.variant


@dataclass
class _Draft:
    """A call in the making."""

    env: Env = field(default_factory=Env)
    dtypes: dict[str, str] = field(default_factory=dict)
    """Operand -> element type; absent operands are not in it."""


def internal_ops(plans: Sequence[Plan]) -> set[str]:
    """Ops that exist only as halves of another one: their operands are no one else's to make."""
    return {step.op for plan in plans if plan.tier == "primitive" for step in plan.steps}


class Deriver:
    """Finds calls of one candidate."""

    def __init__(
        self,
        judge: Judge,
        candidate: Kernel | Plan,
        factors: Iterable[int] = (),
        styles: Sequence[Style] = STYLES,
        limit: int = MOST_ELEMENTS,
    ) -> None:
        """Work out what each number of a call may be. For `factors` see `pool`; `limit` is in elements."""
        sig = judge.operation.sig
        self.judge, self.candidate = judge, candidate
        self.styles, self.limit = styles, limit
        self.attrs = _attrs(sig, candidate)
        self.pools = [(v, pool(sig, candidate, v, self.attrs, factors)) for v in variables(sig)]
        self.swizzled = any(t.layout == "nvfp4_128x4" for t in sig.tensors)
        # Without an index operand, the number of the row says which row of a table is taken.
        self.by_row = set() if indexed_dims(sig) else table_dims(sig)
        # Not the name: entries of several ISA tiers get the same calls, whose answers are computed once.
        self.seed = crc32(f"{candidate.op} {candidate.when!r}".encode())

    def cases(self) -> Iterator[tuple[int, Case]]:
        """At most one call per style, with the style's number.

        A style whose call no draw of sizes makes legal is left out; none at all is for the caller to report.
        """
        seen: set[str] = set()
        for number, style in enumerate(self.styles):
            case = self.find(style, number)
            if case is not None and repr((case.slots, case.scalars, case.fill)) not in seen:
                seen.add(repr((case.slots, case.scalars, case.fill)))
                yield number, case

    def find(self, style: Style, seed: int, factor: int = 1) -> Case | None:
        """The first drawn call in this style, or the nearest layout, that selects the candidate.

        `factor` lets it be so much larger than the limit.
        """
        if not all(values for _, values in self.pools):
            return None
        sig = self.judge.operation.sig
        rng = np.random.default_rng([self.seed, seed])
        for attempt in range(TRIES):
            draft = _draft(sig, self.candidate, seed, self.attrs)
            for variable, values in self.pools:
                variable.put(draft.env, self._draw(variable, values, style, attempt, rng))
            if attempt % 2:
                self._pair(draft.env)
            self._agree(draft.env, rng)
            for dim in self.by_row:
                draft.env.dims[dim] = max(draft.env.dims[dim], draft.env.dims[sig.rows])
            _numbers(sig, draft.env, seed)
            limit = factor * self.limit << (attempt // 12)
            if self.swizzled and style.rows > 128:
                # More than one block of 128 rows, whatever the width.
                limit = max(limit, self.limit << 5)
            case = _placed(self.judge, self.candidate, draft, style, seed, limit, attempt >= PATIENCE)
            if case is not None:
                return case
        return None

    def _pair(self, env: Env) -> None:
        """Make alike what is alike: all numbers of rows, and all counts, so that operands can agree."""
        sig = self.judge.operation.sig
        for dim in row_dims(sig):
            env.dims[dim] = env.dims[sig.rows]
        bound = [v for v, _ in self.pools if v.arg is not None and v.dim is not None]
        for variable in bound:
            variable.put(env, env.dims[bound[0].dim or ""])

    def _agree(self, env: Env, rng: np.random.Generator) -> None:
        """Where an extent must be one of several, as that of scales, make it one of them."""
        for demand in demands(self.judge.operation.sig, self.candidate):
            if demand[0] == "or" and all(p[0] == "eq" and p[1][0] == "dim" for p in demand[1:]):
                _, (_, dim), value = demand[1 + int(rng.integers(len(demand) - 1))]
                env.dims[dim] = int(compile_expr(value)(env))

    def _draw(
        self, variable: Variable, values: list[int], style: Style, attempt: int, rng: np.random.Generator
    ) -> int:
        sig = self.judge.operation.sig
        if variable.dim == sig.rows and variable.arg is None:
            nearest = sorted(values, key=lambda v: (v != style.rows, v > style.rows, abs(v - style.rows)))
            return nearest[min(attempt // 8, len(nearest) - 1)]
        if variable.dim == sig.width:
            if style.wide and attempt < 4:
                fitting = sorted(v for v in values if v * style.rows <= self.limit // 2)
                return fitting[max(-1 - attempt, -len(fitting))] if fitting else min(values)
            edge = [v for v in values if v % 32 == 1 and v > 1]
            if style.layout == "ragged" and edge and attempt < 4:
                # One more than what vectors and tiles divide.
                return edge[int(rng.integers(len(edge)))]
        elif style.least and attempt < 4:
            return min(values)
        if attempt >= SOONER:
            # Operands with many dimensions are too large unless most of them are small.
            values = sorted(values)[: max(2, len(values) >> attempt // SOONER)]
        return values[int(rng.integers(len(values)))]


def _attrs(sig: Signature, candidate: Kernel | Plan) -> dict[str, Any]:
    asked = {a[1]: a[2] for a in atoms(candidate.when) if a[0] == "attr"}
    return {a.name: asked.get(a.name, a.default) for a in sig.attrs}


def _draft(sig: Signature, candidate: Kernel | Plan, seed: int, attrs: Mapping[str, Any]) -> _Draft:
    """Types and presence: what the predicate asks for, then what parameters read, then any, by turns."""
    draft = _Draft()
    draft.env.attrs = dict(attrs)
    asked = {a[1]: a[2] for a in atoms(candidate.when) if a[0] == "dtype"}
    presence = {a[1]: a[0] == "present" for a in atoms(candidate.when) if a[0] in ("present", "absent")}
    if isinstance(candidate, Kernel):
        pointers = [p for p in candidate.params if p.operand is not None]
        asked = {**{p.operand or "": p.dtype for p in pointers}, **asked}
        # What a kernel reads but does not ask for may be absent: by turns it is.
        read = {t.name: t.name in asked and seed % 2 == 0 for t in sig.tensors if t.optional}
        presence = read | presence
    chosen = {
        t.dtype.var: asked[t.name] for t in sig.tensors if isinstance(t.dtype, DTypeVar) and t.name in asked
    }
    for t in sig.tensors:
        if t.optional and not presence.get(t.name, seed % 2 == 0):
            continue
        if isinstance(t.dtype, DTypeVar):
            draft.dtypes[t.name] = chosen.setdefault(
                t.dtype.var, t.dtype.choices[seed % len(t.dtype.choices)]
            )
        else:
            draft.dtypes[t.name] = t.dtype
    return draft


def _numbers(sig: Signature, env: Env, seed: int) -> None:
    for o in sig.scalars:
        if o.name not in env.args:
            env.args[o.name] = float(np.float32(number(o, seed)))


def number(o: Scalar, seed: int) -> float:
    """A legal value of a floating scalar: its default first, then small, middling and large ones."""
    least = o.minimum if o.minimum is not None else 0.0 if o.positive else -2.0
    offered = [] if o.default is None else [float(o.default)]
    offered += [max(least, 0.0) + 0.0375, max(least, 0.0) + 1.5, max(least, 0.0) + 96.0]
    offered += [least] if not o.positive else []
    return offered[seed % len(offered)]


def _placed(
    judge: Judge, candidate: Kernel | Plan, draft: _Draft, style: Style, seed: int, limit: int, hurried: bool
) -> Case | None:
    """The case if it is legal; only in the style's own layout unless `hurried`."""
    sig = judge.operation.sig
    nearest: tuple[Layout, ...] = (style.layout, "padded", "dense")
    for layout in dict.fromkeys(nearest if hurried else nearest[:1]):
        if layout == "alias" and isinstance(candidate, Kernel) and candidate.tier not in IN_PLACE:
            continue
        try:
            slots, size = place(sig, draft.env, draft.dtypes, layout)
        except KilnError:
            return None
        if sum(prod(s.shape) for s in slots) > limit:
            return None
        if layout == "columns" and any(s.shape[-1] == 1 for s in slots if s.tensor.layout == "strided"):
            # One column says nothing of how far the next one is.
            continue
        case = Case(
            candidate.op,
            candidate.variant,
            candidate.mode,
            dict(draft.env.dims),
            dict(draft.env.args),
            dict(draft.env.attrs),
            slots,
            size,
            layout,
            style.fill,
            seed,
        )
        if (layout != "alias" or any(s.alias for s in slots)) and judge.selects(case):
            return case
    return None


def place(
    sig: Signature, env: Env, dtypes: Mapping[str, str], layout: Layout
) -> tuple[tuple[Slot, ...], int]:
    """Slots of every present operand, red zones between them, and the size of all.

    Raises:
        KilnError: a size that cannot be computed.
    """
    slots: list[Slot] = []
    top = PAGE
    for t in sig.tensors:
        if t.name not in dtypes:
            continue
        dtype = dtypes[t.name]
        shape = tuple(int(compile_expr(e)(env)) for e in t.shape)
        twin = _twin(t, dtype, shape, slots) if layout == "alias" else None
        if twin is not None:
            slots.append(Slot(t, dtype, shape, twin.strides, twin.offset, twin.tensor.name))
            continue
        shift = {"padded": 16, "ragged": 1}.get(layout, 0) if t.layout in ("rows", "strided") else 0
        slot = Slot(t, dtype, shape, _strides(t, shape, layout), top + shift * DTYPES[dtype])
        slots.append(slot)
        top = _next(slot)
    return tuple(slots), top


def _next(slot: Slot) -> int:
    """The first page after a slot and its red zone."""
    return (slot.offset + slot.extent + PAGE - 1) // PAGE * PAGE + PAGE


def _twin(t: Tensor, dtype: str, shape: tuple[int, ...], slots: Sequence[Slot]) -> Slot | None:
    """The input whose buffer an output may be: same rows, same type, not taken yet."""
    if t.role != "out" or t.layout != "rows":
        return None
    taken = {s.alias for s in slots}
    for s in slots:
        same = (s.dtype, s.shape, s.tensor.shape) == (dtype, shape, t.shape)
        if same and s.tensor.role == "in" and s.tensor.layout == "rows" and s.tensor.name not in taken:
            return s
    return None


def _strides(t: Tensor, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    if len(shape) != 2 or t.layout not in ("rows", "strided"):
        return contiguous(shape)
    if layout == "padded":
        return (-(-shape[1] // 16) * 16 + 16, 1)
    if layout == "ragged":
        return (shape[1] + 3, 1)
    if layout == "columns" and t.layout == "strided":
        return (1, shape[0] + 3)
    return contiguous(shape)


def views(case: Case, base: int, device: int) -> dict[str, View]:
    """Every operand as a view of memory that starts at `base`."""
    return {
        s.tensor.name: View(base + s.offset, s.shape, s.strides, s.dtype, device, False, None)
        for s in case.slots
    }


def arguments(sig: Signature, case: Case, operands: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the call that a case describes."""
    read = {t.name: operands[t.name] for t in sig.tensors if t.role != "out" and t.name in operands}
    written = tuple(operands.get(n) for n in sig.returns)
    scalars = {o.name: case.scalars[o.name] for o in sig.scalars}
    return {
        **read,
        **scalars,
        **case.attrs,
        "out": written,
        "variant": case.variant,
        "mode": case.mode,
    }
