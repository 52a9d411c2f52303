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


@dataclass(frozen=True)
class Built:
    """A job's result: complete manifest kernel entries, the artifact files they name, sources shipped
    beside them.
    """

    kernels: tuple[dict[str, Any], ...]
    files: Mapping[str, bytes]
    sources: Mapping[str, bytes] = field(default_factory=dict)


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
