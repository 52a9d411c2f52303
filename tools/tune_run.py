"""Measuring a tuning bundle: worker processes on the device, samples in a journal that survives whatever
ends them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kiln.compiler.tuning import Run, parse_run, shape_key
from kiln.runtime.errors import KilnError, SchemaError
from kiln.tools.console import UsageError, note, plural
from kiln.tools.tune_plan import Plan, Shape, call_json, calls

Event: TypeAlias = dict[str, Any]
Spawn: TypeAlias = Callable[[Event], Iterator[Event]]
"""Starts a worker on a request; what it says, then how it ended: {"ended": sentence} unless all was done."""

SCHEMA = 1
EVERY = 10.0
"""Seconds between two lines of progress."""
SILENCE = 30.0
"""Seconds without a word after which a worker hangs."""


class TuneError(KilnError):
    """Samples that cannot be used."""


@dataclass
class Journal:
    """A samples file: a header line, then one line for each sample or failure."""

    path: Path
    head: Event | None = None
    lines: list[Event] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, resume: bool) -> Journal:
        """What the file holds; a last line that was cut short is dropped when resuming, else refused.

        Raises:
            TuneError: a line that is not JSON, or a file that is no journal.
        """
        journal = cls(path)
        if not path.is_file():
            return journal
        data = path.read_bytes()
        whole = data if data.endswith(b"\n") or not data else data[: data.rfind(b"\n") + 1]
        if whole != data:
            if not resume:
                raise TuneError(
                    f"{path}: the last line is cut short; run kiln tune --run again to complete it."
                )
            path.write_bytes(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            journal._read(number, line)
        return journal

    def _read(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
        except ValueError:
            raise TuneError(f"{self.path}: line {number} is not JSON; remove it, or measure again.") from None
        if not isinstance(value, dict):
            raise TuneError(f"{self.path}: line {number} is not an object; remove it, or measure again.")
        if number > 1:
            self.lines.append(value)
        elif value.get("kiln_samples") == SCHEMA:
            self.head = value
        else:
            raise TuneError(f"{self.path}: its first line is no header of samples (kiln_samples {SCHEMA}).")

    def begin(self, head: Event) -> None:
        """Write the header, or compare it with the one that is there.

        Raises:
            TuneError: the samples are of other kernels or of another device.
        """
        if self.head is None:
            self.head = head
            self._append(head)
            return
        for name in ("op", "target", "device", "candidates"):
            if self.head.get(name) != head[name]:
                raise TuneError(
                    f"{self.path}: its samples are of another {name}; give another --samples file."
                )

    def add(self, line: Event) -> None:
        """Keep a line, on disk at once."""
        self.lines.append(line)
        self._append(line)

    def _append(self, line: Event) -> None:
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def done(self) -> set[tuple[str, Shape, str]]:
        """What needs no measuring any more."""
        return {_key(line) for line in self.lines if "candidate" in line}

    def lost(self) -> set[str]:
        """Candidates that ended a worker."""
        return {str(line["candidate"]) for line in self.lines if line.get("fatal")}

    def run(self) -> Run:
        """The samples as a run of the database.

        Raises:
            SchemaError: a line or the header is not what this version writes.
        """
        if self.head is None:
            raise TuneError(f"{self.path}: there are no samples in it.")
        rows: dict[tuple[str, Shape], dict[str, Any]] = {}
        for number, line in enumerate(self.lines, 2):
            if "us" in line:
                try:
                    group, shape, name = _key(line)
                    rows.setdefault((group, shape), {})[name] = [line["us"], line["spread_us"]]
                except (KeyError, TypeError, AttributeError) as e:
                    raise SchemaError(f"{self.path}: line {number} is no sample ({e!r}).") from None
        listed = [
            {"checked": True, "group": group, "shape": dict(shape), "times": times}
            for (group, shape), times in sorted(rows.items())
        ]
        names = ("device", "driver", "clocks", "assembler", "date", "candidates")
        missing = [n for n in (*names, "op", "target") if n not in self.head]
        if missing:
            raise SchemaError(f"{self.path}: its header lacks {', '.join(missing)}.")
        return parse_run({**{n: self.head[n] for n in names}, "rows": listed}, str(self.path))


def _key(line: Event) -> tuple[str, Shape, str]:
    return line["group"], shape_key(line["shape"]), line["candidate"]


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    measured: int
    """Samples in the file."""
    left: int
    """Samples that are still to be made."""
    failed: Mapping[str, str]
    """Candidate -> why it may not be used."""
    samples: Path


def measure(
    plan: Plan, bundle: Path, samples: Path, budget: float | None, ordinal: int, spawn: Spawn
) -> Report:
    """Time everything that the samples file does not hold yet; a worker that ends early is replaced.

    Args:
        plan: what to measure, on one target.
        bundle: the bundle's folder.
        samples: the journal, continued where it exists.
        budget: seconds; None for no end.
        ordinal: the CUDA device.
        spawn: starts a worker.

    Raises:
        TuneError: the journal is of something else, or no worker can work.
    """
    journal = Journal.open(samples, resume=True)
    deadline = time.time() + budget if budget is not None else 1e300
    while pending := list(calls(plan, journal.done(), journal.lost())):
        request = {
            "bundle": str(bundle), "target": plan.target, "ordinal": ordinal, "deadline": deadline,
            "calls": [call_json(c) for c in pending], "lost": sorted(journal.lost()),
        }  # fmt: skip
        if not _attend(plan, journal, spawn(request)):
            break
    left = sum(len(c.candidates) for c in calls(plan, journal.done(), journal.lost()))
    failed = {str(e["candidate"]): str(e["failed"]) for e in journal.lines if "failed" in e}
    return Report(sum("us" in e for e in journal.lines), left, failed, samples)


def _attend(plan: Plan, journal: Journal, events: Iterator[Event]) -> bool:
    """Keep what a worker says; whether another one is worth starting."""
    at: list[Any] | None = None
    last = time.monotonic()
    for event in events:
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            note(f"{plural(len(journal.lines), 'sample')}, now {at}")
        if "head" in event:
            fixed = {"kiln_samples": SCHEMA, "op": plan.op, "target": plan.target}
            journal.begin({**event["head"], **fixed})
        elif "at" in event:
            at = event["at"]
        elif "candidate" in event:
            journal.add(event)
        elif "stopped" in event:
            return False
        elif "error" in event:
            raise TuneError(f"the device cannot be used: {event['error']}")
        elif "lost" in event or "ended" in event:
            why = str(event.get("lost") or event.get("ended"))
            if at is None:
                raise TuneError(f"a worker ended before it tried anything: {why}")
            group, shape, name = at
            note(f"{name}: {why}; going on without it")
            journal.add({"group": group, "shape": shape, "candidate": name, "failed": why, "fatal": True})
            return True
    return False


def spawn_worker(request: Event) -> Iterator[Event]:
    """A worker in a process of its own, which is ended if it hangs."""
    command = [sys.executable, "-m", "kiln.tools.tune_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
        said = _lines(worker)
        finished = False
        try:
            for line in said:
                if line is None:
                    worker.kill()
                    yield {"ended": f"it said nothing for {SILENCE:g} seconds, and was ended"}
                    return
                event = json.loads(line)
                finished = finished or bool(event.keys() & {"stopped", "lost", "error"})
                yield event
        finally:
            if worker.poll() is None and not finished:
                worker.kill()
            code = worker.wait()
        if not finished:
            yield {"ended": f"its worker ended with {code}"}


def _lines(worker: subprocess.Popen[str]) -> Iterator[str | None]:
    """Lines of a worker's output; None where it was silent for too long."""
    found: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            found.put(line)
        found.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = found.get(timeout=SILENCE)
        except queue.Empty:
            yield None
            return
        if not line:
            return
        yield line


def pick(plans: Sequence[Plan], target: str | None) -> Plan:
    """The plan of a target, or the only one."""
    found = [p for p in plans if target in (None, p.target)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(p.target for p in plans)
    raise UsageError(f"the bundle is of {listed}; name one of them with --target")
