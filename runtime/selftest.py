"""The self-test: every kernel and plan that this device may run, on the vectors that the manifest carries.

There is no oracle without the compiler. What can be shown on the machine at hand: a candidate writes all of
its outputs and nothing else, gives the same bits when it runs again, and nothing that is not finite from
finite inputs; and the ways to run an op (ISA tiers that were compiled apart, fused kernels, plans of other
ops, providers, and the CPU's kernels where a library for the CPU is given) agree: to the bit where the op's
contract is exact, and within it elsewhere. A candidate that nothing can be compared with is told as such.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kiln.runtime.arrays import CPU, aligned_bytes
from kiln.runtime.device import PretendDevice
from kiln.runtime.dtypes import numpy_dtype
from kiln.runtime.entities import Contract, Kernel, Plan
from kiln.runtime.errors import KilnError, SelectionError, UnavailableError
from kiln.runtime.operation import Operation
from kiln.runtime.select import FURTHER, entry_of, why_disabled
from kiln.runtime.selfcase import ALIGN, Case, Slot, cases_of, constants_of

if TYPE_CHECKING:
    from kiln.runtime.load import Library

POISONS = (0xFF, 0x3C)
"""What memory holds before the first and the second run."""
SHOWN = 20
PART = "only a part of another op, which runs it"
_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass
class SelftestResult:
    """What was seen of one candidate.

    Attributes:
        op: its op.
        variant: its name.
        calls: how many calls it ran.
        witnesses: answers of other candidates that its own were compared with.
        faults: what was wrong, a sentence each.
        skipped: why it was not run; None if it was.
    """

    op: str
    variant: str
    calls: int = 0
    witnesses: int = 0
    faults: list[str] = field(default_factory=list)
    skipped: str | None = None


@dataclass(frozen=True)
class SelftestReport:
    """What a self-test has found.

    Attributes:
        device: how messages call it.
        results: one for every candidate of the ops that were tested.
        seconds: how long it took.
    """

    device: str
    results: tuple[SelftestResult, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something ran, and nothing was wrong."""
        return any(r.calls for r in self.results) and not any(r.faults for r in self.results)

    @property
    def alone(self) -> tuple[str, ...]:
        """Candidates that nothing else could be compared with, as op.variant."""
        return tuple(f"{r.op}.{r.variant}" for r in self.results if r.calls and not r.witnesses)

    def __str__(self) -> str:
        ran = sum(bool(r.calls) for r in self.results)
        faults = [f"{r.op}.{r.variant}: {f}" for r in self.results for f in r.faults]
        lines = faults[:SHOWN] + ([f"and {len(faults) - SHOWN} more faults"] if len(faults) > SHOWN else [])
        reasons = [r.skipped for r in self.results if r.skipped]
        lines += [f"{reasons.count(why)} not run: {why}" for why in dict.fromkeys(reasons)]
        if self.alone:
            lines.append(f"{len(self.alone)} compared with nothing: {', '.join(self.alone[:SHOWN])}")
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        verdict = "passed" if self.ok else count if faults else "nothing ran"
        lines.append(f"{verdict}: {ran} of {len(self.results)} on {self.device} ({self.seconds:.1f} s)")
        return "\n".join(lines)


def run(
    library: "Library", ops: Iterable[str] | None = None, against: "Library | None" = None
) -> SelftestReport:
    """See Library.selftest."""
    if isinstance(library.device, PretendDevice):
        raise UnavailableError(f"{library.device.label} device cannot run kernels; load for a real one.")
    began = time.perf_counter()
    results: list[SelftestResult] = []
    internal = _internal(library)
    for name in library.ops if ops is None else ops:
        other = against.op(name) if against is not None and name in against.ops else None
        if name in internal:
            results += [SelftestResult(name, c.variant, skipped=PART) for c in library.op(name).candidates]
            continue
        results += _Trial(library.op(name), other, library.disabled).run()
    return SelftestReport(library.device.label, tuple(results), time.perf_counter() - began)


def _internal(library: "Library") -> set[str]:
    """Ops that exist only as halves of another one: no one else can make their operands."""
    plans = (c for name in library.ops for c in library.op(name).candidates if isinstance(c, Plan))
    return {step.op for plan in plans if plan.tier == "primitive" for step in plan.steps}


