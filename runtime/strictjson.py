"""Strict JSON: the one reading on which every implementation agrees.

Python's `json` accepts byte order marks, UTF-16, NaN, duplicate keys and lone surrogates, and a few bytes
can cost it a lot of
memory. A manifest that two readers could understand differently is refused.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from kiln.runtime.errors import SchemaError

MAX_BYTES = 16 << 20
"""Default cap on a document's size."""
MAX_VALUES = 2_000_000
"""Cap on the number of values in a document, containers included."""
MAX_DEPTH = 64
"""Cap on nesting; expressions in manifests have a lower one of their own."""

_SURROGATE = re.compile(rb"\\[uU][dD][89a-fA-F]")
_INT64 = 1 << 63
_UINT64_DIGITS = 20


class _Refused(ValueError):
    pass


def parse(data: bytes, what: str, max_bytes: int = MAX_BYTES) -> Any:
    """The value of one JSON document in `data`; `what` names it in errors.

    Raises:
        SchemaError: over the size, count or depth cap, not UTF-8, a byte order mark, carriage returns,
            duplicate keys, NaN or
            infinities, integers over 64 bits, lone surrogates, or anything after the document.
    """
    if len(data) > max_bytes:
        raise SchemaError(f"{what}: found {len(data)} bytes, expected at most {max_bytes}; rebuild the tree.")
    try:
        text = _decode(data)
        _count(data)
        value = _read(data, text)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise SchemaError(f"{what}: nested deeper than {MAX_DEPTH} levels; rebuild the tree.") from None
    except UnicodeEncodeError:
        raise SchemaError(
            f"{what}: a string holds half of a surrogate pair; expected Unicode text."
        ) from None
    except json.JSONDecodeError as e:
        raise SchemaError(f"{what}: not JSON at line {e.lineno}, column {e.colno}: {e.msg}.") from None
    except _Refused as e:
        raise SchemaError(f"{what}: {e}") from None
    return value


def canonical(value: object) -> bytes:
    """`value` as canonical JSON: sorted keys, two-space indent, ASCII, one trailing newline; tuples become
    lists. A list without objects stands on one line, and so does an object of plain values in 110 characters:
    expressions and parameters read as one, a change is one line, and manifests are a third of the size.

    Raises:
        ValueError: a float that JSON cannot hold.
    """
    return (_canonical(value, "\n") + "\n").encode("ascii")


def tabular(value: Mapping[str, object], levels: int = 1) -> bytes:
    """An object as JSON like `canonical`'s, but each entry of the tables that it holds, `levels` below it, is
    one line without spaces, and so is each object of a list that such an entry is: a change of a kernel is
    one line, and manifests are a quarter smaller.

    Raises:
        ValueError: a float that JSON cannot hold.
    """
    return (_table(value, levels, "\n") + "\n").encode("ascii")


def _table(value: object, levels: int, newline: str) -> str:
    inner = newline + "  "
    if isinstance(value, Mapping) and value and levels >= 0:
        items = [f"{_quoted(k)}: {_table(value[k], levels - 1, inner)}" for k in sorted(value)]
        return "{" + inner + f",{inner}".join(items) + newline + "}"
    if isinstance(value, _LISTS) and any(isinstance(v, dict) for v in value):
        return "[" + inner + f",{inner}".join(map(dense, value)) + newline + "]"
    return dense(value) if levels < 0 else _encode(value)


LINE = 110
"""Characters of an object on one line."""


def _canonical(value: object, newline: str) -> str:
    if isinstance(value, str):
        return _quoted(value)
    inner = newline + "  "
    if isinstance(value, dict):
        if (line := _on_one_line(value, value.values(), 1)) is not None and len(line) <= LINE:
            return line
        items = [f"{_quoted(k)}: {_canonical(value[k], inner)}" for k in sorted(value)]
        return "{" + inner + f",{inner}".join(items) + newline + "}" if items else "{}"
    if isinstance(value, _LISTS):
        if (line := _on_one_line(value, value, 0)) is not None:
            return line
        return "[" + inner + f",{inner}".join([_canonical(v, inner) for v in value]) + newline + "]"
    # An encoder sets itself up for each call: 2 us an integer, 0.2 so.
    return int.__repr__(value) if type(value) is int else _encode(value)


