"""Giving several things back when each may fail."""

from collections.abc import Callable, Iterable


def every(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, whatever the others raise; then raise the first error, if any."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as e:
            first = first or e
    if first is not None:
        try:
            raise first
        finally:
            # Else the error would hold this frame, which holds it, and arrays of its callers with it.
            del first
