"""Which candidate runs a call: a fixed order, a reason for every one that is passed over, and no silent
fallback."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kiln.runtime.bind import Bound
from kiln.runtime.entities import Kernel, Plan
from kiln.runtime.errors import SelectionError
from kiln.runtime.expr import why_not
from kiln.runtime.providers import Provider
from kiln.runtime.recipe import why_not_params
from kiln.runtime.record import record
from kiln.runtime.targets import tier_rank

Candidate = Kernel | Plan | Provider

TIER_ORDER = {"fast": 0, "fused": 1, "generated": 2, "primitive": 2, "composite": 3}
"""Lower runs first."""
REASONS = 12
"""Different reasons that an error lists, each with the first candidate that has it."""


class Wanted(NamedTuple):
    """What the caller asks for beyond the operands.

    Attributes:
        mode: "exact", or "fast" to let kernels with an envelope contract go first.
        tier, variant, isa: candidates other than these are passed over.
        below: a provider that declined: it and every candidate before it are not asked again.
    """

    mode: str = "exact"
    tier: str | None = None
    variant: str | None = None
    isa: str | None = None
    below: str | None = None


Asked = tuple[str, str | None, str | None, str | None, str | None]
"""The fields of a Wanted, not yet made one: most calls only look a decision up."""


@record
class Verdict:
    """One candidate and why it was passed over; `why` is None for one that may run."""

    variant: str
    tier: str
    isa: str | None
    why: str | None


@record
class Explanation:
    """Every candidate of a call in order; the first without a reason is the one that runs."""

    op: str
    device: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    """What else there is to know, such as another root that holds the op too."""

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
            may_decline = v is running and v.tier in ("provider", "reference")
            lines.append(f"  {v.variant} ({kind}): {fate}{' unless it declines' if may_decline else ''}")
        lines += [] if self.verdicts else ["  no candidates"]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def ordered(candidates: Iterable[Kernel | Plan], target: str) -> tuple[Kernel | Plan, ...]:
    """Candidates in the order in which they are tried: tier, ISA tier, priority, name."""
    return tuple(
        sorted(candidates, key=lambda c: (TIER_ORDER[c.tier], -_isa_rank(c, target), -c.priority, c.variant))
    )


FURTHER = "a further entry of a kernel that runs under its own name"
"""Why tests pass over such an entry."""


def entry_of(candidate: Candidate, candidates: Iterable[Candidate]) -> str | None:
    """The variant of which a candidate is a further entry: the same kernel, used for calls of its own.

    Tuned kernels have such: what is shown of one entry's kernel holds for the others, and the one with the
    shortest name takes whatever the kernel can run.
    """
    if not isinstance(candidate, Kernel):
        return None
    code = (candidate.sha256, candidate.entry, candidate.isa)
    same = [c for c in candidates if isinstance(c, Kernel) and (c.sha256, c.entry, c.isa) == code]
    first = min(same, key=lambda c: (len(c.variant), c.variant), default=candidate).variant
    return first if candidate.variant.startswith(f"{first}.") else None


def _isa_rank(c: Kernel | Plan, target: str) -> int:
    return tier_rank(target, c.isa.tier) if isinstance(c, Kernel) and c.isa is not None else 0


def in_mode(candidates: Sequence[Candidate], wanted: Wanted) -> list[Candidate]:
    """The same candidates, those of the fast mode first if that is asked for; only those below one that
    declined."""
    found = sorted(candidates, key=lambda c: c.mode != "fast") if wanted.mode == "fast" else list(candidates)
    if wanted.below is None:
        return found
    return found[[c.variant for c in found].index(wanted.below) + 1 :]


def why_passed(
    c: Candidate,
    wanted: Wanted,
    disabled: Mapping[str, str],
    refusal: Callable[[Candidate], str | None],
) -> str | None:
    """Why a candidate is out before any operand is looked at.

    Args:
        disabled: name -> who disabled it.
        refusal: why the device cannot run a candidate at all.
    """
    isa = _isa_tier(c)
    if c.mode == "fast" and wanted.mode != "fast":
        return 'of the fast mode, which is asked for with mode="fast"'
    if wanted.tier is not None and c.tier != wanted.tier:
        return f"tier {wanted.tier} was asked for"
    if wanted.variant is not None and c.variant != wanted.variant:
        return f"variant {wanted.variant} was asked for"
    if wanted.isa is not None and not isinstance(c, Plan) and isa != wanted.isa:
        return f"ISA tier {wanted.isa} was asked for"
    return why_disabled(c, disabled) or refusal(c)


def why_disabled(c: Candidate, disabled: Mapping[str, str]) -> str | None:
    """Which of its names is disabled, and by whom."""
    off = disabled.keys() & {c.op, c.variant, f"{c.op}.{c.variant}", c.tier, _isa_tier(c) or ""}
    return f"disabled by {disabled[min(off)]}" if off else None


def why_not_call(
    c: Candidate, bound: Bound, check: Callable[[Plan | Provider], str | None]
) -> str | None:
    """Why a candidate cannot run this call's operands."""
    if isinstance(c, Provider):
        return check(c)
    why = why_not(c.when, bound.env)
    if why is not None:
        return why
    return why_not_params(c, bound) if isinstance(c, Kernel) else check(c)


def _isa_tier(c: Candidate) -> str | None:
    return c.isa.tier if isinstance(c, Kernel) and c.isa is not None else None


def verdict(c: Candidate, why: str | None) -> Verdict:
    """A candidate's verdict."""
    return Verdict(c.variant, c.tier, _isa_tier(c), why)


def nothing_runs(op: str, device: str, verdicts: Sequence[Verdict]) -> SelectionError:
    """The error for a call that no candidate may run."""
    if not verdicts:
        return SelectionError(
            f"{op}: this target has no kernel or plan for it; build one, or use another device."
        )
    alike: dict[str | None, list[str]] = {}
    for v in verdicts:
        alike.setdefault(v.why, []).append(v.variant)
    groups = list(alike.items())
    listed = "; ".join(
        f"{of[0]}: {why}{f' (and {len(of) - 1} more)' if of[1:] else ''}" for why, of in groups[:REASONS]
    )
    rest = sum(len(of) for _, of in groups[REASONS:])
    return SelectionError(
        f"{op}: none of {len(verdicts)} candidates may run this call on {device} "
        f"({listed}{f'; and {rest} more' if rest else ''}). "
        "Change the operands, or build a variant that takes them; "
        f"kiln show {op} lists the calls that are served."
    )
