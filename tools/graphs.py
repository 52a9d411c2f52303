"""What only a device can show of a sealed library: every kernel and plan captured in a CUDA graph as its
first use, replays that equal eager calls to the bit, poisoned scratch, two streams at once, foreign contexts,
and a soak of mixed launches."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kiln.runtime.cuda import CudaDevice
from kiln.runtime.entities import Kernel, Plan
from kiln.runtime.errors import KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.scratch import ScratchPolicy
from kiln.runtime.select import entry_of
from kiln.tools.campaign import targets_of
from kiln.tools.cases import STYLES, Case, Deriver, Judge, arguments, internal_ops
from kiln.tools.console import UsageError, emit, note
from kiln.tools.fill import inputs
from kiln.tools.machine import describe
from kiln.tools.memory import Bytes, DriverRig, staged
from kiln.tools.trees import matches, require_matches

REPLAYS = 3
"""Replays of each graph, each with data of its own."""
FEW = 8
"""Calls that are tried in foreign contexts."""
ROUNDS = 50
"""Rounds on two streams at once."""
POISON = 0xFF
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: not ordered with the default stream."""
GLOBAL = 0
"""CU_STREAM_CAPTURE_MODE_GLOBAL: what is unsafe anywhere in the process while a stream is captured fails."""
SLACK = 2 << 20
"""Bytes of device memory that may come and go without being lost."""
HOST_SLACK = 16 << 10
"""KiB of this process that may come and go: allocators round."""

Open = Callable[[ScratchPolicy], Library]
"""Opens the tree on the device once more."""


@dataclass
class Check:
    """One thing that was looked at."""

    name: str
    count: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class Subject:
    """A kernel or plan, a call of it, and the memory of that call."""

    case: Case
    rig: DriverRig
    operands: dict[str, Any]

    def block(self, library: Library, turn: int) -> Bytes:
        """The call's memory before it runs, with other data each turn."""
        case = dataclasses.replace(self.case, seed=self.case.seed + 1000 * turn)
        sig = library.op(case.op).sig
        with np.errstate(all="ignore"):
            return staged(self.case, inputs(sig, case, finite=False), POISON)

    @property
    def in_place(self) -> bool:
        """Whether the call overwrites what it reads."""
        return any(s.tensor.role == "inout" or s.alias for s in self.case.slots)


