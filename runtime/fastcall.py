"""The short way of a call in C: the extension in `native/`, for interpreters that load abi3 modules.

It answers calls of layouts that were met before with arrays that it can read: NumPy's, and torch's by the
table of functions that their type offers (`__dlpack_c_exchange_api__`, torch 2.10 and later). Everything else
goes the way of runtime/shortcut.py, and so does whatever is wrong: without the extension calls do the same,
only slower.
"""

import math
import os
import struct
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from types import new_class
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from kiln.runtime.arguments import Given
from kiln.runtime.arrays import is_torch
from kiln.runtime.bound import BoundCall
from kiln.runtime.decision import Decision
from kiln.runtime.operation import Operation
from kiln.runtime.packed import Packed, Packs
from kiln.runtime.shortcut import Form, Miss, ShortWay, Values

_FOLDER = os.path.join(os.path.dirname(__file__), "native")
_EXCHANGE = "__dlpack_c_exchange_api__"
_TENSOR, _NUMBER, _CHOICE = range(3)


class Native(NamedTuple):
    """The extension, or the reason why there is none."""

    module: Any
    why: str | None


def module_path(machine: str) -> str:
    """Where the extension for a machine is."""
    return os.path.join(_FOLDER, f"native-{machine}-linux-gnu.abi3.so")


@lru_cache(maxsize=1)
def native() -> Native:
    """The extension, loaded at first need."""
    why = why_not(sys.implementation.name, sys.platform, EXTENSION_SUFFIXES, module_path(os.uname().machine))
    if why is not None:
        return Native(None, why)
    path = module_path(os.uname().machine)
    try:
        spec = ModuleSpec(
            "kiln.runtime.native", ExtensionFileLoader("kiln.runtime.native", path), origin=path
        )
        module = module_from_spec(spec)
    except ImportError as e:
        return Native(None, f"it cannot be loaded ({e})")
    cast(Any, module).register_numpy(np.ndarray)
    return Native(module, None)


def why_not(implementation: str, system: str, suffixes: Sequence[str], path: str) -> str | None:
    """Why an interpreter has no use for the extension at `path`; None if it has."""
    if implementation != "cpython" or system != "linux":
        return f"{implementation} on {system}; the extension is for CPython on Linux"
    if ".abi3.so" not in suffixes:
        # Free-threaded builds, among others: the GIL is what protects the extension's tables.
        return "this build of CPython loads no abi3 modules"
    return None if os.path.exists(path) else f"there is no {os.path.basename(path)}"


def operation_type(disabled: Container[str] = ()) -> type[Operation]:
    """The class of ops: one whose calls C answers, where it can and `native` is no name that must not run."""
    found = native()
    return Operation if found.module is None or "native" in disabled else _fast_type(found.module)


@lru_cache(maxsize=2)
def _fast_type(module: Any) -> type[Operation]:
    bound = new_class("BoundCall", (module.Bound, _Armed), {}, lambda body: body.update(_module=module))
    body = {"_module": module, "_bound": bound, "__doc__": Operation.__doc__}
    return cast(
        type[Operation], new_class("Operation", (module.Caller, _Taught), {}, lambda b: b.update(body))
    )


class _First(tuple[int]):
    """The key of a layout that C reads and has not met before: how often C had been told to forget when the
    call began. What was decided before the last time is of the past."""


