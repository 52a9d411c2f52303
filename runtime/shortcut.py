"""The short way of a call that was made before: its layout is one key, its answer one look-up.

A call of the same form (which operands are given, by position or by name) with arrays of the same layouts
takes the same decision. Everything that a first call checks depends on the form, the layouts, the types and
the alignments alone, or is checked again: scalars' values, null and overlapping addresses. Whatever is not
found here, or wrong, goes the long way, which says what is wrong.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

from kiln.runtime.arguments import F32_MAX, INTEGERS, Arguments, Given
from kiln.runtime.arrays import TORCH_TYPES, is_torch, view
from kiln.runtime.consistency import RESERVED_NAMES
from kiln.runtime.decision import Decision
from kiln.runtime.device import Args, Device, Launcher, Route
from kiln.runtime.entities import Scalar, Signature
from kiln.runtime.errors import ContractError

MAX_CHECKED = 4096
"""Address sets that an entry remembers as separate; one with more starts over."""
MAX_FORMS = 64
"""Forms that an op's shortcuts know."""
MAX_ENTRIES = 4096
"""Layouts that a form remembers; a workload with more starts over."""

Values = tuple[Any, ...]
Cast = Callable[[Any], int | float]
Scalars = tuple[tuple[Any, float, float, Cast, int, int], ...]


class Form(NamedTuple):
    """Which operands calls give, by position or by name.

    Attributes:
        entries: answers by layout.
        take: takes the tensor operands from a call's values; None where they are all there is.
        scalars: (type, least and most of values that need no check, check, position among the values, scalar)
            of the scalars that are given.
        args: the values of all scalars, where none is given.
        attrs: positions of attributes among the values.
        shaping: scalars on whose values a decision depends.
    """

    entries: "dict[tuple[Any, ...], Entry]"
    take: Callable[[Values], Values] | None
    scalars: Scalars
    args: tuple[int | float, ...]
    attrs: tuple[int, ...]
    shaping: tuple[int, ...]


class Entry(NamedTuple):
    """The answer to calls of one layout.

    Attributes:
        decision: what they do.
        counter: of the candidate's calls.
        route: the decision's launcher, taking addresses in the order of the arrays given, 0, and those made;
            None where it needs scratch.
        checked: such addresses that were compared and found fit; None where that need not be.
        pick: takes the decision's addresses from those.
        makers: what makes the outputs that are not given, from the array `example` of those given (and the
            stream, where they are not torch's).
        example: its position.
        address: of a made array.
        stream: what tells the stream where none is given.
        results: what the call returns, of the arrays given and those made; None for the one array made.
    """

    decision: Decision
    counter: list[int]
    route: Route | None
    checked: set[tuple[int, ...]] | None
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    makers: tuple[Callable[..., Any], ...]
    example: int
    address: Callable[[Any], int]
    stream: Callable[[], int] | None
    results: Callable[[Sequence[Any], Sequence[Any]], Any] | None


class Miss(NamedTuple):
    """A layout that was not seen before."""

    form: Form
    key: tuple[Any, ...]
    arrays: Sequence[Any]


UNKNOWN = Miss(Form({}, None, (), (), (), ()), (), ())
"""A call whose form was not seen before, or that is wrong."""


