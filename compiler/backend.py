"""What a backend offers the compiler: it plans jobs cheaply, and a worker runs each job to artifact bytes
and manifest entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kiln.ir.spec import Op


@dataclass(frozen=True)
class Job:
    """One compilation. `inputs_digest` covers everything that determines its bytes; `payload` is plain
    data, so that any executor can carry it.
    """

    target: str
    op: str
    variant: str
    inputs_digest: str
    runner: str
    """`module:function` that a worker calls with the job."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    selections: tuple[Mapping[str, Any], ...] = ()
    """Where the kernel is used, which its bytes do not depend on: for each manifest entry that is made of the
    one compiled, its variant, `when`, `priority`, and `tuned`, what the choice rests on. None: the entries
    stand as the worker makes them."""


@dataclass(frozen=True)
class Built:
    """A job's result: complete manifest kernel entries, the artifact files they name, sources shipped
    beside them.
    """

    kernels: tuple[dict[str, Any], ...]
    files: Mapping[str, bytes]
    sources: Mapping[str, bytes] = field(default_factory=dict)


def as_selected(job: Job, built: Built) -> Built:
    """The result with the entries that the job's selections ask for."""
    if not job.selections or not built.kernels:
        return built
    entries = tuple(_selected(built.kernels[0], selection) for selection in job.selections)
    return Built(entries, built.files, built.sources)


def _selected(entry: Mapping[str, Any], selection: Mapping[str, Any]) -> dict[str, Any]:
    tuned = selection["tuned"]
    constants = {k: v for k, v in entry["specialization"].items() if k != TUNED}
    fields = {name: selection[name] for name in ("variant", "when", "priority")}
    return {**entry, **fields, "specialization": constants if tuned is None else {**constants, TUNED: tuned}}


TUNED = "tuned"
"""The key of a manifest entry's specialization that says what its choice rests on."""


class Backend(Protocol):
    """Who compiles for a kind of target. A backend knows no op by name."""

    name: str

    def targets(self) -> tuple[str, ...]:
        """Targets it compiles for."""
        ...

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        """Every artifact the catalog's declarations ask for; cheap: neither MLIR nor a compiler is
        imported.
        """
        ...

    def recipes(self, ops: Mapping[str, Op], catalogs: Sequence[str]) -> list[dict[str, Any]]:
        """The manifest's PLAN entries: composites of recipes, ops of several launches."""
        ...

    def toolchain(self, target: str) -> dict[str, str]:
        """Name -> version of everything that takes part."""
        ...

    def stale_samples(
        self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str
    ) -> list[tuple[str, str]]:
        """(kernel, sentence) for what was measured of kernels that are not what they were."""
        ...