class _Trial:
    """The self-test of one op."""

    def __init__(self, operation: Operation, other: Operation | None, disabled: Mapping[str, str]) -> None:
        self._operation = operation
        self._other = other
        self._disabled = disabled
        self._passed_over: dict[str, str] = {}
        self._results = {c.variant: SelftestResult(operation.name, c.variant) for c in operation.candidates}

    def run(self) -> list[SelftestResult]:
        """Everything seen, in the order in which candidates are tried."""
        for case in self._cases():
            self._case(case)
        return list(self._results.values())

    def _cases(self) -> list[Case]:
        found = []
        for c in self._operation.candidates:
            result = self._results[c.variant]
            refusal = self._operation.device.refusal(c) if isinstance(c, Kernel) else None
            again = FURTHER if entry_of(c, self._operation.candidates) is not None else None
            result.skipped = refusal or why_disabled(c, self._disabled) or again
            if result.skipped is not None:
                continue
            case = self._own_case(c)
            if case is None:
                why = self._passed_over.get(
                    c.variant, "its predicate allows none of the sizes that were tried"
                )
                result.faults.append(f"no call was found that it takes: {why}")
            else:
                found.append(case)
        # Candidates of one predicate share their case.
        return list(dict.fromkeys(found))

    def _own_case(self, c: Kernel | Plan) -> Case | None:
        """A call that a candidate takes."""
        device = self._operation.device.ordinal
        for case in cases_of(c, self._operation.sig, self._mentioned(c)):
            try:
                found = self._operation.explain(**case.call(0, device), mode="fast")
            except KilnError as e:
                self._passed_over.setdefault(c.variant, str(e))
                continue
            why = next(v.why for v in found.verdicts if v.variant == c.variant)
            if why is None:
                return case
            self._passed_over.setdefault(c.variant, why)
        return None

    def _mentioned(self, c: Kernel | Plan) -> set[int]:
        """Numbers in the predicates of what a plan calls, and of what those call."""
        if isinstance(c, Kernel):
            return set()
        callees = [o for step in c.steps for o in self._operation.callee(step.op).candidates]
        mine = {n for o in callees for n in constants_of(o.when)}
        return mine.union(*(self._mentioned(o) for o in callees))

    def _case(self, case: Case) -> None:
        device = self._operation.device.ordinal
        try:
            explanation = self._operation.explain(**case.call(0, device), mode="fast")
        except KilnError as e:
            self._all(f"its call is refused: {e}")
            return
        answers: dict[str, list[Any]] = {}
        for verdict in explanation.verdicts:
            if verdict.why is not None:
                continue
            result = self._results.get(verdict.variant)
            if result is not None and result.skipped == FURTHER:
                continue  # no witness: the same kernel
            provided = result is None
            result = result or SelftestResult(self._operation.name, verdict.variant)
            answer = self._answer(case, result, provided)
            if answer is not None:
                answers[verdict.variant] = answer
            if result.calls or result.faults:
                self._results[verdict.variant] = result
        self._compare(case, answers)

    def _all(self, why: str) -> None:
        for result in self._results.values():
            if result.skipped is None:
                result.faults.append(why)

    def _answer(self, case: Case, result: SelftestResult, provided: bool) -> list[Any] | None:
        """What a candidate answers; None if it may not, or failed."""
        found = []
        kept, beyond = _kept(case), False
        for poison in POISONS:
            before = case.block(poison)
            try:
                after = _run(self._operation, case, before, result.variant)
            except SelectionError as e:
                # A provider may decline; nothing else may.
                result.faults += [] if provided else [str(e)]
                return None
            except KilnError as e:
                result.faults.append(str(e))
                return None
            found.append(_outputs(case, after))
            beyond = beyond or not np.array_equal(after[kept], before[kept])
        result.calls += 1
        if beyond:
            result.faults.append("it wrote memory that is not its to write")
            return None
        if any(_different(a, b) for a, b in zip(*found, strict=True)):
            result.faults.append("its outputs are not all written, or not the same each time")
            return None
        if not all(_finite(a) for a in found[0]):
            result.faults.append("an output of finite inputs is not finite")
        return found[0]

    def _compare(self, case: Case, answers: dict[str, list[Any]]) -> None:
        # Last is what is least specialised: the portable tier, or the plan.
        witnesses = dict(reversed(answers.items()))
        if self._other is not None and answers:
            outside = self._outside(case)
            if outside is not None:
                witnesses = {"": outside, **witnesses}
        if not witnesses:
            return
        first, reference = next(iter(witnesses.items()))
        for variant, answer in answers.items():
            result = self._results[variant]
            result.witnesses += len(witnesses) - 1
            contract = self._contract(variant)
            for slot, mine, theirs in zip(_written(case), answer, reference, strict=True):
                why = _disagreement(contract, mine, theirs)
                if why is not None:
                    who = first or f"{self._other and self._other.device.label}"
                    result.faults.append(f"{slot.tensor.name} and that of {who}: {why}")

    def _contract(self, variant: str) -> Contract:
        for c in self._operation.candidates:
            if c.variant == variant and isinstance(c, Kernel):
                return c.numerics.contract
        return self._operation.sig.contract

    def _outside(self, case: Case) -> list[Any] | None:
        """What the other library answers, if its contract with this one is exact and it takes the call."""
        other = self._other
        if other is None or self._operation.sig.contract.kind == "exact_on_target":
            return None
        try:
            if other.explain(**case.call(0, other.device.ordinal)).chosen is None:
                return None
            return _outputs(case, _run(other, case, case.block(POISONS[0]), None))
        except KilnError:
            return None


