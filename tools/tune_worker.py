"""The process that touches the device: it checks and times candidates and prints what it saw, a JSON object a
line. What ends it (an illegal address, a hang) ends nothing else: `kiln tune --run` starts another one.

Standard input is one JSON object: the bundle, the device's ordinal, the calls, and when to stop.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kiln.runtime.bound import BoundCall
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.entities import Contract, Kernel
from kiln.runtime.errors import ContextLostError, KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.operation import Operation
from kiln.tools.machine import describe
from kiln.tools.tune_device import Bench, summary
from kiln.tools.tune_plan import TREE, Call, Group, Plan, read_plans

Array: TypeAlias = np.ndarray[Any, Any]
Event: TypeAlias = dict[str, Any]

GOAL_US = 300.0
"""Of one graph: short kernels are launched so often that the clock's grain is below 1 %."""
MOST_LAUNCHES = 48
REPLAYS = 9
HOPELESS = 1.3
"""A first replay so much slower than the best one's is the only one: the median of nine moves by a few
percent."""
SAMPLED_ROWS = 16
"""Rows of an output that are compared between candidates."""
CHECK_WIDTH, CHECK_ROWS = 512, (1, 16, 130)
"""Extents of the calls that are compared with float64 on the host."""
FLOPS, BANDWIDTH = 4e14, 3e12
"""What a first guess of a launch's time assumes, a second."""


@dataclass
class Contender:
    """A candidate on one call."""

    name: str
    bound: BoundCall
    graph: Any = None
    samples: list[float] | None = None


class Worker:
    """Everything on one device."""

    def __init__(self, library: Library, device: CudaDevice, plan: Plan, deadline: float) -> None:
        self.library, self.plan, self.deadline = library, plan, deadline
        self.operation: Operation = library.op(plan.op)
        self.kernels = {c.variant: c for c in self.operation.candidates if isinstance(c, Kernel)}
        self.bench = Bench(device)
        self.reference = _reference(plan.op)
        self.proved: dict[tuple[str, str, tuple[tuple[str, int], ...]], str | None] = {}

    def head(self) -> Event:
        """What the samples are of."""
        device, driver = describe(self.library.device)
        versions = {v for k in self.kernels.values() for n, v in k.toolchain.items() if n == "ptxas"}
        now = datetime.datetime.now(datetime.UTC)
        return {
            "device": device, "driver": driver, "clocks": self.bench.clocks(),
            "assembler": f"ptxas {', '.join(sorted(versions)) or 'unknown'}",
            "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "candidates": self.plan.candidates,
        }  # fmt: skip

    def run(self, calls: Sequence[Call]) -> Iterator[Event]:
        """Every call, until the deadline."""
        for call in calls:
            if time.time() >= self.deadline:
                yield {"stopped": "the budget is used up"}
                return
            try:
                yield from self._call(call)
            except ContextLostError:
                raise
            except KilnError as error:  # no memory for it, say
                for name in call.candidates:
                    where = {"group": call.group, "shape": dict(call.shape), "candidate": name}
                    yield {**where, "passed": str(error)}
        yield {"stopped": "done"}

    def _call(self, call: Call) -> Iterator[Event]:
        group = self.plan.groups[call.group]
        wrong: dict[str, str | None] = {}
        for name in call.candidates:
            yield {"at": [call.group, dict(call.shape), name]}
            wrong[name] = self._against_host(call, name)
        # After those calls, which are on the same memory.
        sets = self.bench.operands(self.operation.sig, group.types, group.dims(call.shape))
        trusted = self._trusted(group, sets[0])
        contenders: list[Contender] = []
        for name in call.candidates:
            yield {"at": [call.group, dict(call.shape), name]}
            where = {"group": call.group, "shape": dict(call.shape), "candidate": name}
            bound = self._bind(group, name, sets[0])
            if isinstance(bound, str):
                yield {**where, "passed": bound}
                continue
            why = wrong[name] or self._against(trusted, bound, name, sets[0])
            if why is not None:
                yield {**where, "failed": why}
                continue
            contenders.append(Contender(name, bound))
        yield from self._timed(call, contenders, sets)

    def _bind(self, group: Group, name: str, operands: Mapping[str, Any]) -> BoundCall | str:
        """The call ready to launch, or why the candidate cannot take it."""
        asked = {**operands, **group.attrs, "variant": name, "stream": self.bench.stream, "mode": "fast"}
        verdict = next(
            v
            for v in self.operation.explain(**{k: v for k, v in asked.items() if k != "stream"}).verdicts
            if v.variant == name
        )
        return verdict.why if verdict.why is not None else self.operation.bind(**asked)

    def _trusted(self, group: Group, operands: Mapping[str, Any]) -> list[Array] | None:
        bound = self._bind(group, group.trusted, operands)
        return None if isinstance(bound, str) else self._ran(bound, operands)

    def _ran(self, bound: BoundCall, operands: Mapping[str, Any]) -> list[Array]:
        """Sampled rows of every output after a launch over poison."""
        self.bench.poison()
        bound()
        return [self.bench.rows(out, _sampled(out.shape[0])) for out in operands["out"]]

    def _against(
        self, trusted: list[Array] | None, bound: BoundCall, name: str, operands: Mapping[str, Any]
    ) -> str | None:
        """Why a candidate's numbers are wrong on this very call."""
        first, again = self._ran(bound, operands), self._ran(bound, operands)
        if any(a.tobytes() != b.tobytes() for a, b in zip(first, again, strict=True)):
            return "two runs of one call differ in bits"
        contract = self.kernels[name].numerics.contract
        pairs = zip(first, trusted or first, strict=True)
        return next((why for a, b in pairs if (why := differs(a, b, contract, 2.0)) is not None), None)

    def _against_host(self, call: Call, name: str) -> str | None:
        """Why a candidate's numbers are wrong beside float64 on small calls with this one's inner extents."""
        if self.reference is None:
            return None
        along = self.plan.along
        rest = tuple(sorted((d, n) for d, n in call.shape.items() if d != along))
        small = _narrowed(self.operation, rest, along)
        key = (call.group, name, small)
        if key not in self.proved:
            self.proved[key] = self._proved(call.group, name, dict(small))
        return self.proved[key]

    def _proved(self, label: str, name: str, rest: dict[str, int]) -> str | None:
        group = self.plan.groups[label]
        for extent in CHECK_ROWS:
            shape = group.dims({**rest, self.plan.along: extent})
            operands = self.bench.operands(self.operation.sig, group.types, shape)[0]
            bound = self._bind(group, name, operands)
            if isinstance(bound, str):
                continue
            self.bench.poison()
            bound()
            found = [self.bench.rows(o, range(o.shape[0])) for o in operands["out"]]
            contract = self.kernels[name].numerics.contract
            for a, b in zip(found, self._expected(group, operands), strict=True):
                why = differs(a, b, contract, 1.0)
                if why is not None:
                    return f"beside float64 at {shape}: {why}"
        return None

    def _expected(self, group: Group, operands: Mapping[str, Any]) -> list[Array]:
        assert self.reference is not None
        given = {
            name: self.bench.rows(v, range(v.shape[0])).reshape(v.shape)
            for name, v in operands.items()
            if name != "out" and v is not None
        }
        with np.errstate(all="ignore"):
            found = self.reference(**given, **group.attrs)
        kinds = [self.bench.rows(o, [0]).dtype for o in operands["out"]]
        return [np.asarray(r).astype(k) for r, k in zip(found, kinds, strict=True)]

    def _timed(
        self, call: Call, contenders: list[Contender], sets: Sequence[Mapping[str, Any]]
    ) -> Iterator[Event]:
        count = launches(call.shape, sets)
        best = float("inf")
        for c in contenders:
            yield {"at": [call.group, dict(call.shape), c.name]}
            c.graph = self.bench.capture(partial(self._launches, c.bound, sets, count))
            self.bench.replay_us(c.graph)
            c.samples = [self.bench.replay_us(c.graph) / count]
            best = min(best, c.samples[0])
        for _ in range(1, REPLAYS):
            for c in contenders:
                if c.samples is not None and c.samples[0] <= HOPELESS * best:
                    c.samples.append(self.bench.replay_us(c.graph) / count)
        for c in contenders:
            self.bench.drop(c.graph)
            us, spread = summary(c.samples or [])
            where = {"group": call.group, "shape": dict(call.shape), "candidate": c.name}
            yield {**where, "us": us, "spread_us": spread, "replays": len(c.samples or [])}

    def _launches(self, bound: BoundCall, sets: Sequence[Mapping[str, Any]], count: int) -> None:
        for i in range(count):
            operands = sets[i % len(sets)]
            bound.update(**{n: v for n, v in operands.items() if n != "out" and v is not None})
            bound()


