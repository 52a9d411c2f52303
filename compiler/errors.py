"""Errors of building and checking artifact trees. What they refuse leaves the tree on disk as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kiln.runtime.errors import KilnError


class BuildError(KilnError):
    """A tree could not be built or written."""


class OutputError(BuildError):
    """The output folder can't be used: not Kiln's, inside the sources, in use, or not writable."""


class CheckError(KilnError):
    """A tree could not be compared with its sources."""


@dataclass(frozen=True)
class Failure:
    """One kernel that could not be built."""

    target: str
    op: str
    variant: str
    why: str

    def __str__(self) -> str:
        return f"{self.target} {self.op}.{self.variant}: {self.why}"


class FailedJobs(BuildError):
    """Kernels that could not be built. Targets without failures were written; those with failures are as they
    were.

    Attributes:
        failures: one for each kernel, by target, op and variant.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.target, f.op, f.variant)))
        targets = sorted({f.target for f in self.failures})
        count = f"{len(self.failures)} kernel{'s' if len(self.failures) != 1 else ''} could not be built"
        kept = f"nothing was written for {', '.join(targets)}"
        super().__init__("\n  ".join([f"{count}; {kept}:", *map(str, self.failures)]))

    def __reduce__(self) -> tuple[type[FailedJobs], tuple[Sequence[Failure]]]:
        return type(self), (self.failures,)