def _written(case: Case) -> list[Slot]:
    return [s for s in case.slots if s.tensor.role != "in"]


def _outputs(case: Case, block: Any) -> list[Any]:
    return [s.array(block).copy() for s in _written(case)]


def _kept(case: Case) -> Any:
    """Which bytes a call must leave as they are."""
    mask = np.ones(case.bytes, bool)
    for s in _written(case):
        mask[s.offset : s.offset + s.bytes] = False
    return mask


def _bits(a: Any) -> Any:
    return a.view(f"u{a.dtype.itemsize}")


def _is_float(a: Any) -> bool:
    return a.dtype in [numpy_dtype(n) for n in _FLOATS]


def _different(a: Any, b: Any) -> int:
    """How many elements differ; NaN equals NaN, whichever it is."""
    differ = _bits(a) != _bits(b)
    if _is_float(a):
        differ &= ~(np.isnan(a) & np.isnan(b))
    return int(np.count_nonzero(differ))


def _finite(a: Any) -> bool:
    return not _is_float(a) or bool(np.isfinite(a.astype(np.float64)).all())


def _disagreement(contract: Contract, mine: Any, theirs: Any) -> str | None:
    different = _different(mine, theirs)
    if not different:
        return None
    if contract.kind != "envelope" or not _is_float(mine):
        return f"{different} of {mine.size} elements differ, expected the same bits"
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    error = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
    # Each of the two may be so far from the truth.
    most = 2 * contract.rel_l2
    return None if error <= most else f"relative L2 distance {error:.3g}, expected at most {most:.3g}"


def _run(operation: Operation, case: Case, before: Any, variant: str | None) -> Any:
    """The block after the call."""
    with _memory(operation, before) as (base, read):
        operation(
            **case.call(base, operation.device.ordinal), variant=variant, mode="fast" if variant else "exact"
        )
        return read()


@contextmanager
def _memory(operation: Operation, block: Any) -> Iterator[tuple[int, Any]]:
    """A copy of a block on the device: its address, and what reads it back when the work is done."""
    device: Any = operation.device
    if device.ordinal == CPU:
        raw = aligned_bytes(block.size + ALIGN)
        start = -raw.ctypes.data % ALIGN
        mine = raw[start : start + block.size]
        mine[:] = block
        yield mine.ctypes.data, lambda: mine
        return
    call = device.driver.call
    with device.current():
        address = int(call("cuMemAlloc", block.size))
        try:
            call("cuMemcpyHtoD", address, block.ctypes.data, block.size)
            yield address, lambda: _read(device, address, block.size)
        finally:
            call("cuMemFree", address)


def _read(device: Any, address: int, size: int) -> Any:
    block = np.empty(size, np.uint8)
    # The copy waits for the default stream, where the call was queued.
    device.driver.call("cuMemcpyDtoH", block.ctypes.data, address, size)
    return block
