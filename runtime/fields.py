"""Readers for JSON values, built from small ones: a schema is a table of them.

A reader takes a parsed JSON value and returns what it means, or raises `Mismatch`; the containers around it
add where it stood, so
that a schema error carries a JSON pointer and a good document pays nothing for it.
"""

import marshal
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from kiln.runtime.errors import SchemaError

T = TypeVar("T")
K = TypeVar("K")
Reader = Callable[[Any], T]


class Mismatch(Exception):
    """A value that is not what the schema expects; `path` is filled from the inside out."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = found
        self.path: list[str | int] = []

    @property
    def pointer(self) -> str:
        """Where the value stood, as a JSON pointer."""
        return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in reversed(self.path)) or "/"


def read(reader: Reader[T], value: Any, what: str) -> T:
    """`reader(value)`, with a mismatch told as a SchemaError about the document `what`."""
    try:
        return reader(value)
    except Mismatch as m:
        raise SchemaError(f"{what} at {m.pointer}: found {shown(m.found)}, expected {m.expected}.") from None


def shown(value: object) -> str:
    """A short rendering of a value that may be huge or hostile."""
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} values"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def record(
    build: Callable[..., T],
    fields: Mapping[str, Reader[Any]],
    optional: Mapping[str, Reader[Any]] = {},
    alike: Collection[str] = (),
) -> Reader[T]:
    """An object with exactly these fields, each read by its reader and passed to `build` by name; those of
    `optional`, which `build` has defaults for, may be absent. The fields `alike` are the same in many
    objects: they are read after the others, together and `once`."""
    names = frozenset(fields)
    every = {**fields, **optional}
    own = {name: inner for name, inner in every.items() if name not in alike}
    shared = once(lambda value: _read_fields(value, {name: fields[name] for name in alike}))

    def reader(value: Any) -> T:
        if type(value) is not dict:
            raise Mismatch("an object", value)
        if value.keys() != names and not names <= value.keys() <= every.keys():
            _refuse_keys(value, names, frozenset(every))
        out = _read_fields(value, own)
        return build(**out, **shared({name: value[name] for name in alike})) if alike else build(**out)

    return reader


def _read_fields(value: dict[str, Any], fields: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    """Those of the fields that are there, read."""
    out = {}
    for name, inner in fields.items():
        if name not in value:
            continue
        try:
            out[name] = inner(value[name])
        except Mismatch as m:
            m.path.append(name)
            raise
    return out


def _refuse_keys(value: dict[str, Any], names: frozenset[str], every: frozenset[str]) -> None:
    unknown, missing = sorted(value.keys() - every), sorted(names - value.keys())
    if unknown:
        raise Mismatch(f"only the fields {', '.join(sorted(every))}", f"unknown field {unknown[0]}")
    raise Mismatch(f"the field {missing[0]!r}", "an object without it")


def tagged(tag: str, choices: Mapping[str, Reader[T]]) -> Reader[T]:
    """An object whose field `tag` says which reader it is for."""

    def reader(value: Any) -> T:
        if type(value) is not dict or tag not in value:
            raise Mismatch(f"an object with the field {tag!r}", value)
        kind = value[tag]
        if type(kind) is not str or kind not in choices:
            mismatch = Mismatch("one of " + ", ".join(choices), kind)
            mismatch.path.append(tag)
            raise mismatch
        return choices[kind](value)

    return reader


def array(item: Reader[T], most: int, least: int = 0) -> Reader[tuple[T, ...]]:
    """A list of `least` to `most` values that `item` reads."""

    def reader(value: Any) -> tuple[T, ...]:
        if type(value) is not list and type(value) is not tuple:
            raise Mismatch("a list", value)
        if not least <= len(value) <= most:
            raise Mismatch(f"a list of {least} to {most} values", value)
        out = []
        for i, v in enumerate(value):
            try:
                out.append(item(v))
            except Mismatch as m:
                m.path.append(i)
                raise
        return tuple(out)

    return reader


def mapping(key: Reader[str], item: Reader[T], most: int) -> Reader[dict[str, T]]:
    """An object of at most `most` fields whose names `key` reads and whose values `item` reads."""

    def reader(value: Any) -> dict[str, T]:
        if type(value) is not dict:
            raise Mismatch("an object", value)
        if len(value) > most:
            raise Mismatch(f"an object of at most {most} fields", value)
        out = {}
        for name, v in value.items():
            try:
                out[key(name)] = item(v)
            except Mismatch as m:
                m.path.append(name)
                raise
        return out

    return reader


def text(pattern: str, what: str, most: int = 255) -> Reader[str]:
    """A string of at most `most` characters that matches `pattern` whole; `what` names it."""
    match = re.compile(pattern, re.ASCII).fullmatch

    def reader(value: Any) -> str:
        if type(value) is not str or len(value) > most or match(value) is None:
            raise Mismatch(what, value)
        return value

    return reader


def integer(low: int, high: int) -> Reader[int]:
    """An integer (not a bool, not 1.0) in [low, high]."""

    def reader(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Mismatch(f"an integer from {low} to {high}", value)
        return value

    return reader


def number(value: Any) -> int | float:
    """A finite number, as it was written."""
    if type(value) is int or type(value) is float:
        return value
    raise Mismatch("a number", value)


def attr_value(value: Any) -> bool | int | str:
    """A constant of a call: true, false, an integer or a string; the C runtime's strings end at a NUL."""
    if type(value) in (bool, int) or (type(value) is str and "\0" not in value):
        found: bool | int | str = value
        return found
    raise Mismatch("true, false, an integer or a string without NUL", value)


def boolean(value: Any) -> bool:
    """true or false."""
    if type(value) is not bool:
        raise Mismatch("true or false", value)
    return value


def choice(*values: Any) -> Reader[Any]:
    """One of a few strings or integers."""
    legal = {(type(v), v) for v in values}
    listed = "one of " + ", ".join(repr(v) for v in values) if len(values) > 1 else repr(values[0])

    def reader(value: Any) -> Any:
        if type(value) not in (str, int, bool) or (type(value), value) not in legal:
            raise Mismatch(listed, value)
        return value

    return reader


def once(inner: Reader[T], most: int = 4096) -> Reader[T]:
    """What `inner` reads, but equal values are read once and share the result, which nobody may change.

    The 12 manifests of a whole tree hold 3389 lists of parameters, of which 310 differ: reading takes 0.4 of
    the time so. Big values are not remembered, and `most` of the others at once.
    """
    known: dict[bytes, object] = {}

    def reader(value: Any) -> T:
        try:
            key = marshal.dumps(value, 2)  # 1, 1.0 and true differ in it, and so do lists and tuples
        except ValueError:
            return inner(value)
        there = known.get(key, _ABSENT)
        if there is not _ABSENT:
            return cast(T, there)
        found = inner(value)
        if len(key) <= _REMEMBERED:
            if len(known) >= most:
                known.clear()
            known[key] = found
        return found

    return reader


_ABSENT = object()
_REMEMBERED = 1 << 14
"""Bytes of a value that `once` remembers at most."""


def nullable(item: Reader[T]) -> Reader[T | None]:
    """null, or what `item` reads."""
    return lambda value: None if value is None else item(value)
