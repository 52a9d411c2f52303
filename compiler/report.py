"""What a build did, for whoever asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiln.compiler.content import State, TargetPlan
from kiln.compiler.errors import Failure
from kiln.compiler.tree import Written


@dataclass(frozen=True)
class KernelReport:
    """One kernel of a build."""

    target: str
    op: str
    variant: str
    state: State
    seconds: float
    """Of its job."""
    entry: Mapping[str, Any]
    """Its manifest entry."""


@dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    out: Path
    root_digest: str
    """"sha256:…" of INDEX.json; "" if no target could be written."""
    generation: int
    """0 if no target could be written."""
    kernels: tuple[KernelReport, ...]
    """By target, op and variant; of targets that failed too."""
    changed: tuple[str, ...]
    """Targets whose folders were replaced."""
    unserved: tuple[str, ...] = ()
    """Composites that a target can't run, each with the op that it has no realization of."""
    signature_removed: bool = False
    """Whether the tree was signed before and is not any more."""
    failures: tuple[Failure, ...] = ()
    """Kernels that could not be built, whose targets are as they were."""
    not_kept: str = ""
    """Why finished kernels of those targets could not be kept for the next build; "" if they are."""


def report_of(
    plans: Iterable[TargetPlan], out: Path, written: Written | None, not_kept: str = ""
) -> BuildReport:
    """The report of plans that have run; `written` is None if no target could be."""
    ran = list(plans)
    kernels = sorted((k for plan in ran for k in _kernels(plan)), key=lambda k: (k.target, k.op, k.variant))
    done = written or Written("", 0, ())
    return BuildReport(
        out,
        done.root_digest,
        done.generation,
        tuple(kernels),
        done.changed,
        tuple(sentence for plan in ran for sentence in plan.unserved),
        done.signature_removed,
        tuple(failure for plan in ran for failure in plan.failures),
        not_kept,
    )


def _kernels(plan: TargetPlan) -> Iterator[KernelReport]:
    for (op, _), (built, state, seconds) in plan.results.items():
        for entry in built.kernels:
            yield KernelReport(plan.target, op, entry["variant"], state, seconds, entry)
