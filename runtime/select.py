"""Which candidate runs a call: a fixed order, a reason for every one that is passed over, and no silent
fallback."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kiln.runtime.bind import Bound
from kiln.runtime.device import Device
from kiln.runtime.entities import Kernel, Plan
from kiln.runtime.errors import SelectionError
from kiln.runtime.expr import why_not
from kiln.runtime.recipe import why_not_params
from kiln.runtime.targets import tier_rank

Candidate = Kernel | Plan

TIER_ORDER = {"fast": 0, "fused": 1, "generated": 2, "primitive": 2, "composite": 3}
"""Lower runs first."""


class Wanted(NamedTuple):
    """What the caller asks for beyond the operands.

    Attributes:
        mode: "exact", or "fast" to let kernels with an envelope contract go first.
        tier, variant, isa: candidates other than these are passed over.
    """

    mode: str = "exact"
    tier: str | None = None
    variant: str | None = None
    isa: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate and why it was passed over; `why` is None for one that may run."""

    variant: str
    tier: str
    isa: str | None
    why: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every candidate of a call in order; the first without a reason is the one that runs."""

    op: str
    device: str
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        """The candidate that runs, if any."""
        return next((v for v in self.verdicts if v.why is None), None)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}:"]
        running = self.chosen
        for v in self.verdicts:
            kind = v.tier if v.isa is None else f"{v.tier}, {v.isa}"
            fate = "runs" if v is running else "could run" if v.why is None else v.why
            lines.append(f"  {v.variant} ({kind}): {fate}")
        return "\n".join(lines if self.verdicts else [*lines, "  no candidates"])


def ordered(candidates: Iterable[Candidate], target: str) -> tuple[Candidate, ...]:
    """Candidates in the order in which they are tried: tier, ISA tier, priority, name."""
    return tuple(
        sorted(candidates, key=lambda c: (TIER_ORDER[c.tier], -_isa_rank(c, target), -c.priority, c.variant))
    )


def _isa_rank(c: Candidate, target: str) -> int:
    return tier_rank(target, c.isa.tier) if isinstance(c, Kernel) and c.isa is not None else 0


def in_mode(candidates: Sequence[Candidate], mode: str) -> list[Candidate]:
    """The same candidates, those of the fast mode first if that is asked for."""
    return sorted(candidates, key=lambda c: c.mode != "fast") if mode == "fast" else list(candidates)


def why_passed(c: Candidate, wanted: Wanted, disabled: frozenset[str], device: Device) -> str | None:
    """Why a candidate is out before any operand is looked at."""
    isa = c.isa.tier if isinstance(c, Kernel) and c.isa is not None else None
    if c.mode == "fast" and wanted.mode != "fast":
        return 'of the fast mode, which is asked for with mode="fast"'
    if wanted.tier is not None and c.tier != wanted.tier:
        return f"tier {wanted.tier} was asked for"
    if wanted.variant is not None and c.variant != wanted.variant:
        return f"variant {wanted.variant} was asked for"
    if wanted.isa is not None and isinstance(c, Kernel) and isa != wanted.isa:
        return f"ISA tier {wanted.isa} was asked for"
    off = disabled & {c.op, c.variant, f"{c.op}.{c.variant}", c.tier, isa or ""}
    if off:
        return f"disabled by KILN_DISABLE={sorted(off)[0]}"
    return device.refusal(c) if isinstance(c, Kernel) else None


def why_not_call(c: Candidate, bound: Bound, check_plan: Callable[[Plan], str | None]) -> str | None:
    """Why a candidate cannot run this call's operands."""
    why = why_not(c.when, bound.env)
    if why is not None:
        return why
    return why_not_params(c, bound) if isinstance(c, Kernel) else check_plan(c)


def verdict(c: Candidate, why: str | None) -> Verdict:
    """A candidate's verdict."""
    isa = c.isa.tier if isinstance(c, Kernel) and c.isa is not None else None
    return Verdict(c.variant, c.tier, isa, why)


def nothing_runs(op: str, device: str, verdicts: Sequence[Verdict]) -> SelectionError:
    """The error for a call that no candidate may run."""
    if not verdicts:
        return SelectionError(
            f"{op}: this target has no kernel or plan for it; build one, or use another device."
        )
    listed = "; ".join(f"{v.variant}: {v.why}" for v in verdicts[:12])
    more = f"; and {len(verdicts) - 12} more" if len(verdicts) > 12 else ""
    return SelectionError(
        f"{op}: none of {len(verdicts)} candidates may run this call on {device} ({listed}{more}). "
        "Change the operands, or build a variant that takes them."
    )
