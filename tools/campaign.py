"""The conformance run of one target on one device: every kernel and every plan, each by calls of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kiln.ir.spec import Op
from kiln.runtime.device import Device
from kiln.runtime.entities import Contract, Kernel, Manifest, Plan
from kiln.runtime.errors import KilnError, UnavailableError
from kiln.runtime.load import Library
from kiln.runtime.operation import Operation
from kiln.runtime.select import FURTHER, entry_of
from kiln.tools.cases import MOST_ELEMENTS, STYLES, Case, Deriver, Judge, Style, internal_ops
from kiln.tools.memory import Rig
from kiln.tools.pools import constants
from kiln.tools.trial import Answer, Verdict, answer, attempt, lost

AGAIN = 6
"""Draws of a call until the oracle has an answer for it."""
HUNTS = 96
"""Further calls of a plan, looking for internal kernels that none of its cases reached."""
LARGER = 8
"""How many times the usual elements such a call may have."""
ENOUGH = 3
"""Cases that an internal kernel should get."""
KEPT = 64
"""Answers that wait for another ISA tier to ask the same."""


@dataclass
class Result:
    """What came of one kernel or plan."""

    target: str
    op: str
    variant: str
    digest: str | None
    """sha256 of the artifact; None for a plan."""
    contract: Contract
    cases: int = 0
    error: float = 0.0
    faults: list[str] = field(default_factory=list)
    unanswered: str | None = None
    """The last call for which the oracle has no answer."""
    skipped: str | None = None
    """Why this machine cannot run it at all."""

    @property
    def passed(self) -> bool:
        """Whether it ran and met its contract; nothing is passed by not running."""
        return self.cases > 0 and not self.faults

    def take(self, verdict: Verdict) -> None:
        """Count one case."""
        self.cases += 1
        self.error = max(self.error, verdict.error)
        self.faults += [f"{verdict.case}: {fault}" for fault in verdict.faults]


class Shelf(Protocol):
    """What a campaign needs of a library."""

    @property
    def manifests(self) -> Mapping[str, Manifest]:
        """Every target's manifest."""

    @property
    def device(self) -> Device:
        """Where kernels run."""

    def operation(self, target: str, name: str) -> Operation:
        """An op of one manifest."""