class Stage:
    """A device's streams and graphs."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.call = device.driver.call
        with device.current():
            self.streams = [int(self.call("cuStreamCreate", NON_BLOCKING)) for _ in range(2)]

    @property
    def stream(self) -> int:
        """The stream of everything that needs only one."""
        return self.streams[0]

    def settle(self) -> None:
        """Wait for everything."""
        with self.device.current():
            self.call("cuCtxSynchronize")

    def put(self, subject: Subject, block: Bytes) -> None:
        """Set the memory of a call; small copies return before they have arrived."""
        self.settle()
        subject.operands = subject.rig.put(subject.case, block)
        self.settle()

    def get(self, subject: Subject) -> bytes:
        """The memory of a call, once all work is done."""
        self.settle()
        return bytes(subject.rig.get(subject.case.bytes))

    def capture(self, work: Callable[[], Any]) -> Any:
        """A graph of what `work` queues on the stream."""
        with self.device.current():
            mode = getattr(self.device.driver.module, "CUstreamCaptureMode", lambda value: value)(GLOBAL)
            self.call("cuStreamBeginCapture", self.stream, mode)
            try:
                work()
            finally:
                graph = self.call("cuStreamEndCapture", self.stream)
            return self.call("cuGraphInstantiate", graph, 0)

    def replay(self, graph: Any) -> None:
        """Queue a graph on the stream."""
        with self.device.current():
            self.call("cuGraphLaunch", graph, self.stream)

    def free_memory(self) -> int:
        """Bytes of the device that nobody holds."""
        with self.device.current():
            return int(self.call("cuMemGetInfo")[0])

    @contextmanager
    def foreign_context(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """What runs work while another context of the device is current."""
        handle = _new_context(self.device)
        self.call("cuCtxPopCurrent")

        def within(work: Callable[[], None]) -> None:
            self.call("cuCtxPushCurrent", handle)
            try:
                work()
            finally:
                self.call("cuCtxPopCurrent")

        try:
            yield within
        finally:
            self.call("cuCtxDestroy", handle)


def _new_context(device: CudaDevice) -> Any:
    # CUDA 13 put a structure of options before the flags.
    try:
        return device.driver.call("cuCtxCreate", None, 0, device.device)
    except TypeError:
        return device.driver.call("cuCtxCreate", 0, device.device)


Selected = Callable[[str], bool]
"""Which ops, by name."""


def subjects(library: Library, target: str, selected: Selected) -> tuple[list[Subject], list[str]]:
    """(a call for each kernel and plan that the device runs, faults of those for which none was found)."""
    device = cuda(library)
    found, faults = [], []
    internal = internal_ops(library.manifests[target].recipes)
    for name in library.manifests[target].ops:
        if name in internal or not selected(name):
            continue
        operation = library.operation(target, name)
        for candidate in operation.candidates:
            if isinstance(candidate, Kernel) and device.refusal(candidate) is not None:
                continue
            if entry_of(candidate, operation.candidates) is not None:
                continue
            case = _case(Deriver(Judge(operation, device.ordinal), candidate))
            if case is None:
                faults.append(f"{name}.{candidate.variant}: no call could be derived that selects it")
            else:
                found.append(Subject(case, DriverRig(device), {}))
    return found, faults


def _case(deriver: Deriver) -> Case | None:
    return next((c for n, style in enumerate(STYLES) if (c := deriver.find(style, n)) is not None), None)


def cuda(library: Library) -> CudaDevice:
    """The library's device.

    Raises:
        UsageError: it is no CUDA device.
    """
    if not isinstance(library.device, CudaDevice):
        raise UsageError("graphs and soaks are of CUDA devices; give --device cuda")
    return library.device


def run_call(library: Library, subject: Subject, stream: int) -> None:
    """An eager call."""
    library.op(subject.case.op)(**call_of(library, subject), stream=stream)


def call_of(library: Library, subject: Subject) -> dict[str, Any]:
    """The call's arguments by name."""
    return arguments(library.op(subject.case.op).sig, subject.case, subject.operands)


def plain_call_of(library: Library, subject: Subject) -> dict[str, Any]:
    """The same without naming the variant, where that is what runs: such calls go the short way."""
    named = call_of(library, subject)
    plain = {k: v for k, v in named.items() if k not in ("variant", "mode")}
    chosen = library.op(subject.case.op).explain(**plain).chosen
    return plain if chosen is not None and chosen.variant == subject.case.variant else named


def seal_for(library: Library, stage: Stage, found: Sequence[Subject]) -> None:
    """Prepare every kernel, reserve the scratch of the calls, and seal."""
    library.prepare()
    for s in found:
        stage.put(s, s.block(library, 0))
        library.reserve(s.case.op, **call_of(library, s), stream=stage.stream)
    library.seal()


def graphs(opened: Open, target: str, selected: Selected) -> list[Check]:
    """Capture each call as the first use of its kernel, then compare replays with eager calls."""
    captured, replayed = Check("captured as first use"), Check("replays equal eager calls")
    with opened(ScratchPolicy()) as sealed, opened(ScratchPolicy(poison=True)) as plain:
        stage = Stage(cuda(sealed))
        found, captured.faults = subjects(sealed, target, selected)
        seal_for(sealed, stage, found)
        kept: list[tuple[Subject, Any]] = []
        for s in found:
            try:
                kept.append((s, stage.capture(lambda s=s: run_call(sealed, s, stage.stream))))  # type: ignore[misc]
                captured.count += 1
            except KilnError as e:
                captured.faults.append(f"{s.case}: {e}")
        note(f"captured {captured.count} of {len(found)} calls")
        for s, graph in kept:
            for turn in range(1, REPLAYS + 1):
                replayed.count += 1
                if _replayed(sealed, stage, s, graph, turn) != eager(plain, stage, s, turn):
                    replayed.faults.append(f"{s.case}: replay {turn} differs from the eager call")
    return [captured, replayed]


