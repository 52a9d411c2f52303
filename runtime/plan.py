"""Composite plans: an op as several calls of others, with temporaries between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, Protocol

from kiln.runtime.arrays import View, contiguous
from kiln.runtime.bind import Bound, flat_view
from kiln.runtime.device import Args, Device, Launcher, PlainLauncher
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.entities import Like, Plan, Scalar, Signature, Step, Temp
from kiln.runtime.errors import ContractError
from kiln.runtime.expr import INT64, compile_expr, names, whole
from kiln.runtime.recipe import with_args
from kiln.runtime.scratch import laid_out
from kiln.runtime.select import Wanted

Attrs = tuple[Any, ...]
Views = list[View | None]


Place = Callable[[], int]
"""What tells the stream of the call, should a kernel have to be loaded for it."""
MAX_ELEMENTS = 1 << 44
"""Most elements of a temporary."""
FAR = 1 << 62
"""Where temporaries lie while addresses are compared: apart from every operand, as they always are."""


class Decided(Protocol):
    """What a step's calls of one shape do."""

    launcher: Launcher | None
    count: list[int]

    def check(self, pointers: Sequence[int]) -> None:
        """Refuse addresses that overlap where they must not."""


class Callee(Protocol):
    """An op that a step calls."""

    sig: Signature

    def check(self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted) -> None:
        """Refuse a call that no candidate may run."""

    def decide(
        self,
        reads: Views,
        writes: Views,
        args: Args,
        attrs: Attrs,
        wanted: Wanted,
        place: Place | None,
    ) -> Decided:
        """What a call whose outputs are all given does; kernels are loaded."""


@dataclass(slots=True)
class _Ref:
    """A tensor of a step: its view, and where its address comes from at each call."""

    view: View
    temp: bool
    index: int


@dataclass(slots=True)
class _Call:
    callee: Callee
    reads: list[_Ref | None]
    writes: list[_Ref | None]
    args: Callable[[Args], Args]
    attrs: Attrs

    @property
    def views(self) -> tuple[Views, Views]:
        """What is read and written, at the addresses of the call that the plan was made for."""
        reads = [None if r is None else r.view for r in self.reads]
        return reads, [None if w is None else w.view for w in self.writes]


@dataclass(slots=True)
class _Linked:
    """A step whose kernel is chosen and loaded; `pick` takes its addresses from those of the plan."""

    decision: Decided
    launcher: Launcher | None
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    args: Callable[[Args], Args]


