"""What calls of one shape do, and the checks that are left for each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from kiln.runtime.alias import Overlap, check_overlaps
from kiln.runtime.bind import Output
from kiln.runtime.device import Args, Launcher
from kiln.runtime.plan import PlanLauncher
from kiln.runtime.provided import CountingLauncher, ProviderLauncher
from kiln.runtime.select import Candidate

Kind = Literal["scratch_bytes", "zeroed_bytes"]
"""The attribute of a launcher that tells how much it needs of one kind of scratch."""


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
        inner = _counted(self.launcher)
        return inner if isinstance(inner, PlanLauncher) else None

    def blocks(self, args: Args, kind: Kind) -> list[int]:
        """Sizes of the blocks of one kind of scratch that a call may hold at once: one, and more where a
        step's provider declines."""
        return _blocks(self.launcher, args, attrgetter(kind))

    def check(self, pointers: Sequence[int]) -> None:
        """Refuse a call whose written operands share memory with others, in itself or in a step of its plan.

        Raises:
            ContractError: naming the two operands.
        """
        check_overlaps(self.op, self.overlaps, pointers)
        if self._plan is not None:
            self._plan.check(pointers)


def _counted(launcher: Launcher | None) -> Launcher | None:
    """A launcher without its counter."""
    return launcher.inner if isinstance(launcher, CountingLauncher) else launcher


def _blocks(launcher: Launcher | None, args: Args, size: Callable[[Launcher], int]) -> list[int]:
    if launcher is None:
        return []
    own = size(launcher)
    return [*([own] if own else []), *_more_blocks(launcher, args, size)]


def _more_blocks(launcher: Launcher, args: Args, size: Callable[[Launcher], int]) -> list[int]:
    """Those of what runs after a decline: it takes a block for itself."""
    inner = _counted(launcher)
    if isinstance(inner, ProviderLauncher):
        return _blocks(inner.below(args), args, size)
    steps = inner.runs(args) if isinstance(inner, PlanLauncher) else []
    found = [_more_blocks(step, values, size) for step, values in steps]
    # Steps run one after another: as many as the one with most, each as large as the largest of any.
    largest = max((n for sizes in found for n in sizes), default=0)
    return [largest] * max(map(len, found), default=0)