class ShortWay(ABC):
    """A callable op that knows the layouts of its calls; `_long` is the way of all others."""

    device: Device
    sig: Signature
    _arguments: Arguments

    def __init__(self) -> None:
        self._forms: dict[Any, Form] = {}

    @abstractmethod
    def _long(self, operands: Values, named: dict[str, Any], out: Any, stream: Any, miss: Miss) -> Any:
        """Check everything, run, and `learn` or `keep` what was found."""

    @abstractmethod
    def _launch(self, decision: Decision, pointers: Sequence[int], args: Args, stream: int) -> None:
        """Run a decision that needs scratch."""

    @property
    @abstractmethod
    def key_scalars(self) -> list[int]:
        """Positions of the scalars on whose values the choice or the shape of a launch depends."""

    def forget(self) -> None:
        """Let every call be checked once more: the library was sealed or closed, or its providers changed."""
        # Not cleared in place: a call that is under way keeps what it finds in the old ones.
        self._forms = {}

    def __call__(self, *operands: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """Run the op.

        Args:
            operands: in declared order, outputs left out.
            out: the array to write, or a tuple in return order; None allocates, or writes in/out operands.
            stream: a CUDA stream: a handle or an object that has one.
            named: operands, scalars and attributes by name; and mode="fast" to let kernels with an envelope
                contract go first, tier=, variant= or isa= to let only such candidates run.

        Returns:
            The written array, or a tuple of them in return order.

        Raises:
            ContractError, SelectionError: the call breaks the op's contract, or no candidate may run it.
        """
        # Every line here is paid at each call: nothing is wrapped, called or looked up twice.
        form = self._forms.get((len(operands), *named) if named else len(operands))
        if form is None:
            return self._long(operands, named, out, stream, UNKNOWN)
        entries, take, scalars, args, attrs, shaping = form
        values = (*operands, *named.values()) if named else operands
        arrays = values if take is None else take(values)
        key: tuple[Any, ...] = ()
        if out is not None:
            outs = out if type(out) is tuple else (out,)
            key = (len(outs) if outs is out else -1,)
            arrays += outs
        pointers: list[int] = []
        low = 0
        try:
            for x in arrays:
                if type(x) in TORCH_TYPES:
                    key = (key, x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device)
                    p = x.data_ptr()
                elif x is None:
                    key = (key, None)
                    pointers.append(0)
                    continue
                else:
                    v = view(x)
                    key = (key, v[1:6])
                    p = v[0]
                if not p:
                    return self._long(operands, named, out, stream, UNKNOWN)
                pointers.append(p)
                low |= p
            if scalars:
                args = _settled(scalars, args, values)
                for i in shaping:
                    key = (key, args[i])
            for at in attrs:
                key = (key, type(values[at]), values[at])
            if low & 255:
                key = (key, *[p & -p & 255 for p in pointers])
            entry = entries.get(key)
        except (ContractError, TypeError, RuntimeError):
            # The last is torch's, of tensors that have no plain memory.
            return self._long(operands, named, out, stream, UNKNOWN)
        if entry is None:
            return self._long(operands, named, out, stream, Miss(form, key, arrays))
        decision, counter, route, checked, pick, makers, example, address, current, results = entry
        handle = self.device.stream(stream, None) if stream is not None else current() if current else 0
        pointers.append(0)
        made = []
        for make in makers:
            array = make(arrays[example]) if address is _torch_address else make(arrays[example], handle)
            made.append(array)
            pointers.append(address(array))
        if checked is not None and (flat := tuple(pointers)) not in checked:
            decision.check(pick(flat))
            _remember(checked, flat)
        if route is None:
            self._launch(decision, pick(pointers), args, handle)
        else:
            route(pointers, args, handle)
            counter[0] += 1
        return made[0] if results is None else results(arrays, made)

    def learn(self, operands: Values, named: dict[str, Any]) -> None:
        """Remember the form of a call that went well."""
        if not RESERVED_NAMES.isdisjoint(named):
            return
        key = (len(operands), *named) if named else len(operands)
        if key not in self._forms and len(self._forms) < MAX_FORMS:
            self._forms[key] = self._form(operands, named)

    def _form(self, operands: Values, named: dict[str, Any]) -> Form:
        slots = [self._arguments.slot(n) for n in (*self._arguments.positional[: len(operands)], *named)]
        kinds = ("tensor", "scalar", "attr")
        at = {kind: [p for p, (k, _) in enumerate(slots) if k == kind] for kind in kinds}
        casts, defaults = self._arguments.casts, [*self._arguments.scalar_defaults]
        given = {slots[p][1] for p in at["scalar"]}
        pairs = zip(casts, defaults, strict=True)
        known = [0 if i in given else cast(v) for i, (cast, v) in enumerate(pairs)]
        where = [(p, slots[p][1]) for p in at["scalar"]]
        return Form(
            {},
            None if len(at["tensor"]) == len(slots) else _taker(at["tensor"]),
            tuple((*_plain(self.sig.scalars[i]), casts[i], p, i) for p, i in where),
            tuple(known),
            tuple(at["attr"]),
            tuple(self.key_scalars) if where else (),
        )

    def keep(self, miss: Miss, operands: Values, named: dict[str, Any], out: Any, decision: Decision) -> None:
        """Remember what a call of a new layout did."""
        if decision.launcher is None or any(x is not None and 0 in view(x).shape for x in miss.arrays):
            # torch calls an array without elements contiguous, whatever its strides.
            return
        entries = miss.form.entries
        if len(entries) >= MAX_ENTRIES:
            entries.clear()
        places = self._places(miss, operands, named, out)
        entries[miss.key] = self._entry(miss, places, decision, decision.launcher)

    def _entry(self, miss: Miss, where: Given, decision: Decision, launcher: Launcher) -> Entry:
        count = len(miss.arrays)
        reads, writes = self._flat(count, where, decision)
        example = next(j for j in where.reads if j is not None)
        array = miss.arrays[example]
        position = {t.name: i for i, t in enumerate(self.sig.tensors)}
        return Entry(
            decision,
            decision.count,
            None if launcher.scratch_bytes or launcher.zeroed_bytes else launcher.via((*reads, *writes)),
            set() if decision.checks else None,
            itemgetter(*reads, *writes),
            tuple(self.device.maker(array, o.shape, o.dtype) for _, o in decision.outputs),
            example,
            _torch_address if is_torch(array) else _address,
            self.device.default_stream(array),
            _results([writes[position[n]] for n in self.sig.returns], count),
        )

    @staticmethod
    def _flat(count: int, where: Given, decision: Decision) -> tuple[list[int], list[int]]:
        """Where the addresses read and those written are, among those of the `count` arrays given, 0, and
        those of the arrays made."""
        made = {i: count + 1 + at for at, (i, _) in enumerate(decision.outputs)}
        reads = [count if j is None else j for j in where.reads]
        return reads, [made.get(i, count) if j is None else j for i, j in enumerate(where.writes)]

    def _places(self, miss: Miss, operands: Values, named: dict[str, Any], out: Any) -> Given:
        """The call's arguments sorted, with the position of each array in place of it."""
        places = iter([None if x is None else j for j, x in enumerate(miss.arrays)])
        slots = [self._arguments.slot(n) for n in self._arguments.positional[: len(operands)]]
        by_position = [
            next(places) if kind == "tensor" else x for x, (kind, _) in zip(operands, slots, strict=True)
        ]
        by_name = {n: next(places) if self._arguments.slot(n)[0] == "tensor" else x for n, x in named.items()}
        outs = None if out is None else tuple(places) if type(out) is tuple else next(places)
        return self._arguments.sort(by_position, by_name, outs)


def _remember(checked: set[tuple[int, ...]], pointers: tuple[int, ...]) -> None:
    if len(checked) >= MAX_CHECKED:
        checked.clear()
    checked.add(pointers)


def _settled(scalars: Scalars, args: Args, values: Values) -> Args:
    """The values of a call's scalars, checked, those that it does not give from `args`."""
    given = [*args]
    for kind, least, most, cast, at, i in scalars:
        value = values[at]
        given[i] = value if type(value) is kind and least <= value <= most else cast(value)
    return tuple(given)


_torch_address = methodcaller("data_ptr")


def _address(array: Any) -> int:
    return view(array).ptr


def _plain(o: Scalar) -> tuple[type, float, float]:
    """(type, least, most) of values that are what they are checked to be: `sort` need not look at them."""
    if o.dtype == "bool":
        return type(None), 0, 0
    if o.dtype in INTEGERS:
        limit = INTEGERS[o.dtype]
        least: float = -limit if o.minimum is None else o.minimum
        return int, max(least, 0) + 1 if o.positive else least, limit - 1
    least = -F32_MAX if o.minimum is None else max(o.minimum, -F32_MAX)
    return float, math.nextafter(max(least, 0.0), math.inf) if o.positive else least, F32_MAX


def _taker(at: list[int]) -> Callable[[Values], Values]:
    if at == list(range(len(at))):
        return itemgetter(slice(len(at)))
    if len(at) == 1:
        return itemgetter(slice(at[0], at[0] + 1))
    return itemgetter(*at)


def _results(at: list[int], count: int) -> Callable[[Sequence[Any], Sequence[Any]], Any] | None:
    """What a call returns; positions are those of arrays given, then `count` for none, then arrays made."""
    if at == [count + 1]:
        return None
    if len(at) == 1:
        place = at[0]
        return lambda given, made: (*given, None, *made)[place]
    pick = itemgetter(*at)
    return lambda given, made: pick((*given, None, *made))