class PlanLauncher(PlainLauncher):
    """A plan for one call's shape. Only a linked one runs."""

    def __init__(
        self,
        plan: Plan,
        sig: Signature,
        bound: Bound,
        views: tuple[Views, Views],
        args: Args,
        callee: Callable[[str], Callee],
        device: Device,
        wanted: Wanted,
    ) -> None:
        """Check every step.

        Args:
            views: what each tensor operand is read from and written to; None for outputs still to be
                allocated.
            args: scalar values of this call.

        Raises:
            KilnError: a step that no candidate may run.
        """
        self._op = plan.op
        self._sig = sig
        self._bound = bound
        self._wanted = Wanted(mode=wanted.mode, isa=wanted.isa)
        self._operands = _operand_views(sig, bound, views)
        self._temps: dict[str, _Ref] = {}
        sizes: list[int] = []
        for t in plan.temps:
            dtype = self._temp_dtype(t)
            shape = tuple(whole(compile_expr(e)(bound.env)) for e in t.shape)
            if min(shape, default=0) < 0 or prod(max(n, 1) for n in shape) >= MAX_ELEMENTS:
                raise ContractError(
                    f"{plan.op}: the temporary {t.name} would be too big; check the operands."
                )
            v = View(0, shape, contiguous(shape), dtype, device.ordinal, False, None)
            self._temps[f"temp:{t.name}"] = _Ref(v, True, len(sizes))
            sizes.append(prod(shape) * DTYPES[dtype])
        self._offsets, self._inner = laid_out(sizes)
        self.scratch_bytes = self._inner
        self._linked: list[_Linked] = []
        written: set[str] = set()
        self._calls = [self._call(step, callee(step.op), written) for step in plan.steps]
        self._check(args)

    def _temp_dtype(self, t: Temp) -> str:
        if not isinstance(t.dtype, Like):
            return t.dtype
        # A temporary may be like an earlier one, so that none is like itself.
        earlier = self._temps.get(t.dtype.like)
        found = self._bound.env.dtypes.get(t.dtype.like) if earlier is None else earlier.view.dtype
        if found is None:
            raise ContractError(f"{self._op}: the temporary {t.name} is like an operand that is absent.")
        return found

    def _check(self, args: Args) -> None:
        for c in self._calls:
            c.callee.check(*c.views, c.args(args), c.attrs, self._wanted)

    def link(self, args: Args, place: Place | None) -> None:
        """Choose and load every step's kernel; what is chosen depends on nothing that the plan's own key
        lacks."""
        for c in self._calls:
            decision = c.callee.decide(*c.views, c.args(args), c.attrs, self._wanted, place)
            self._linked.append(_Linked(decision, decision.launcher, self._picker(c), c.args))
        launchers = [s.launcher for s in self._linked if s.launcher is not None]
        self.scratch_bytes = self._inner + max((x.scratch_bytes for x in launchers), default=0)
        # One step leaves it as the next one needs it.
        self.zeroed_bytes = max((x.zeroed_bytes for x in launchers), default=0)

    def _picker(self, c: _Call) -> Callable[[Sequence[int]], tuple[int, ...]]:
        # A plan's addresses: its operands, read then written, its temporaries, and 0 for what is absent.
        temps = 2 * len(self._sig.tensors)
        absent = temps + len(self._offsets)
        return itemgetter(
            *(
                absent if r is None else temps + r.index if r.temp else r.index
                for side in (c.reads, c.writes)
                for r in side
            )
        )

    def check(self, pointers: Sequence[int]) -> None:
        """Refuse a call in which a step's operands overlap where they must not."""
        addresses = (*pointers, *(FAR + o for o in self._offsets), 0)
        for s in self._linked:
            s.decision.check(s.pick(addresses))

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Run the steps one after another on the stream."""
        addresses = (*pointers, *(scratch + o for o in self._offsets), 0)
        inner = scratch + self._inner
        for s in self._linked:
            if s.launcher is not None:
                s.launcher.run(s.pick(addresses), s.args(args), stream, inner, zeroed)
                s.decision.count[0] += 1

    def runs(self, args: Args) -> list[tuple[Launcher, Args]]:
        """What its steps run, with their scalar values."""
        return [(s.launcher, s.args(args)) for s in self._linked if s.launcher is not None]

    def _call(self, step: Step, callee: Callee, written: set[str]) -> _Call:
        sig = callee.sig
        reads: list[_Ref | None] = []
        writes: list[_Ref | None] = []
        for t in sig.tensors:
            name = step.bind.get(t.name)
            reads.append(None if name is None or t.role == "out" else self._ref(name, name in written))
            writes.append(None if name is None or t.role == "in" else self._ref(name, True))
        # What a step has written is what later steps read, in place or not.
        written.update(n for t in sig.tensors if t.role != "in" and (n := step.bind.get(t.name)) is not None)
        attrs = tuple(step.attrs.get(a.name, a.default) for a in sig.attrs)
        return _Call(callee, reads, writes, self._args(step, sig), attrs)

    def _ref(self, name: str, written: bool) -> _Ref | None:
        if name in self._temps:
            return self._temps[name]
        read, write = self._operands[name]
        return write if written and write is not None else read

    def _args(self, step: Step, sig: Signature) -> Callable[[Args], Args]:
        order = [o.name for o in self._sig.scalars]
        values = [
            (o, compile_expr(step.args[o.name] if o.name in step.args else _default(step, o)))
            for o in sig.scalars
        ]
        if all(head != "arg" for e in step.args.values() for head, _ in names(e)):
            fixed = tuple(_cast(o, v(self._bound.env)) for o, v in values)
            return lambda args: fixed

        def compute(args: Args) -> Args:
            env = with_args(self._bound.env, order, args)
            return tuple(_cast(o, v(env)) for o, v in values)

        return compute


def _operand_views(
    sig: Signature, bound: Bound, views: tuple[Views, Views]
) -> dict[str, tuple[_Ref | None, _Ref | None]]:
    """Per operand, its read and written side in its own rank."""
    found: dict[str, tuple[_Ref | None, _Ref | None]] = {}
    count = len(sig.tensors)
    for i, t in enumerate(sig.tensors):
        g = bound.geometry[i]
        if g is None:
            found[t.name] = (None, None)
            continue
        nothing = View(0, (), (), bound.env.dtypes[t.name], 0, False, None)
        given = [views[0][i], views[1][i]]
        device = next((v.device for side in views for v in side if v is not None), 0)
        flat = [
            flat_view(v if v is not None else nothing._replace(device=device), g)._replace(owner=None)
            for v in given
        ]
        read = None if t.role == "out" else _Ref(flat[0], False, i)
        write = None if t.role == "in" else _Ref(flat[1], False, count + i)
        found[t.name] = (read, write)
    return found


def _default(step: Step, o: Scalar) -> float:
    if o.default is None:
        raise ContractError(f"a step calls {step.op} without its scalar {o.name}; rebuild the tree.")
    return o.default


def _cast(o: Scalar, value: Any) -> int | float:
    if o.dtype in ("f32", "f64"):
        return float(value)
    if not -INT64 <= value < INT64:
        raise ContractError(
            f"a step passes {o.name} as {o.dtype}, which cannot hold its value; rebuild the tree."
        )
    return int(value)


def aliasing_is_safe(
    plan: Plan, sig: Signature, callee: Callable[[str], Callee], written: str, read: str
) -> bool:
    """Whether `written` may be the buffer of `read`: no step reads the one after another has written the
    other."""
    first_write = len(plan.steps)
    last_read = -1
    for i, step in enumerate(plan.steps):
        for t in callee(step.op).sig.tensors:
            name = step.bind.get(t.name)
            if name == written and t.role != "in":
                first_write = min(first_write, i)
            if name == read and t.role != "out":
                last_read = i
    return last_read <= first_write
