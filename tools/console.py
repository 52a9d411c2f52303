"""What every command prints with: one JSON document or text on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Cell = str | int | float | None


class UsageError(Exception):
    """A command line that can't be carried out as typed."""


def emit(args: argparse.Namespace, document: Any, text: str | Callable[[], str]) -> None:
    """Print the answer: `document` with --json, else `text`."""
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        shown = text if isinstance(text, str) else text()
        print(shown, end="" if shown.endswith("\n") else "\n")


def note(message: str) -> None:
    """Tell the person something that isn't part of the answer."""
    print(message, file=sys.stderr, flush=True)


def nearest(found: str, known: Iterable[str], what: str) -> str:
    """A sentence: `found` is no `what`, what was probably meant, what there is.

    >>> nearest("rms_nrom", ["rms_norm", "silu"], "op")
    "no op 'rms_nrom'; did you mean rms_norm?"
    >>> nearest("x", ["sm_80", "sm_90a"], "target")
    "no target 'x'; there are sm_80, sm_90a"
    """
    names = list(known)
    close = difflib.get_close_matches(found, names, n=3, cutoff=0.6)
    if close:
        return f"no {what} {found!r}; did you mean {' or '.join(close)}?"
    if not names:
        return f"no {what} {found!r}; there is none"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"no {what} {found!r}; there are {', '.join(names[:12])}{more}"


def require(found: Iterable[str], known: Iterable[str], what: str) -> None:
    """UsageError for the first name that is unknown."""
    names = list(known)
    for name in found:
        if name not in names:
            raise UsageError(nearest(name, names, what))


def width() -> int | None:
    """Columns of the terminal stdout is; None where lines need not be cut."""
    if not sys.stdout.isatty():
        return None
    columns = shutil.get_terminal_size((100, 24)).columns
    return columns if columns >= 20 else None


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], limit: int | None = None) -> str:
    """Aligned columns, numbers to the right, lines cut at `limit` columns.

    >>> print(table(["op", "regs"], [["rms_norm", 40], ["silu", None]]))
    op        regs
    rms_norm    40
    silu         -
    """
    cells = [[_shown(c) for c in row] for row in rows]
    numeric = [any(_is_number(r[i]) for r in rows) for i in range(len(headers))]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = []
    for row in [list(headers), *cells]:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        lines.append(cut("  ".join(padded).rstrip(), limit))
    return "\n".join(lines)


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def cut(line: str, limit: int | None) -> str:
    """The line, shortened to `limit` columns.

    >>> cut("abcdef", 4)
    'abc…'
    """
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def size(count: int) -> str:
    """A number of bytes for people.

    >>> size(512), size(20480), size(5 << 20)
    ('512 B', '20.0 KiB', '5.0 MiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def plural(count: int, noun: str) -> str:
    """The count with its noun.

    >>> plural(1, "kernel"), plural(2, "entry")
    ('1 kernel', '2 entries')
    """
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun if count == 1 else many}"
