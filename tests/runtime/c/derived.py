"""Calls derived from a tree's manifests: for every kernel and plan, ragged, strided and aliased ones that
select exactly it."""

from collections.abc import Iterator

from kiln.runtime.entities import Kernel
from kiln.runtime.load import Library
from kiln.tools.cases import Case, Deriver, Judge


def cases(library: Library, target: str) -> Iterator[Case]:
    """Every case of every candidate that the library's device may run."""
    for name in library.manifests[target].ops:
        operation = library.operation(target, name)
        judge = Judge(operation, library.device.ordinal)
        for candidate in operation.candidates:
            if isinstance(candidate, Kernel) and library.device.refusal(candidate) is not None:
                continue
            for _, case in Deriver(judge, candidate).cases():
                yield case
