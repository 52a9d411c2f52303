"""Errors of building and checking artifact trees. What they refuse leaves the tree on disk as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiln.runtime.errors import KilnError

if TYPE_CHECKING:
    from kiln.compiler.report import BuildReport


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
        failures: every reason, by target, op and variant.
        report: what the build did apart from them; None if it is not known.
    """

    def __init__(self, failures: Sequence[Failure], report: BuildReport | None = None) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.target, f.op, f.variant)))
        self.report = report
        targets = sorted({f.target for f in self.failures})
        kernels = len({(f.target, f.op, f.variant) for f in self.failures})
        count = f"{kernels} kernel{'s' if kernels != 1 else ''} could not be built"
        head = [count, f"nothing was written for {', '.join(targets)}"]
        if report is not None:
            head.append(outlook(report.not_kept))
        super().__init__("\n  ".join(["; ".join(head) + ":", *map(str, self.failures)]))

    def __reduce__(self) -> tuple[type[FailedJobs], tuple[Sequence[Failure], BuildReport | None]]:
        return type(self), (self.failures, self.report)


def outlook(not_kept: str) -> str:
    """What the next build will do with finished kernels that are in no tree; `not_kept` as in a report."""
    if not_kept:
        return f"finished kernels could not be kept for the next build ({not_kept})"
    return "finished kernels are kept for the next build"
