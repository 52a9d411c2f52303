"""What calls of one shape do, and the checks that are left for each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kiln.runtime.alias import Overlap, check_overlaps
from kiln.runtime.bind import Output
from kiln.runtime.device import Launcher
from kiln.runtime.plan import PlanLauncher
from kiln.runtime.provided import CountingLauncher
from kiln.runtime.select import Candidate


@dataclass(slots=True)
class Decision:
    """What a call of one shape does.

    Attributes:
        op: its name.
        candidate: what runs; None where there is nothing to compute.
        launcher: how.
        outputs: (tensor position, what to allocate).
        overlaps: pairs of operands whose addresses must be compared.
        count: the counter of the candidate.
    """

    op: str
    candidate: Candidate | None
    launcher: Launcher | None
    outputs: tuple[tuple[int, Output], ...]
    overlaps: tuple[Overlap, ...]
    count: list[int]

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.op if self.candidate is None else f"{self.op}.{self.candidate.variant}"

    @property
    def checks(self) -> bool:
        """Whether addresses must be compared at all."""
        return bool(self.overlaps) or self._plan is not None

    @property
    def _plan(self) -> PlanLauncher | None:
        inner = self.launcher.inner if isinstance(self.launcher, CountingLauncher) else self.launcher
        return inner if isinstance(inner, PlanLauncher) else None

    def check(self, pointers: Sequence[int]) -> None:
        """Refuse a call whose written operands share memory with others, in itself or in a step of its plan.

        Raises:
            ContractError: naming the two operands.
        """
        check_overlaps(self.op, self.overlaps, pointers)
        if self._plan is not None:
            self._plan.check(pointers)