class _Taught(Operation):
    """An op that tells C what it finds."""

    _module: Any
    _slow = ShortWay.__call__
    """What C calls for everything that it does not know."""

    if TYPE_CHECKING:  # of native.Caller

        def _add_form(self, positional: int, names: Values, slots: Values, scalars: Values) -> None: ...

        def _add_entry(
            self, operands: Values, named: dict[str, Any], program: Values | None, forgotten: int
        ) -> None: ...

        def _forget(self) -> None: ...

        def _forgotten(self) -> int: ...

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._told: set[Any] = set()

    def forget(self) -> None:
        """See ShortWay."""
        super().forget()
        self._told = set()
        self._forget()

    def learn(self, operands: Values, named: dict[str, Any]) -> None:
        """See ShortWay."""
        super().learn(operands, named)
        key = _form_key(operands, named)
        form = self._forms.get(key)
        if form is not None and key not in self._told:
            self._told.add(key)
            slots = _slots(form, len(operands) + len(named), [o.dtype for o in self.sig.scalars])
            # More than C has room for, or names that are no plain strings: such forms stay Python's.
            with suppress(OverflowError, TypeError):
                self._add_form(len(operands), tuple(map(sys.intern, named)), slots, form.args)

    def _first(self, *operands: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """What C calls for a layout that it can read and does not know."""
        key = _First((self._forgotten(),))
        form = self._forms.get(_form_key(operands, named))
        if form is None:
            return self._slow(*operands, out=out, stream=stream, **named)
        values = (*operands, *named.values())
        arrays = values if form.take is None else form.take(values)
        if out is not None:
            arrays += out if type(out) is tuple else (out,)
        return self._long(operands, named, out, stream, Miss(form, key, arrays))

    def keep(self, miss: Miss, operands: Values, named: dict[str, Any], out: Any, decision: Decision) -> None:
        """See ShortWay."""
        for x in miss.arrays:
            meet(self._module, x)
        if not isinstance(miss.key, _First):
            super().keep(miss, operands, named, out, decision)
            return
        program = self._program(miss, self._places(miss, operands, named, out), decision)
        self._add_entry(operands, named if out is None else {**named, "out": out}, program, miss.key[0])

    def _program(self, miss: Miss, where: Given, decision: Decision) -> Values | None:
        launcher, count = decision.launcher, len(miss.arrays)
        example = next(j for j in where.reads if j is not None)
        array = miss.arrays[example]
        if not isinstance(launcher, Packs) or (decision.outputs and self.device.allocates(array)):
            return None
        reads, writes = self._flat(count, where, decision)
        order = [*reads, *writes]
        launch = _launch(
            self._module, launcher.packed(order, None, None if miss.form.scalars else where.scalars)
        )
        if launch is None:
            return None
        pairs = [
            (order[o.written], order[o.other], o.a_bytes, o.b_bytes, o.same_is_fine)
            for o in decision.overlaps
        ]
        position = {t.name: i for i, t in enumerate(self.sig.tensors)}
        results = [writes[position[n]] for n in self.sig.returns]
        return (
            launch,
            tuple(self.device.maker(array, o.shape, o.dtype) for _, o in decision.outputs),
            not is_torch(array),
            example,
            self.device.default_stream(array) is not None,
            max(self.device.ordinal, 0),
            b"".join(struct.pack("=5q", *pair) for pair in pairs),
            struct.pack(f"={len(results)}i", *results),
            decision.count,
            self.device,
            launcher.refuse,
        )


class _Armed(BoundCall):
    """A bound call whose launch is C's, where C can."""

    _module: Any
    _slow = BoundCall.__call__

    if TYPE_CHECKING:  # of native.Bound

        def _arm(self, *args: Any) -> None: ...

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._prepare()

    def update(self, **arrays: Any) -> None:
        """See BoundCall."""
        super().update(**arrays)
        self._prepare()

    def _prepare(self) -> None:
        launcher = self._decision.launcher
        if isinstance(launcher, Packs):
            launch = _launch(self._module, launcher.packed((), self._pointers, self._given.scalars))
            if launch is not None:
                self._arm(launch, self._stream, self._count, self._device, launcher.refuse, self.outputs)


def _launch(module: Any, packed: Packed | None) -> Any:
    """What C runs, or None where it has no room for it."""
    try:
        return None if packed is None else module.Launch(*packed)
    except OverflowError:
        return None


def _form_key(operands: Values, named: dict[str, Any]) -> Any:
    return (len(operands), *named) if named else len(operands)


def _slots(form: Form, count: int, dtypes: list[str]) -> tuple[tuple[Any, ...], ...]:
    """(role, scalar, is it a bool, a float, does a layout depend on it, least, most) per value of a call."""
    slots: list[tuple[Any, ...]] = [(_TENSOR, 0, False, False, False, 0, 0)] * count
    for at in form.attrs:
        slots[at] = (_CHOICE, 0, False, False, False, 0, 0)
    for kind, least, most, _, at, i in form.scalars:
        limits = (least, most) if kind is float else (math.ceil(least), math.floor(most))
        slots[at] = (_NUMBER, i, dtypes[i] == "bool", kind is float, i in form.shaping, *limits)
    return tuple(slots)


_met: set[type] = set()


def meet(module: Any, x: Any) -> None:
    """Let C read arrays of this type from now on, if their type says how."""
    kind = type(x)
    if kind in _met or not is_torch(x):
        return
    _met.add(kind)
    # The table is of the type that holds it: what derives from it may mean something else by its memory.
    capsule = vars(kind).get(_EXCHANGE)
    if capsule is not None and module.register_exchange(kind, capsule):
        torch = sys.modules.get("torch")
        if kind is getattr(torch, "Tensor", None):
            # It adds nothing to a tensor but that modules know it.
            module.register_exchange(cast(Any, torch).nn.Parameter, capsule)
