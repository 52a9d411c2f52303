"""The short way of a call that was made before: its layout is one key, its answer one look-up.

A call of the same form (which operands are given, by position or by name) with arrays of the same layouts
takes the same decision. Everything that a first call checks depends on the form, the layouts, the types and
the alignments alone, or is checked again: scalars' values, null and overlapping addresses. Whatever is not
found here, or wrong, goes the long way, which says what is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

from kiln.runtime.arguments import Arguments, Given
from kiln.runtime.arrays import TORCH_TYPES, is_torch, view
from kiln.runtime.decision import Decision
from kiln.runtime.device import Device, Launcher
from kiln.runtime.entities import Signature
from kiln.runtime.errors import ContractError

MAX_ENTRIES = 4096
"""Layouts that an op's shortcuts remember; a workload with more starts over."""

Values = tuple[Any, ...]
Cast = Callable[[Any], int | float]


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """Which operands calls give, by position or by name.

    Attributes:
        tensors: takes the tensor operands from a call's values.
        scalars: (check, position among the values, scalar) of the scalars that are given.
        args: the values of all scalars, where none is given.
        defaults: the same, for a call to put those in that it gives.
        attrs: positions of attributes among the values.
    """

    tensors: Callable[[Values], Values]
    scalars: tuple[tuple[Cast, int, int], ...]
    args: tuple[int | float, ...]
    defaults: list[int | float]
    attrs: tuple[int, ...]


class Entry(NamedTuple):
    """The answer to calls of one layout.

    Attributes:
        decision: what they do.
        launcher: its launcher.
        pick: takes the decision's addresses from those of the arrays given, 0, and those made.
        makers: what makes the outputs that are not given, from the array `example` of those given.
        example: its position.
        address: of a made array.
        stream: what tells the stream where none is given.
        results: what the call returns, of the arrays given and those made.
    """

    decision: Decision
    launcher: Launcher
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    makers: tuple[Callable[[Any, int], Any], ...]
    example: int
    address: Callable[[Any], int]
    stream: Callable[[], int] | None
    results: Callable[[Sequence[Any], Sequence[Any]], Any]


class Miss(NamedTuple):
    """A layout that was not seen before."""

    form: Form
    key: tuple[Any, ...]
    arrays: Sequence[Any]


class Found(NamedTuple):
    """A call that is ready to go but for its outputs."""

    entry: Entry
    arrays: Sequence[Any]
    pointers: list[int]
    args: tuple[int | float, ...]