def _on_one_line(value: object, inner: Collection[object], braces: int) -> str | None:
    """The text of a container if no object is in it; it has `braces` of its own.

    Most are told apart by what they hold directly, or by the braces in their text: both are looked for in C.
    """
    if dict in map(type, inner) and not all(map(_is_plain, inner)):
        return None
    line = _encode(value)
    return line if line.count("{") == braces or all(map(_is_plain, inner)) else None


def _is_plain(value: object) -> bool:
    """Whether no object is in the value, itself included; an empty one is plain."""
    if isinstance(value, dict):
        return not value
    return not isinstance(value, _LISTS) or all(map(_is_plain, value))


_LISTS = (list, tuple)
_quoted = json.encoder.encode_basestring_ascii
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, sort_keys=True, check_circular=False).encode
dense = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, sort_keys=True, check_circular=False, separators=(",", ":")
).encode
"""dense(value) -> str: JSON on one line, without spaces."""


def _decode(data: bytes) -> str:
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise _Refused("starts with a byte order mark; expected plain UTF-8.")
    if b"\0" in data:
        raise _Refused("holds a NUL byte; expected plain UTF-8 text.")
    if b"\r" in data:
        raise _Refused("holds a carriage return; expected lines that end in a newline alone.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _Refused(f"byte {e.start} is not UTF-8; expected plain UTF-8 text.") from None


def _count(data: bytes) -> None:
    # An upper bound on the values, taken before any of them is allocated.
    values = data.count(b",") + data.count(b"[") + data.count(b"{") + 1
    if values > MAX_VALUES:
        raise _Refused(f"about {values} values; expected at most {MAX_VALUES}.")


def _read(data: bytes, text: str) -> Any:
    """The document, by C code alone where that is enough: 12 manifests take 0.32 s so, and 0.48 with a call
    for each object and integer.

    A field has a string and a colon. Where no more stand in the text than the value has fields, no key stood
    twice. Strings may hold more of them, and spaces may stand between them: then each is looked at.
    """
    if _LONG not in b" " + data.translate(_CLASSES) and _SPACED.search(data) is None:
        value = json.loads(text, parse_constant=_constant, parse_float=_number)
        if _measure(value) == data.count(b'":'):
            return value
    value = json.loads(
        text, object_pairs_hook=_unique, parse_constant=_constant, parse_int=_integer, parse_float=_number
    )
    _measure(value)
    return value


_CLASSES = bytes(
    ord("0" if chr(c) in "0123456789" else " " if chr(c) in "[,:- \t\n" else ".") for c in range(256)
)
_LONG = b" " + 19 * b"0"
"""How an integer over 64 bits starts, by classes of its bytes; digits in a digest stand after a quote or a
letter. An expression that looks for it takes ten times as long."""
_SPACED = re.compile(rb'"[ \t\n\r]+:')


def _measure(value: Any) -> int:
    """Fields of all objects in a document."""
    level = [value] if isinstance(value, dict | list) else []
    depth = count = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels.")
        count += sum(map(len, [node for node in level if type(node) is dict]))
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
    return count


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"the key {twice!r} stands twice in one object; expected each key once.")
    return found


def _constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number; expected a finite one.")


def _integer(text: str) -> int:
    if len(text) <= _UINT64_DIGITS:
        value = int(text)
        if -_INT64 <= value < _INT64:
            return value
    raise _Refused(f"the integer {text[:24]} does not fit 64 bits; expected a smaller one.")


def _number(text: str) -> float:
    value = float(text) if len(text) <= 64 else math.inf
    if math.isinf(value):
        raise _Refused(f"the number {text[:24]} is no finite double; expected a smaller one.")
    return value
