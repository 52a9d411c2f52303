"""One test call on a device: memory made, called twice, compared with the oracle, all else untouched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kiln.ir.spec import Op
from kiln.runtime.entities import Contract
from kiln.runtime.errors import ContractError, KilnError
from kiln.runtime.operation import Operation
from kiln.tools.cases import Case, Slot, arguments
from kiln.tools.fill import inputs
from kiln.tools.memory import POISONS, Array, Bytes, Rig, staged, typed, written_mask
from kiln.tools.oracle import against_ideal, compare, expected


@dataclass
class Answer:
    """What a case's call must give."""

    case: Case
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    fault: str | None = None
    """Why the oracle itself is wrong."""


@dataclass
class Verdict:
    """What came of one case."""

    case: Case
    error: float = 0.0
    faults: list[str] = field(default_factory=list)


def answer(op: Op, operation: Operation, case: Case, contract: Contract) -> Answer:
    """Inputs and expected outputs of a case."""
    with np.errstate(all="ignore"):
        given = inputs(operation.sig, case, finite=contract.kind != "exact")
        if op.domain is not None:
            inside = op.domain(**given, **{o.name: case.scalars[o.name] for o in op.scalars})
            given = {**given, **{n: x.astype(given[n].dtype) for n, x in inside.items()}}
        wanted = expected(op, case, given)
        plain = op.body is not None and case.fill == "normal" and contract.kind == "exact"
        fault = against_ideal(op, case, given, wanted) if plain else None
    return Answer(case, given, wanted, fault)


def attempt(operation: Operation, rig: Rig, known: Answer, contract: Contract) -> Verdict:
    """Run a case and judge it.

    Raises:
        KilnError: the driver or the runtime refuses; a lost CUDA context makes every later call fail.
    """
    case = known.case
    verdict = Verdict(case, faults=[] if known.fault is None else [known.fault])
    mask = written_mask(case)
    blocks: list[Bytes] = []
    for poison in POISONS:
        before = staged(case, known.inputs, poison)
        operands = rig.put(case, before)
        try:
            operation(**arguments(operation.sig, case, operands))
        except ContractError as refused:
            verdict.faults.append(f"the call was refused after explain allowed it: {refused}")
            return verdict
        after = rig.get(case.bytes)
        verdict.faults += _stray(case, before, after, mask)
        blocks.append(after)
    judge(verdict, known, contract, blocks[0])
    if not verdict.faults:
        verdict.faults += _unsteady(case, blocks)
    return verdict


def judge(verdict: Verdict, known: Answer, contract: Contract, block: Bytes) -> None:
    """Compare every output with what is expected."""
    with np.errstate(all="ignore"):
        for name, wanted in known.outputs.items():
            found = typed(block, known.case.slot(name))
            difference = compare(found, wanted, contract)
            verdict.error = max(verdict.error, difference.error)
            if difference.why is not None:
                verdict.faults.append(f"{name}: {difference.why}")


def _stray(case: Case, before: Bytes, after: Bytes, mask: Bytes) -> list[str]:
    """What was written outside the outputs."""
    changed = np.flatnonzero((before != after) & (mask == 0))
    if not changed.size:
        return []
    at = int(changed[0])
    return [f"{changed.size} bytes outside the outputs were written, the first {_place(case, at)}"]


def _place(case: Case, at: int) -> str:
    near = min(case.slots, key=lambda s: 0 if s.offset <= at < s.offset + s.extent else abs(at - s.offset))
    inside = near.offset <= at < near.offset + near.extent
    where = "inside or between the rows of" if inside else "before" if at < near.offset else "after"
    return f"{where} {near.tensor.name} (byte {at - near.offset} from its first)"


def _unsteady(case: Case, blocks: list[Bytes]) -> list[str]:
    """Outputs that two runs of one call do not agree on."""

    def differs(s: Slot) -> bool:
        a, b = (typed(block, s).tobytes() for block in blocks)
        return a != b

    return [
        f"{s.tensor.name}: two runs of the same call differ in bits"
        for s in case.slots
        if s.tensor.role != "in" and differs(s)
    ]


def lost(error: KilnError) -> bool:
    """Whether a failure makes every later call of the process fail."""
    return getattr(error, "code", 0) in (700, 709, 716, 719)
