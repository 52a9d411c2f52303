"""Calls derived from a tree's manifests: for every kernel and plan, ragged, strided and aliased ones that
select exactly it."""

from collections.abc import Iterator

from kiln.runtime.entities import Kernel
from kiln.runtime.load import Library
from kiln.tools.cases import Case, Deriver, Judge

_DERIVED: dict[object, list[Case]] = {}
"""By what they depend on. Those of sm_90a take 20 s of CPU time, and two tests ask for them."""


def cases(library: Library, target: str) -> list[Case]:
    """Every case of every candidate that the library's device may run."""
    device = library.device
    may_run = tuple(device.refusal(k) is None for k in library.manifests[target].kernels)
    key = tuple(r.digest for r in library.roots), target, device.ordinal, may_run
    if key not in _DERIVED:
        _DERIVED[key] = list(_derived(library, target))
    return _DERIVED[key]


def _derived(library: Library, target: str) -> Iterator[Case]:
    for name in library.manifests[target].ops:
        operation = library.operation(target, name)
        judge = Judge(operation, library.device.ordinal)
        for candidate in operation.candidates:
            if isinstance(candidate, Kernel) and library.device.refusal(candidate) is not None:
                continue
            for _, case in Deriver(judge, candidate).cases():
                yield case