class Shortcuts:
    """The layouts of one op's calls."""

    def __init__(self, sig: Signature, arguments: Arguments, device: Device) -> None:
        self._sig, self._arguments, self._device = sig, arguments, device
        self._forms: dict[tuple[object, ...], Form] = {}
        self._entries: dict[tuple[Any, ...], Entry] = {}
        self.key_scalars: list[int] = []
        """Scalars on whose values a decision depends."""

    def forget(self) -> None:
        """Every call goes the long way once more."""
        self._entries = {}

    def find(self, operands: Values, named: dict[str, Any], out: Any) -> Found | Miss | None:
        """The way of a call, or the key under which to `keep` it; None where there is no short way."""
        form = self._forms.get((len(operands), *named))
        if form is None:
            return None
        values = (*operands, *named.values()) if named else operands
        key: list[Any] = [form]
        arrays = form.tensors(values)
        if out is not None:
            outs = out if type(out) is tuple else (out,)
            key.append(-1 if outs is not out else len(outs))
            arrays += outs
        pointers: list[int] = []
        low = 0
        try:
            for x in arrays:
                if type(x) in TORCH_TYPES:
                    p = x.data_ptr()
                    key += (x.shape, x.stride(), x.dtype, x.device)
                elif x is None:
                    key.append(None)
                    pointers.append(0)
                    continue
                else:
                    v = view(x)
                    p = v.ptr
                    key += (v.shape, v.strides, v.dtype, v.device, v.readonly)
                if not p:
                    return None
                pointers.append(p)
                low |= p
            args = form.args
            if form.scalars:
                given = form.defaults.copy()
                for cast, at, i in form.scalars:
                    given[i] = cast(values[at])
                args = tuple(given)
                key += [args[i] for i in self.key_scalars]
            for at in form.attrs:
                key += (type(values[at]), values[at])
            if low & 255:
                key += [p & -p & 255 for p in pointers]
            whole = tuple(key)
            entry = self._entries.get(whole)
        except (ContractError, TypeError):
            return None
        return Miss(form, whole, arrays) if entry is None else Found(entry, arrays, pointers, args)

    def learn(self, operands: Values, named: dict[str, Any]) -> None:
        """Remember the form of a call that went well."""
        form = (len(operands), *named)
        if form not in self._forms and len(self._forms) < MAX_ENTRIES:
            self._forms[form] = self._form(operands, named)

    def _form(self, operands: Values, named: dict[str, Any]) -> Form:
        slots = [self._arguments.slot(n) for n in (*self._arguments.positional[: len(operands)], *named)]
        kinds = ("tensor", "scalar", "attr")
        at = {kind: [p for p, (k, _) in enumerate(slots) if k == kind] for kind in kinds}
        casts, defaults = self._arguments.casts, [*self._arguments.scalar_defaults]
        given = {slots[p][1] for p in at["scalar"]}
        pairs = zip(casts, defaults, strict=True)
        known = [0 if i in given else cast(v) for i, (cast, v) in enumerate(pairs)]
        return Form(
            _taker(at["tensor"]),
            tuple((casts[slots[p][1]], p, slots[p][1]) for p in at["scalar"]),
            tuple(known),
            known,
            tuple(at["attr"]),
        )

    def keep(
        self, miss: Miss, operands: Values, named: dict[str, Any], out: Any, decision: Decision
    ) -> None:
        """Remember what a call of a new layout did."""
        launcher = decision.launcher
        if launcher is None:
            return
        if len(self._entries) >= MAX_ENTRIES:
            self._entries = {}
        places = self._places(miss, operands, named, out)
        self._entries[miss.key] = self._entry(miss, places, decision, launcher)

    def _entry(self, miss: Miss, where: Given, decision: Decision, launcher: Launcher) -> Entry:
        count = len(miss.arrays)
        made = {i: count + 1 + at for at, (i, _) in enumerate(decision.outputs)}
        reads = [count if j is None else j for j in where.reads]
        writes = [made.get(i, count) if j is None else j for i, j in enumerate(where.writes)]
        example = next(j for j in where.reads if j is not None)
        array = miss.arrays[example]
        position = {t.name: i for i, t in enumerate(self._sig.tensors)}
        makers = tuple(self._device.maker(array, o.shape, o.dtype) for _, o in decision.outputs)
        return Entry(
            decision,
            launcher,
            itemgetter(*reads, *writes),
            makers,
            example,
            methodcaller("data_ptr") if is_torch(array) else lambda a: view(a).ptr,
            self._device.default_stream(array),
            _results([writes[position[n]] for n in self._sig.returns], count),
        )

    def _places(self, miss: Miss, operands: Values, named: dict[str, Any], out: Any) -> Given:
        """The call's arguments sorted, with the position of each array in place of it."""
        places = iter([None if x is None else j for j, x in enumerate(miss.arrays)])
        slots = [self._arguments.slot(n) for n in self._arguments.positional[: len(operands)]]
        by_position = [
            next(places) if kind == "tensor" else x for x, (kind, _) in zip(operands, slots, strict=True)
        ]
        by_name = {
            n: next(places) if self._arguments.slot(n)[0] == "tensor" else x for n, x in named.items()
        }
        outs = None if out is None else tuple(places) if type(out) is tuple else next(places)
        return self._arguments.sort(by_position, by_name, outs)


def _taker(at: list[int]) -> Callable[[Values], Values]:
    if at == list(range(len(at))):
        return itemgetter(slice(len(at)))
    if len(at) == 1:
        return itemgetter(slice(at[0], at[0] + 1))
    return itemgetter(*at)


def _results(at: list[int], count: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """What a call returns; positions are those of arrays given, then `count` for none, then arrays made."""
    if at == [count + 1]:
        return lambda given, made: made[0]
    if len(at) == 1:
        place = at[0]
        return lambda given, made: (*given, None, *made)[place]
    pick = itemgetter(*at)
    return lambda given, made: pick((*given, None, *made))