@dataclass
class Campaign:
    """All calls to the kernels and plans of one target."""

    shelf: Shelf
    target: str
    ops: Mapping[str, Op]
    """Declarations, by name."""
    rig: Rig
    selected: Callable[[str], bool]
    """Which ops, by name."""
    progress: Callable[[Result], None]
    styles: Sequence[Style] = STYLES
    limit: int = MOST_ELEMENTS
    """Elements of all operands of a call."""
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    broken: str | None = None
    """Why nothing can run any more."""

    @property
    def manifest(self) -> Manifest:
        """The target's manifest."""
        return self.shelf.manifests[self.target]

    def run(self) -> list[Result]:
        """Test everything that is selected, in the manifest's order."""
        internal = internal_ops(self.manifest.recipes)
        for op in self.manifest.ops:
            if self.selected(op) and op not in internal:
                self._op(op)
        self._judge_internal(internal)
        return sorted(self.results.values(), key=lambda r: (r.op, r.variant))

    def _operation(self, op: str) -> Operation:
        return self.shelf.operation(self.target, op)

    def _op(self, name: str) -> None:
        answers: dict[str, Answer] = {}
        for candidate in sorted(self._operation(name).candidates, key=lambda c: isinstance(c, Plan)):
            result = self._result(candidate)
            self._test(candidate, result, answers)
            self.progress(result)

    def _result(self, candidate: Kernel | Plan) -> Result:
        kernel = candidate if isinstance(candidate, Kernel) else None
        contract = kernel.numerics.contract if kernel else self.manifest.ops[candidate.op].contract
        digest = kernel.sha256 if kernel else None
        result = Result(self.target, candidate.op, candidate.variant, digest, contract)
        return self.results.setdefault((candidate.op, candidate.variant), result)

    def _test(self, candidate: Kernel | Plan, result: Result, answers: dict[str, Answer]) -> None:
        if isinstance(candidate, Kernel):
            result.skipped = self.shelf.device.refusal(candidate)
            if entry_of(candidate, self._operation(candidate.op).candidates) is not None:
                result.skipped = result.skipped or FURTHER
        if result.skipped is not None:
            return
        if candidate.op not in self.ops:
            result.faults.append(
                "no catalog declares this op, so nothing says what it computes; give --catalog"
            )
            return
        judge = Judge(self._operation(candidate.op), self.shelf.device.ordinal)
        callees = self._callees(candidate)
        kernels = [c for o in callees for c in o.candidates if isinstance(c, Kernel)]
        deriver = Deriver(
            judge, candidate, sorted(constants(k.when for k in kernels)), self.styles, self.limit
        )
        for number, case in deriver.cases():
            self._call(candidate, case, result, answers)
            for again in range(1, AGAIN):
                if result.unanswered is None:
                    break
                other = deriver.find(self.styles[number], number + again * len(self.styles))
                if other is not None:
                    self._call(candidate, other, result, answers)
        if isinstance(candidate, Plan):
            self._hunt(deriver, candidate, result)
        if not result.cases and not result.faults:
            never = "no call could be derived that selects it: its predicate cannot be met"
            result.faults.append(self.broken or result.unanswered or never)

    def _call(self, candidate: Kernel | Plan, case: Case, result: Result, answers: dict[str, Answer]) -> None:
        if self.broken is not None:
            return
        operation = self._operation(candidate.op)
        counts = self._counts(candidate)
        result.unanswered = None
        try:
            known = self._answer(operation, case, result.contract, answers)
            verdict = attempt(operation, self.rig, known, result.contract)
        except IndexError as outside:
            # The drawn indices leave their table: the contract leaves such a call open.
            result.unanswered = f"{case}: {outside}"
            return
        except (KilnError, RuntimeError) as failure:
            # PyTorch reports the driver's errors as RuntimeError.
            if not isinstance(failure, KilnError) and "CUDA" not in str(failure):
                raise
            verdict = Verdict(case, float("inf"), [str(failure)])
            if not isinstance(failure, KilnError) or lost(failure):
                self.broken = f"not run: the device was lost in {case}"
        result.take(verdict)
        for kernel in self._ran_since(candidate, counts):
            self._result(kernel).take(verdict)

    def _answer(
        self, operation: Operation, case: Case, contract: Contract, answers: dict[str, Answer]
    ) -> Answer:
        key = repr((dataclasses.replace(case, variant=""), contract))
        known = answers.get(key)
        if known is None:
            if len(answers) >= KEPT:
                answers.clear()
            known = answers[key] = answer(self.ops[case.op], operation, case, contract)
        return dataclasses.replace(known, case=case)

    def _callees(self, candidate: Kernel | Plan) -> list[Operation]:
        if isinstance(candidate, Kernel) or candidate.tier != "primitive":
            return []
        return [self._operation(op) for op in dict.fromkeys(step.op for step in candidate.steps)]

    def _counts(self, candidate: Kernel | Plan) -> dict[tuple[str, str], int]:
        return {(o.name, v): n[0] for o in self._callees(candidate) for v, n in o.counts.items()}

    def _ran_since(self, candidate: Kernel | Plan, before: Mapping[tuple[str, str], int]) -> Iterator[Kernel]:
        for operation in self._callees(candidate):
            for kernel in operation.candidates:
                key = (operation.name, kernel.variant)
                if isinstance(kernel, Kernel) and operation.counts[kernel.variant][0] > before[key]:
                    yield kernel

    def _hunt(self, deriver: Deriver, plan: Plan, result: Result) -> None:
        """Draw calls until every internal kernel that the plan may run has run, or the draws are used up."""
        callees = self._callees(plan)
        for number in range(len(self.styles), len(self.styles) + HUNTS):
            if self.broken is not None or not self._missing(callees):
                return
            turned = self.styles[number % len(self.styles)]
            style = Style((1, 3, 5)[number % 3], turned.layout, "mixed")
            case = deriver.find(style, number, LARGER)
            if case is not None:
                self._call(plan, case, result, {})

    def _missing(self, callees: Sequence[Operation]) -> list[Kernel]:
        kernels = (c for o in callees for c in o.candidates if isinstance(c, Kernel))
        return [k for k in kernels if self.shelf.device.refusal(k) is None and self._cases(k) < ENOUGH]

    def _cases(self, kernel: Kernel) -> int:
        result = self.results.get((kernel.op, kernel.variant))
        return 0 if result is None else result.cases

    def _judge_internal(self, internal: set[str]) -> None:
        callers = {p.op for p in self.manifest.recipes if {s.op for s in p.steps} & internal}
        if not any(self.selected(op) for op in callers):
            return
        for kernel in self.manifest.kernels:
            if kernel.op in internal:
                result = self._result(kernel)
                result.skipped = self.shelf.device.refusal(kernel)
                if not result.cases and result.skipped is None:
                    result.faults.append(self.broken or "no call of an op that uses it reached it")
                self.progress(result)


def targets_of(library: Library, wanted: Sequence[str] | None) -> list[str]:
    """The targets to test on the library's device.

    Raises:
        UnavailableError: the device does not run one that is wanted.
    """
    for target in wanted or ():
        if target not in library.targets:
            listed = ", ".join(library.targets)
            raise UnavailableError(
                f"{library.device.label} does not run {target} of this tree; it runs {listed}."
            )
    return list(wanted or library.targets)