def _narrowed(
    operation: Operation, rest: tuple[tuple[str, int], ...], along: str
) -> tuple[tuple[str, int], ...]:
    """The extents with that along a row of the output cut: the host multiplies those in milliseconds."""
    width = operation.sig.width
    return tuple((d, min(n, CHECK_WIDTH) if d == width else n) for d, n in rest)


def launches(shape: Mapping[str, int], sets: Sequence[Mapping[str, Any]]) -> int:
    """Launches of a graph: so many that it takes about GOAL_US by a first guess, and every set has its turn
    if that takes no more than four times as long."""
    views = [v for name, v in sets[0].items() if name != "out" and v is not None]
    moved = sum(prod(v.shape) * DTYPES[v.dtype] for v in (*views, *sets[0]["out"]))
    guess = max(2e6 * prod(shape.values()) / FLOPS, 1e6 * moved / BANDWIDTH, 2.0)
    return max(3, min(MOST_LAUNCHES, max(int(GOAL_US / guess), min(len(sets), int(4 * GOAL_US / guess)))))


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


def main() -> int:
    """Run the request on standard input."""
    request = json.load(sys.stdin)
    bundle = Path(request["bundle"])

    def tell(event: Event) -> None:
        print(json.dumps(event), flush=True)

    try:
        device = CudaDevice(request["ordinal"])
        with load(bundle / TREE, device) as library:
            plan = next(p for p in read_plans(bundle) if p.target == request["target"])
            with device.current():
                worker = Worker(library, device, plan, request["deadline"])
                tell({"head": worker.head()})
                for event in worker.run(
                    [Call(c["group"], c["shape"], tuple(c["candidates"])) for c in request["calls"]]
                ):
                    tell(event)
    except ContextLostError as lost:
        tell({"lost": str(lost)})
        os._exit(3)  # nothing of the context can be given back
    except KilnError as error:
        tell({"error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
