"""Whose fault an error in a body is: file:line:column of the statement, the line itself, and what to write
instead, for whatever a body may raise."""

from __future__ import annotations

import difflib
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple

from kiln.ir import language
from kiln.ir.diagnostics import DeclarationError, TypeCheckError
from kiln.ir.spec import Op

_LANGUAGE = Path(language.__file__).parent
"""Frames below a body: the functions that it calls."""


class Spot(NamedTuple):
    """A piece of a source line; columns from 1, `end` behind the last."""

    file: str
    line: int
    column: int
    end: int

    @property
    def text(self) -> str:
        """What stands there."""
        return linecache.getline(self.file, self.line).rstrip()[self.column - 1 : self.end - 1]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def shown(self) -> str:
        """The line, and marks under the piece; empty where the source is not at hand."""
        line = linecache.getline(self.file, self.line).rstrip()
        indent = len(line) - len(line.lstrip())
        marks = " " * (self.column - 1 - indent) + "^" * max(self.end - self.column, 1)
        return f"\n    {line.lstrip()}\n    {marks}" if line else ""


def parameters_fault(function: Callable[..., Any], op: Op) -> str | None:
    """Why a body or reference cannot be called with the op's operands, which are given by name."""
    given = [t.name for t in op.inputs] + [s.name for s in op.scalars] + [a.name for a in op.attrs]
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as wrong:
        kind = "body" if function is op.body else "reference"
        return (
            f"its {kind} is {function.__name__}{signature}: {wrong}; it is called by name with "
            f"{', '.join(given)} (the tensors that are read, scalars, attributes)"
        )
    return None


def blamed(error: Exception, op: Op, location: str) -> DeclarationError:
    """The error as one of the declaration, where the body made it.

    Args:
        location: of the body, for an error that no statement of it made.
    """
    if isinstance(error, DeclarationError):
        spot = _spot(error.__traceback__, error.location or None)
        where = error.location or location
        return type(error)(
            error.message + _hint(error, spot) + (spot.shown() if spot else ""), str(spot or where)
        )
    spot = _spot(error.__traceback__, None)
    said = f"op {op.name}: its body fails with {type(error).__name__}: {error}{_hint(error, spot)}"
    return TypeCheckError(said + (spot.shown() if spot else ""), str(spot or location))


def _spot(traceback: TracebackType | None, location: str | None) -> Spot | None:
    """The innermost statement of a body, or the one at `location`."""
    found = None
    for code, lasti, line in _frames(traceback):
        if location is None and _LANGUAGE in Path(code.co_filename).parents:
            continue
        if location is None or location == f"{code.co_filename}:{line}":
            found = _at(code, lasti, line)
    return found


def _frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, int, int]]:
    own = Path(__file__).parent
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if own not in Path(code.co_filename).parents:
            yield code, traceback.tb_lasti, traceback.tb_lineno
        traceback = traceback.tb_next


def _at(code: CodeType, lasti: int, line: int) -> Spot:
    first, last, column, end = next(islice(code.co_positions(), lasti // 2, None), (line, line, 0, 1))
    text = linecache.getline(code.co_filename, line)
    start = 0 if column is None else _characters(text, column)
    stop = _characters(text, end) if first == last and end is not None else len(text.rstrip())
    return Spot(code.co_filename, line, start + 1, stop + 1)


def _characters(text: str, count: int) -> int:
    """Characters in the first `count` bytes: what Python counts columns in."""
    return len(text.encode()[:count].decode(errors="ignore"))


def _hint(error: Exception, spot: Spot | None) -> str:
    if isinstance(error, TypeCheckError):
        called = re.match(r"(max|min)\(", spot.text) if spot else None
        return f"; {called[1]}imum() instead of {called[1]}()" if called else ""
    is_about_values = "Value" in str(error) or isinstance(error, NameError)
    if isinstance(error, DeclarationError) or not is_about_values:
        return ""
    wanted = getattr(error, "name", None) or ""
    near = difflib.get_close_matches(wanted, _words(), 3) or [w for w in _words() if wanted and wanted in w]
    has = f"kiln.ir.language has {', '.join(near)}" if near else "bodies are written with kiln.ir.language"
    return f"; {has}"


def _words() -> list[str]:
    """Functions of the tensor language."""
    functions = inspect.getmembers(language, inspect.isfunction)
    return [n for n, f in functions if f.__module__ == language.__name__ and not n.startswith("_")]
