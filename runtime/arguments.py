"""From what a caller wrote to operands by position: names, defaults, outputs, scalar ranges and
attributes."""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kiln.runtime.arrays import View
from kiln.runtime.entities import Attr, Scalar, Signature
from kiln.runtime.errors import ContractError

F32_MAX = 3.4028234663852886e38
INTEGERS = {"i32": 1 << 31, "i64": 1 << 63}
"""Integer types, and the magnitude that their values stay below."""

MENTIONED = 6
"""Names that a hint lists."""


class Given(NamedTuple):
    """A call's arguments, by position in the signature.

    Attributes:
        reads: per tensor operand, the array that is read, or None.
        writes: per tensor operand, the array that is written, or None for one to allocate.
        scalars: every scalar's value.
        attrs: every attribute's value.
    """

    reads: list[Any]
    writes: list[Any]
    scalars: tuple[int | float, ...]
    attrs: tuple[Any, ...]


class Arguments:
    """Sorts the arguments of one op's calls.

    Attributes:
        positional: names in the order in which operands may be given without.
        casts: per scalar, what checks its value.
        scalar_defaults: per scalar, its default; None where it must be given.
    """

    def __init__(self, name: str, sig: Signature) -> None:
        self._name = name
        tensors = {t.name: i for i, t in enumerate(sig.tensors)}
        scalars = {o.name: i for i, o in enumerate(sig.scalars)}
        self._roles = [t.role for t in sig.tensors]
        self._inout = [i for i, r in enumerate(self._roles) if r == "inout"]
        self._returns = [(n, tensors[n]) for n in sig.returns]
        self._slots = {n: ("tensor", i) for n, i in tensors.items()}
        self._slots.update({n: ("scalar", i) for n, i in scalars.items()})
        self._slots.update({a.name: ("attr", i) for i, a in enumerate(sig.attrs)})
        self.positional = [
            o.name for o in sig.operands if o.name in scalars or self._roles[tensors[o.name]] != "out"
        ]
        self.casts = [_caster(name, o) for o in sig.scalars]
        self._attrs = sig.attrs
        self._attr_defaults = tuple(a.default for a in sig.attrs)
        self.scalar_defaults = [o.default for o in sig.scalars]

    def sort(self, operands: Sequence[Any], named: Mapping[str, Any], out: Any) -> Given:
        """Put arguments in their places.

        Raises:
            ContractError: too many, unknown, given twice, missing, or a scalar of another type or out of
                range.
        """
        reads: list[Any] = [None] * len(self._roles)
        writes: list[Any] = [None] * len(self._roles)
        scalars: list[Any] = self.scalar_defaults.copy()
        attrs = self._attr_defaults
        if len(operands) > len(self.positional):
            raise ContractError(
                f"{self._name}: found {len(operands)} operands, expected at most {len(self.positional)}: "
                f"{', '.join(self.positional)}."
            )
        for name, value in zip(self.positional, operands, strict=False):
            kind, i = self._slots[name]
            (reads if kind == "tensor" else scalars)[i] = value
        for name, value in named.items():
            kind, i = self.slot(name)
            if name in self.positional[: len(operands)]:
                raise ContractError(
                    f"{self._name}: {name} is given twice, by position and by name; give it once."
                )
            if kind == "attr":
                attrs = (*attrs[:i], self._attr(self._attrs[i], value), *attrs[i + 1 :])
            elif kind == "scalar":
                scalars[i] = value
            else:
                (writes if self._roles[i] == "out" else reads)[i] = value
        for i in self._inout:
            writes[i] = reads[i]
        if out is not None:
            self._outputs(writes, out)
        return Given(
            reads, writes, tuple(cast(v) for cast, v in zip(self.casts, scalars, strict=True)), attrs
        )

    def slot(self, name: str) -> tuple[str, int]:
        """("tensor", "scalar" or "attr", position among those) of a name.

        Raises:
            ContractError: there is no such operand or attribute.
        """
        return self._slots.get(name) or self._unknown(name)

    def _outputs(self, writes: list[Any], out: Any) -> None:
        many = isinstance(out, tuple | list) and not isinstance(out, View)
        if not many and "out" in self._slots and len(self._returns) > 1:
            writes[self._slots["out"][1]] = out
            return
        given = out if many else (out,)
        if len(given) != len(self._returns):
            raise ContractError(
                f"{self._name}: out= holds {len(given)} arrays, expected {len(self._returns)}: "
                f"{', '.join(n for n, _ in self._returns)}."
            )
        for (name, i), value in zip(self._returns, given, strict=True):
            if value is None:
                continue
            if self._roles[i] == "out" and writes[i] is not None:
                raise ContractError(
                    f"{self._name}: {name} is given twice, by name and in out=; give it once."
                )
            writes[i] = value

    def _unknown(self, name: str) -> tuple[str, int]:
        from difflib import get_close_matches

        near = get_close_matches(name, self._slots, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(self._slots)}."
        raise ContractError(f"{self._name} has no operand or attribute {name!r}; {hint}")

    def _attr(self, a: Attr, value: Any) -> Any:
        if type(value).__name__ in ("bool_", "bool"):
            value = bool(value)
        for legal in a.choices:
            if type(legal) is type(value) and legal == value:
                return legal
        raise ContractError(
            f"{self._name}: found {a.name}={value!r}, expected one of {', '.join(map(repr, a.choices))}."
        )


