"""Composite plans: an op as several calls of others, with temporaries between them."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from kiln.runtime.arrays import View, contiguous
from kiln.runtime.bind import Bound, flat_view
from kiln.runtime.device import Device
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.entities import Like, Plan, Scalar, Signature, Step
from kiln.runtime.errors import ContractError
from kiln.runtime.expr import compile_expr, names
from kiln.runtime.recipe import with_args
from kiln.runtime.select import Wanted

Args = tuple[int | float, ...]
Attrs = tuple[Any, ...]
Views = list[View | None]


class Callee(Protocol):
    """An op that a step calls."""

    sig: Signature

    def check(self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted) -> None:
        """Refuse a call that no candidate may run."""

    def launch(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted, stream: int
    ) -> None:
        """Run a call whose outputs are all given."""


@dataclass(slots=True)
class _Ref:
    """A tensor of a step: its view, and where its address comes from at each call."""

    view: View
    temp: bool
    index: int

    def at(self, pointers: list[int], temps: list[int]) -> View:
        return self.view._replace(ptr=temps[self.index] if self.temp else pointers[self.index])


@dataclass(slots=True)
class _Call:
    callee: Callee
    reads: list[_Ref | None]
    writes: list[_Ref | None]
    args: Callable[[Args], Args]
    attrs: Attrs


class PlanLauncher:
    """A plan for one call's shape."""

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
        self._device = device
        self._sig = sig
        self._bound = bound
        self._wanted = Wanted(mode=wanted.mode, isa=wanted.isa)
        self._operands = _operand_views(sig, bound, views)
        self._temps = {}
        self._sizes: list[int] = []
        for t in plan.temps:
            dtype = bound.env.dtypes[t.dtype.like] if isinstance(t.dtype, Like) else t.dtype
            shape = tuple(int(compile_expr(e)(bound.env)) for e in t.shape)
            v = View(0, shape, contiguous(shape), dtype, device.ordinal, False, None)
            self._temps[f"temp:{t.name}"] = _Ref(v, True, len(self._sizes))
            self._sizes.append(prod(shape) * DTYPES[dtype])
        written: set[str] = set()
        self._calls = [self._call(step, callee(step.op), written) for step in plan.steps]
        self._check(args)

    def _check(self, args: Args) -> None:
        for c in self._calls:
            reads = [None if r is None else r.view for r in c.reads]
            writes = [None if w is None else w.view for w in c.writes]
            c.callee.check(reads, writes, c.args(args), c.attrs, self._wanted)

    def run(self, pointers: list[int], args: Args, stream: int) -> None:
        """Run the steps one after another on the stream."""
        temporaries = self._device.reserve(self._sizes, stream) if self._sizes else None
        temps = temporaries.pointers if temporaries is not None else []
        try:
            for c in self._calls:
                reads = [None if r is None else r.at(pointers, temps) for r in c.reads]
                writes = [None if w is None else w.at(pointers, temps) for w in c.writes]
                c.callee.launch(reads, writes, c.args(args), c.attrs, self._wanted, stream)
        finally:
            if temporaries is not None:
                temporaries.release()

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
    return float(value) if o.dtype in ("f32", "f64") else int(value)


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
