"""Whether a candidate's numbers are right: beside float64 on the host on small calls, and beside a trusted
candidate on the very call that is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from kiln.runtime.bound import BoundCall
from kiln.runtime.entities import Contract, Kernel
from kiln.runtime.operation import Operation
from kiln.tools.tune_device import Bench
from kiln.tools.tune_plan import Call, Group, Plan, Shape, shape_key

Array: TypeAlias = np.ndarray[Any, Any]

SAMPLED_ROWS = 16
"""Rows of an output that are compared between candidates."""
CHECK_WIDTH, CHECK_ROWS = 512, (1, 16, 130)
"""Extents of the calls that are compared with float64: the host multiplies those in milliseconds."""


class Numbers:
    """What is known of the candidates' numbers."""

    def __init__(self, bench: Bench, operation: Operation, plan: Plan) -> None:
        self._bench, self._operation, self._plan = bench, operation, plan
        self.kernels = {c.variant: c for c in operation.candidates if isinstance(c, Kernel)}
        self._reference = _reference(plan.op)
        self._proved: dict[tuple[str, Shape, str], str | None] = {}

    def bind(self, group: Group, name: str, operands: Mapping[str, Any]) -> BoundCall | str:
        """The call ready to launch, or why the candidate cannot take it."""
        asked = {**operands, **group.attrs, "variant": name, "mode": "fast"}
        found = self._operation.explain(**asked).verdicts
        why = next(v.why for v in found if v.variant == name)
        return why if why is not None else self._operation.bind(**asked, stream=self._bench.stream)

    def beside_host(self, call: Call) -> Iterator[str]:
        """Compare the call's candidates with float64, on narrow calls with its inner extents, where that was
        not done yet. Yields the name of each before it runs."""
        small = self._narrow(call)
        names = [n for n in call.candidates if (call.group, small, n) not in self._proved]
        if self._reference is None or not names:
            return
        self._proved |= dict.fromkeys([(call.group, small, n) for n in names])
        group = self._plan.groups[call.group]
        for extent in CHECK_ROWS:
            shape = group.dims({**dict(small), self._plan.along: extent})
            operands = self._bench.operands(self._operation.sig, group.types, shape)[0]
            expected: list[Array] | None = None
            for name in names:
                bound = self.bind(group, name, operands)
                if isinstance(bound, str):
                    continue
                yield name
                expected = expected or self._expected(self._reference, group, operands)
                self._bench.poison()
                bound()
                found = [self._bench.whole(out) for out in operands["out"]]
                why = self._worst(name, found, expected, 1.0)
                if why is not None:
                    self._proved[call.group, small, name] = f"beside float64 at {shape}: {why}"

    def fault(self, call: Call, name: str) -> str | None:
        """Why the candidate is wrong beside float64; None if it was not found to be."""
        return self._proved.get((call.group, self._narrow(call), name))

    def trusted(self, group: Group, operands: Mapping[str, Any]) -> list[Array] | None:
        """Sampled rows of what the trusted candidate gives; None where it cannot take the call."""
        bound = self.bind(group, group.trusted, operands)
        return None if isinstance(bound, str) else self._ran(bound, operands)

    def against(
        self, trusted: list[Array] | None, bound: BoundCall, name: str, operands: Mapping[str, Any]
    ) -> str | None:
        """Why a candidate's numbers are wrong on this very call."""
        first, again = self._ran(bound, operands), self._ran(bound, operands)
        if any(a.tobytes() != b.tobytes() for a, b in zip(first, again, strict=True)):
            return "two runs of one call differ in bits"
        return self._worst(name, first, trusted or first, 2.0)

    def _ran(self, bound: BoundCall, operands: Mapping[str, Any]) -> list[Array]:
        """Sampled rows of every output after a launch over poison."""
        self._bench.poison()
        bound()
        return [self._bench.rows(out, _sampled(out.shape[0])) for out in operands["out"]]

    def _worst(self, name: str, found: list[Array], wanted: list[Array], factor: float) -> str | None:
        contract = self.kernels[name].numerics.contract
        whys = (differs(a, b, contract, factor) for a, b in zip(found, wanted, strict=True))
        return next((why for why in whys if why is not None), None)

    def _narrow(self, call: Call) -> Shape:
        """The call's extents without the ranged one, and with that along a row of the output cut."""
        along, width = self._plan.along, self._operation.sig.width
        rest = {d: n for d, n in call.shape.items() if d != along}
        return shape_key({d: min(n, CHECK_WIDTH) if d == width else n for d, n in rest.items()})

    def _expected(
        self, reference: Callable[..., Any], group: Group, operands: Mapping[str, Any]
    ) -> list[Array]:
        given = {n: self._bench.whole(v) for n, v in operands.items() if n != "out" and v is not None}
        with np.errstate(all="ignore"):
            found = reference(**given, **group.attrs)
        kinds = [self._bench.kind(out) for out in operands["out"]]
        return [np.asarray(r).astype(k) for r, k in zip(found, kinds, strict=True)]


def _sampled(rows: int) -> list[int]:
    """Row numbers that straddle the edges of tiles."""
    edges = [0, 1, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, rows // 2, rows - 2, rows - 1]
    return sorted({r for r in edges if 0 <= r < rows})[:SAMPLED_ROWS]


def differs(found: Array, wanted: Array, contract: Contract, factor: float) -> str | None:
    """Why an output does not meet a contract; `factor` 2 where both sides may be off by it."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    if not np.isfinite(a).all():
        at = np.argwhere(~np.isfinite(a))[0]
        return f"element {at.tolist()} of the sampled rows is {a[tuple(at)]}: not written, or wrong"
    if contract.kind == "exact":
        return None if (a == b).all() else f"{int((a != b).sum())} of {a.size} elements differ"
    largest, norm = float(np.abs(b).max(initial=0.0)), float(np.linalg.norm(b))
    worst = float(np.abs(a - b).max(initial=0.0))
    limit = factor * contract.max_eps * _epsilon(wanted.dtype) * largest
    if worst > limit:
        return f"the worst element is {worst:.3g} off, at most {limit:.3g}"
    relative = float(np.linalg.norm(a - b)) / norm if norm else 0.0
    if relative > factor * contract.rel_l2:
        return f"relative L2 distance {relative:.3g}, at most {factor * contract.rel_l2:.3g}"
    return None


def _epsilon(kind: Any) -> float:
    if kind.kind in "iub":
        return 1.0
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    return float(finfo(kind).eps)


def _reference(op: str) -> Callable[..., Any] | None:
    """The op's NumPy reference, where its declaration is installed."""
    try:
        from kiln.recipes import catalog
    except ModuleNotFoundError:
        return None
    return next((o.reference for o in catalog().ops if o.name == op), None)
