"""Progress of a build on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kiln.compiler.pipeline import Progress
from kiln.tools.console import note

EVERY = 5.0
"""Seconds between two lines where stderr is no terminal."""


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """The callback for `build` and `check`."""
    if sys.stderr.isatty():
        with _bar() as callback:
            yield callback
    else:
        yield _lines()


def name(event: Progress) -> str:
    """The kernel of an event."""
    return f"{event.job.target} {event.job.op}.{event.job.variant}"


def _lines() -> Callable[[Progress], None]:
    last = time.monotonic()

    def tell(event: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if event.state == "failed" or now - last >= EVERY:
            last = now
            note(f"[{event.done}/{event.total}] {name(event)} {event.state}")

    return tell


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # Without a width of ours, rich believes a terminal that says it has 0 columns.
    console = Console(stderr=True, width=max(shutil.get_terminal_size().columns, 20))
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    kernel = TextColumn("{task.fields[kernel]}", markup=False, table_column=rest)
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), kernel)
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=None, kernel="planning")

        def tell(event: Progress) -> None:
            bar.update(task, total=event.total, completed=event.done, kernel=name(event))
            if event.state == "failed":
                bar.console.print(f"{name(event)} failed", markup=False)

        yield tell