def _replayed(library: Library, stage: Stage, s: Subject, graph: Any, turn: int) -> bytes:
    stage.put(s, s.block(library, turn))
    library.scratch.poison(stage.stream)
    stage.replay(graph)
    return stage.get(s)


def eager(library: Library, stage: Stage, s: Subject, turn: int) -> bytes:
    """The memory of a call after it ran once."""
    stage.put(s, s.block(library, turn))
    run_call(library, s, stage.stream)
    return stage.get(s)


def scratch(opened: Open, target: str, selected: Selected) -> list[Check]:
    """Calls with scratch give the same bits whether it is pooled, poisoned or allocated at each call."""
    check = Check("scratch: pooled, poisoned, and without a pool")
    policies = (ScratchPolicy(), ScratchPolicy(poison=True), ScratchPolicy(pool=False))
    with opened(policies[0]) as a, opened(policies[1]) as b, opened(policies[2]) as c:
        stage = Stage(cuda(a))
        plans = {p.variant for p in a.manifests[target].recipes}
        for s in subjects(a, target, selected)[0]:
            if s.case.variant in plans or _has_scratch(a, target, s):
                check.count += 1
                first, *others = (eager(library, stage, s, 1) for library in (a, b, c))
                if any(o != first for o in others):
                    check.faults.append(f"{s.case}: its bits depend on where its scratch comes from")
    return [check]


def _has_scratch(library: Library, target: str, s: Subject) -> bool:
    candidates: Sequence[Kernel | Plan] = library.operation(target, s.case.op).candidates
    return any(c.variant == s.case.variant and isinstance(c, Kernel) and bool(c.scratch) for c in candidates)


def streams(opened: Open, target: str, selected: Selected) -> list[Check]:
    """The same calls on two streams at once, each on memory of its own."""
    check = Check("two streams at once")
    with opened(ScratchPolicy()) as library:
        stage = Stage(cuda(library))
        for s in subjects(library, target, selected)[0]:
            check.count += 1
            twin = Subject(s.case, DriverRig(cuda(library)), {})
            expected = eager(library, stage, s, 1)
            for subject in (s, twin):
                stage.put(subject, subject.block(library, 1))
            for _ in range(1 if s.in_place else ROUNDS):
                for subject, stream in zip((s, twin), stage.streams, strict=True):
                    run_call(library, subject, stream)
            if not stage.get(s) == stage.get(twin) == expected:
                check.faults.append(f"{s.case}: its bits change beside another stream")
    return [check]


def contexts(opened: Open, target: str, selected: Selected) -> list[Check]:
    """Calls from a thread without a context, and while another context of the device is current, captured
    too."""
    check = Check("no context, or another one current")
    with opened(ScratchPolicy()) as library:
        stage = Stage(cuda(library))
        with stage.foreign_context() as within:
            ways: dict[str, Callable[[Callable[[], None]], None]] = {
                "no context": _in_thread,
                "another context": within,
                "another context, captured": lambda work: stage.replay(stage.capture(lambda: within(work))),
            }
            for s in subjects(library, target, selected)[0][:FEW]:
                expected = eager(library, stage, s, 1)
                for name, around in ways.items():
                    check.count += 1
                    stage.put(s, s.block(library, 1))
                    check.faults += _called(around, library, s, stage.stream, name)
                    if stage.get(s) != expected:
                        check.faults.append(f"{s.case}: its bits change with {name}")
    return [check]


def _called(
    around: Callable[[Callable[[], None]], None], library: Library, s: Subject, stream: int, name: str
) -> list[str]:
    try:
        around(lambda: run_call(library, s, stream))
    except KilnError as e:
        return [f"{s.case}: with {name}: {e}"]
    return []


