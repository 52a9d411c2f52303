"""Running jobs in worker processes: results or sentences come back, never exceptions, and no worker outlives
its parent."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kiln.compiler.backend import Built, Job
from kiln.runtime.errors import KilnError

_DIED = "its worker process died; it may have been killed for memory, or the compiler crashed"


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    built: Built | None
    """None if it failed."""
    why: str
    """The reason of a failure."""
    seconds: float


def run_job(job: Job) -> tuple[Built | None, str, float]:
    """Call the job's runner; (result, reason of failure, seconds)."""
    began = time.perf_counter()
    try:
        module, _, name = job.runner.partition(":")
        made: Any = getattr(importlib.import_module(module), name)(job)
        if not isinstance(made, Built):
            return None, f"runner {job.runner} returned {type(made).__name__}, expected Built", 0.0
        return made, "", time.perf_counter() - began
    except KilnError as e:
        return None, str(e), time.perf_counter() - began
    except (
        Exception
    ) as e:  # a compiler may raise anything, and one kernel must not end the build of the others
        return None, f"{type(e).__name__}: {e}", time.perf_counter() - began


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(
    jobs: Sequence[Job], count: int | None = None, executor: concurrent.futures.Executor | None = None
) -> Generator[Outcome, None, None]:
    """Outcomes as they come, of `count` fresh processes (default: as many as CPUs), or of the caller's
    executor.

    A job that takes its process down fails alone. If the caller stops (an interruption too), what is pending
    is cancelled and processes of ours are ended.
    """
    pending = collections.deque(jobs)
    if executor is not None:
        lost = yield from _collect(executor, pending, len(jobs))
        yield from (Outcome(job, None, _DIED, 0.0) for job in (*lost, *pending))
        return
    while pending:
        suspects = yield from _with_processes(pending, max(1, min(count or usable_cpus(), len(pending))))
        for job in suspects:
            if (yield from _with_processes(collections.deque([job]), 1)):
                yield Outcome(job, None, _DIED, 0.0)


def _with_processes(pending: collections.deque[Job], count: int) -> Generator[Outcome, None, list[Job]]:
    """Run jobs in fresh processes; returns those that were running when one of the processes died."""
    spawn = multiprocessing.get_context("spawn")
    heard, held = spawn.Pipe(duplex=False)
    own = concurrent.futures.ProcessPoolExecutor(
        max_workers=count, mp_context=spawn, initializer=_start_worker, initargs=(heard,)
    )
    try:
        return (yield from _collect(own, pending, count))
    except BaseException:
        held.close()
        raise
    finally:
        own.shutdown(wait=True, cancel_futures=True)
        held.close()
        heard.close()


def _collect(
    executor: concurrent.futures.Executor, pending: collections.deque[Job], window: int
) -> Generator[Outcome, None, list[Job]]:
    """Take jobs from `pending`, `window` at a time; returns those that ran when the executor broke, if it
    did."""
    running: dict[concurrent.futures.Future[tuple[Built | None, str, float]], Job] = {}
    lost: list[Job] = []
    try:
        while not lost and (pending or running):
            while pending and len(running) < window:
                running[executor.submit(run_job, pending[0])] = pending[0]
                pending.popleft()
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                try:
                    yield Outcome(job, *future.result())
                except concurrent.futures.BrokenExecutor:
                    lost.append(job)
                except Exception as e:  # the result could not be carried
                    yield Outcome(job, None, f"its result was lost ({type(e).__name__}: {e})", 0.0)
    except concurrent.futures.BrokenExecutor:
        pass  # submitting failed: what runs is lost, what is pending is not
    finally:
        for future in running:
            future.cancel()
    return [*lost, *running.values()]


def _start_worker(heard: Connection[Any, Any]) -> None:
    """Ctrl-C is the parent's to handle; and when the parent lets go of its end of the pipe, or dies, workers
    end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(heard,), daemon=True).start()


def _follow(heard: Connection[Any, Any]) -> None:
    with contextlib.suppress(EOFError, OSError):
        heard.recv_bytes()
    os._exit(1)
