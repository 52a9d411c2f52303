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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from kiln.runtime.bound import BoundCall
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.errors import ContextLostError, KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.operation import Operation
from kiln.tools.machine import describe
from kiln.tools.tune_check import Numbers
from kiln.tools.tune_device import Bench, summary
from kiln.tools.tune_plan import TREE, Call, Plan, read_plans

Event: TypeAlias = dict[str, Any]

GOAL_US = 300.0
"""Of one graph: short kernels are launched so often that the clock's grain is below 1 %."""
MOST_LAUNCHES = 48
REPLAYS = 9
HOPELESS = 1.3
"""A first replay so much slower than the best one's is the only one: the median of nine moves by a few
percent."""
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

    def __init__(
        self, library: Library, device: CudaDevice, plan: Plan, deadline: float, lost: Collection[str] = ()
    ) -> None:
        """`lost` are candidates that ended a worker: they run no more, not even to be compared with."""
        self.plan, self.deadline, self._device, self._lost = plan, deadline, device, lost
        self.operation: Operation = library.op(plan.op)
        self.bench = Bench(device)
        self.numbers = Numbers(self.bench, self.operation, plan)

    def head(self) -> Event:
        """What the samples are of."""
        device, driver = describe(self._device)
        kernels = self.numbers.kernels.values()
        versions = {v for k in kernels for n, v in k.toolchain.items() if n == "ptxas"}
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
        for name in self.numbers.beside_host(call):
            yield {"at": [call.group, dict(call.shape), name]}
        # After those calls, which are on the same memory.
        sets = self.bench.operands(self.operation.sig, group.types, group.dims(call.shape))
        yield {"at": [call.group, dict(call.shape), group.trusted]}
        trusted = None if group.trusted in self._lost else self.numbers.trusted(group, sets[0])
        contenders: list[Contender] = []
        for name in call.candidates:
            yield {"at": [call.group, dict(call.shape), name]}
            where = {"group": call.group, "shape": dict(call.shape), "candidate": name}
            bound = self.numbers.bind(group, name, sets[0])
            if isinstance(bound, str):
                yield {**where, "passed": bound}
                continue
            why = self.numbers.fault(call, name) or self.numbers.against(trusted, bound, name, sets[0])
            if why is not None:
                yield {**where, "failed": why}
                continue
            contenders.append(Contender(name, bound))
        yield from self._timed(call, contenders, sets)

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


def launches(shape: Mapping[str, int], sets: Sequence[Mapping[str, Any]]) -> int:
    """Launches of a graph: so many that it takes about GOAL_US by a first guess, and every set has its turn
    if that takes no more than four times as long."""
    views = [v for name, v in sets[0].items() if name != "out" and v is not None]
    moved = sum(prod(v.shape) * DTYPES[v.dtype] for v in (*views, *sets[0]["out"]))
    guess = max(2e6 * prod(shape.values()) / FLOPS, 1e6 * moved / BANDWIDTH, 2.0)
    return max(3, min(MOST_LAUNCHES, max(int(GOAL_US / guess), min(len(sets), int(4 * GOAL_US / guess)))))


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
                worker = Worker(library, device, plan, request["deadline"], request["lost"])
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