def _in_thread(work: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except KilnError as e:
            raised.append(e)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def soak(opened: Open, target: str, selected: Selected, launches: int) -> list[Check]:
    """So many calls and bound calls in turn: equal bits to the end, and no memory lost."""
    bits, memory = Check("equal bits to the end"), Check("constant memory")
    with opened(ScratchPolicy()) as library:
        stage = Stage(cuda(library))
        found = subjects(library, target, selected)[0]
        expected = [eager(library, stage, s, 1) for s in found]
        steady = [s for s in found if not s.in_place]
        for s in steady:
            stage.put(s, s.block(library, 1))
        calls = [(library.op(s.case.op), plain_call_of(library, s)) for s in steady]
        bound = [op.bind(**named, stream=stage.stream) for op, named in calls]
        before: tuple[int, int] | None = None
        for number in itertools.count():
            if bits.count >= launches or not steady:
                break
            for (op, named), call in zip(calls, bound, strict=True):
                op(**named, stream=stage.stream)
                call()
            bits.count += 2 * len(steady)
            if number % 100 == 0:
                stage.settle()
                before = before or _memory(stage)
        after = _memory(stage)
        _compare(bits, library, stage, found, expected)
    memory.count = 1
    if before is not None and (before[0] - after[0] > SLACK or after[1] - before[1] > HOST_SLACK):
        memory.faults.append(f"found {before[0] - after[0]} bytes and {after[1] - before[1]} KiB lost")
    return [bits, memory]


def _memory(stage: Stage) -> tuple[int, int]:
    """(free bytes of the device, KiB that this process ever held)."""
    return stage.free_memory(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _compare(
    check: Check, library: Library, stage: Stage, found: Sequence[Subject], expected: Sequence[bytes]
) -> None:
    for s, wanted in zip(found, expected, strict=True):
        if not s.in_place and stage.get(s) != wanted:
            check.faults.append(f"{s.case}: its bits changed in the soak")
        if s.in_place and eager(library, stage, s, 1) != wanted:
            check.faults.append(f"{s.case}: its bits changed after the soak")


def run(args: argparse.Namespace, root: Path) -> int:
    """Everything that --graphs and --soak ask for, and a summary."""
    began = time.perf_counter()
    ordinal = int(args.device.partition(":")[2] or 0)

    def opener(which: int) -> Open:
        return lambda policy: load(root, CudaDevice(which, scratch=policy))

    opened = opener(ordinal)
    with opened(ScratchPolicy()) as library:
        count = int(cuda(library).driver.call("cuDeviceGetCount"))
        target = targets_of(library, args.target)[0]
        require_matches(args.op, library.ops)
        label = describe(library.device)
    checks = look(opened, target, lambda op: matches(op, args.op), args.graphs, args.soak)
    if args.graphs and count > 1:
        from kiln.tools.several import devices

        opens = [opener(n) for n in range(count)]
        checks += devices(opens, target, lambda op: matches(op, args.op))
    elif args.graphs:
        note("one device here: several at once were not tried")
    ok = all(c.count and not c.faults for c in checks)
    document = {"ok": ok, "device": label[0], "driver": label[1], "target": target}
    document["seconds"] = round(time.perf_counter() - began, 3)
    emit(args, {**document, "checks": [dataclasses.asdict(c) for c in checks]}, lambda: summary(checks))
    return 0 if ok else 1


def look(opened: Open, target: str, selected: Selected, all_of: bool, launches: int) -> list[Check]:
    """The checks that were asked for."""
    checks: list[Check] = []
    if all_of:
        for work in (graphs, scratch, streams, contexts):
            checks += work(opened, target, selected)
            note("; ".join(f"{c.name}: {c.count}, {len(c.faults)} faults" for c in checks))
    if launches:
        checks += soak(opened, target, selected, launches)
    return checks


def summary(checks: Sequence[Check]) -> str:
    """One line a check, then the faults."""
    lines = [f"{c.name}: {c.count} tried, {len(c.faults)} faults" for c in checks]
    return "\n".join([*lines, *(fault for c in checks for fault in c.faults[:20])])