def _caster(op: str, o: Scalar) -> Callable[[Any], int | float]:
    """A function that checks one scalar's value."""
    convert: Callable[[Any], int | float]
    if o.dtype in INTEGERS:
        convert = _integer(f"{op}: {o.name}", INTEGERS[o.dtype])
    elif o.dtype == "bool":
        convert = _boolean(f"{op}: {o.name}")
    else:
        convert = _real(f"{op}: {o.name}", o.dtype == "f32")
    least = o.minimum if o.minimum is not None else 0.0 if o.positive else None
    if least is None:
        return convert

    def bounded(value: Any) -> int | float:
        found = convert(value)
        if not (found > least if o.positive else found >= least):
            bound = f"more than {least}" if o.positive else f"{least} or more"
            raise ContractError(f"{op}: {o.name} is {found}, expected {bound}.")
        return found

    return bounded


def _integer(what: str, limit: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                _wrong(what, value, "an integer")
            value = int(value)
        if not -limit <= value < limit:
            raise ContractError(f"{what} is {value}, expected an integer of {limit.bit_length()} bits.")
        found: int = value
        return found

    return convert


def _boolean(what: str) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if not isinstance(value, bool) and type(value).__name__ != "bool_":
            _wrong(what, value, "True or False")
        return int(value)

    return convert


def _real(what: str, single: bool) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        if type(value) is not float:
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                _wrong(what, value, "a number")
            value = float(value)
        if single and not -F32_MAX <= value <= F32_MAX and math.isfinite(value):
            raise ContractError(f"{what} is {value}, which f32 cannot hold; expected a smaller magnitude.")
        found: float = value
        return found

    return convert


def _wrong(what: str, value: Any, expected: str) -> None:
    if value is None:
        raise ContractError(f"{what} is missing; pass {expected}.")
    raise ContractError(f"{what} is a {type(value).__name__}, expected {expected}.")


def nearest(name: str, known: Iterable[str], about: Mapping[str, str] | None = None) -> str:
    """A hint for a name that is not known.

    Args:
        about: what else is known of each name, where words of the wanted one are looked for.
    """
    from difflib import get_close_matches

    listed = sorted(known)
    near = get_close_matches(name, listed, 1)
    if near:
        return f"did you mean {near[0]}?"
    near = _mentioning(name, {n: f"{n} {(about or {}).get(n, '')}".lower() for n in listed})
    if near:
        return f"did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?"
    return f"there is {', '.join(listed[:20])}{' and more' if len(listed) > 20 else ''}."


def _mentioning(name: str, texts: Mapping[str, str]) -> list[str]:
    """The few names whose texts have the rarest word of the wanted one in them."""
    words = [w for w in name.lower().split("_") if len(w) > 2]
    found = [[n for n, text in texts.items() if word in text] for word in words]
    return min(filter(None, found), key=len, default=[])[:MENTIONED]
