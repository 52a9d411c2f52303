"""From declarations to trees: plan each target, reuse what a tree already holds, run the rest, prove, write.

Compiler and backends meet here by protocol alone: the caller hands the backends in.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kiln.compiler.backend import Backend, Built, Job, as_selected
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.content import State, TargetPlan, assemble
from kiln.compiler.errors import BuildError, FailedJobs, Failure, outlook
from kiln.compiler.kept import Kept
from kiln.compiler.report import BuildReport, report_of
from kiln.compiler.reuse import Existing
from kiln.compiler.tree import claim_output, locked, write_tree
from kiln.compiler.workers import Outcome, run_jobs
from kiln.ir.spec import Op
from kiln.runtime.elf import ElfError
from kiln.runtime.errors import KilnError
from kiln.runtime.files import check_bytes
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_kernel, read_artifact

SOURCE_PACKAGES = tuple(
    f"kiln.{name}" for name in ("ir", "recipes", "compiler", "backends", "runtime", "tools")
)


@dataclass(frozen=True)
class Progress:
    """One job that is done."""

    done: int
    total: int
    job: Job
    state: State
    seconds: float


def build(
    catalogs: Sequence[str],
    targets: Sequence[str] | None,
    out: str | os.PathLike[str],
    *,
    backends: Iterable[Backend],
    ops: Sequence[str] | None = None,
    jobs: int | None = None,
    executor: concurrent.futures.Executor | None = None,
    progress: Callable[[Progress], None] | None = None,
    wait: float = 600.0,
    reuse: Path | None = None,
) -> BuildReport:
    """Bring the tree at `out` up to date.

    Args:
        catalogs: packages that declare ops.
        targets: names; None for every target of the backends.
        out: the tree; made if missing. Targets that are not named stay as they are.
        backends: who compiles; the first that knows a target gets it.
        ops: globs; ops that match none of them stay as they are in the tree. What the plans of a matching op
        call
            comes along.
        jobs: worker processes; default: as many as CPUs.
        executor: runs the jobs instead of processes of its own.
        progress: called in this thread for each job that is done.
        wait: seconds to wait for another build of the tree.
        reuse: another tree, whose kernels are taken where their inputs are the same and their proofs hold.

    Raises:
        FailedJobs: some kernels failed to compile, or broke their proof or budget. Their targets are as they
            were, the others are written; kernels that were finished are kept for the next build.
        OutputError: the output folder can't be used.
        BuildError, CheckError: nothing was written.
    """
    path = claim_output(out, source_folders(catalogs))
    loaded = load_catalogs(tuple(catalogs))
    plans = plan_targets(catalogs, loaded, targets, backends, ops)
    with locked(path, wait):
        kept = Kept(path)
        with _told(kept):
            run_plans(plans, path, jobs, executor, progress, kept, reuse)
        contents = {p.target: content for p in plans if (content := assemble(p, loaded, path)) is not None}
        written = write_tree(path, contents) if contents else None
        for plan in plans:
            unwritten = plan.jobs if plan.failures else ()
            kept.settle(plan.target, plan.selected if plan.is_partial else None, unwritten)
    report = report_of(plans, path, written, kept.why)
    if report.failures:
        raise FailedJobs(report.failures, report)
    if written is None:
        raise BuildError(_nothing(plans, loaded))
    return report


def _nothing(plans: Sequence[TargetPlan], loaded: Mapping[str, Op]) -> str:
    """Why there is nothing to build."""
    why = [f"nothing to build: {', '.join(p.target for p in plans)} has no kernel of what was selected"]
    selected: frozenset[str] = frozenset().union(*(p.selected for p in plans))
    for op in map(loaded.__getitem__, sorted(selected)):
        if not op.ship:
            why.append(f"{op.name} ships nothing: declare ship=(Ship(...),), the types to compile for")
        elif op.reference is not None:
            why.append(f"{op.name} has a reference alone: no catalog here lists a kernel of it for them")
    return "; ".join(why[:6])


@contextlib.contextmanager
def _told(kept: Kept) -> Iterator[None]:
    """Say with an interruption what becomes of the kernels that were finished."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(outlook(kept.why))
        raise


def source_folders(catalogs: Iterable[str]) -> list[Path]:
    """Where sources lie, which no output may touch: Kiln's own packages, and catalogs (a folder, or a
    file)."""
    found: list[Path] = []
    for name in (*SOURCE_PACKAGES, *catalogs):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue  # not every installation has all of them; a missing catalog is told when it is loaded
        if spec is not None and spec.submodule_search_locations:
            found += [Path(p) for p in spec.submodule_search_locations]
        elif spec is not None and spec.origin:
            found.append(Path(spec.origin))
    return found


def plan_targets(
    catalogs: Sequence[str],
    loaded: Mapping[str, Op],
    targets: Sequence[str] | None,
    backends: Iterable[Backend],
    ops: Sequence[str] | None,
) -> list[TargetPlan]:
    """One plan a target; BuildError for a target, or a glob, that selects nothing."""
    by_target: dict[str, Backend] = {}
    for backend in backends:
        by_target = dict.fromkeys(backend.targets(), backend) | by_target
    for glob in ops or ():
        if not any(fnmatchcase(name, glob) for name in loaded):
            raise BuildError(_nearest("op", glob, loaded))
    plans = []
    recipes: dict[str, list[dict[str, Any]]] = {}
    for target in dict.fromkeys(by_target if targets is None else targets):
        if target not in by_target:
            raise BuildError(_nearest("target", target, by_target))
        backend = by_target[target]
        if backend.name not in recipes:
            recipes[backend.name] = backend.recipes(loaded, catalogs)
        plans.append(_plan(backend, target, catalogs, loaded, ops, recipes[backend.name]))
    return plans


def _nearest(kind: str, name: str, known: Iterable[str]) -> str:
    legal = sorted(known)
    near = difflib.get_close_matches(name, legal, 3) or legal
    return f"no {kind} is named {name!r}; there are {', '.join(near[:12])}"


def _plan(
    backend: Backend,
    target: str,
    catalogs: Sequence[str],
    loaded: Mapping[str, Op],
    ops: Sequence[str] | None,
    recipes: list[dict[str, Any]],
) -> TargetPlan:
    jobs = backend.plan(loaded, catalogs, target)
    selected = {n for n in loaded if ops is None or any(fnmatchcase(n, g) for g in ops)}
    while more := {s["op"] for p in recipes if p["op"] in selected for s in p["steps"]} - selected:
        selected |= more
    jobs = [job for job in jobs if job.op in selected]
    names = [(job.op, job.variant) for job in jobs]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise BuildError(f"{target}: {'.'.join(twice)} is planned twice; give its variants different names")
    own_recipes = [p for p in recipes if p["op"] in selected]
    return TargetPlan(
        target, backend.toolchain(target), jobs, own_recipes, frozenset(selected), ops is not None
    )


def run_plans(
    plans: Sequence[TargetPlan],
    out: Path | None,
    jobs: int | None,
    executor: concurrent.futures.Executor | None,
    progress: Callable[[Progress], None] | None,
    kept: Kept | None = None,
    reuse: Path | None = None,
) -> None:
    """Fill in the results of every job: from the tree at `out` or that at `reuse` (None: from nowhere) where
    its inputs are unchanged, or from what is `kept` of a build that wrote none. What is compiled here is kept
    there."""
    total, done = sum(len(plan.jobs) for plan in plans), 0
    pending: list[Job] = []

    def tell(job: Job, state: State, seconds: float) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(Progress(done, total, job, state, seconds))

    for plan in plans:
        reused: dict[tuple[str, str], Built] = {}
        for tree in filter(None, (reuse, out)):
            reused |= Existing.open(tree, plan.target).results(plan.jobs)
        for job in plan.jobs:
            built = reused.get((job.op, job.variant))
            if built is not None:
                built = as_selected(job, built)
            elif kept is not None:
                built = _kept(job, kept)
            if built is None:
                pending.append(job)
            else:
                plan.results[job.op, job.variant] = (built, "reused", 0.0)
                tell(job, "reused", 0.0)
    by_target = {plan.target: plan for plan in plans}
    with contextlib.closing(run_jobs(pending, jobs, executor)) as outcomes:
        for outcome in outcomes:
            state = _take(by_target[outcome.job.target], outcome)
            if kept is not None and outcome.built is not None and state == "built":
                kept.keep(outcome.job, outcome.built)
            tell(outcome.job, state, outcome.seconds)


def _kept(job: Job, kept: Kept) -> Built | None:
    """The kept result of a job, if it holds what it promises."""
    found = kept.get(job)
    built = None if found is None else as_selected(job, found)
    return None if built is None or prove(job, built) else built


def _take(plan: TargetPlan, outcome: Outcome) -> State:
    """Enter an outcome into its plan, if it holds what it promises."""
    job = outcome.job
    built = None if outcome.built is None else as_selected(job, outcome.built)
    whys = [outcome.why] if built is None else prove(job, built)
    if built is not None and not whys:
        plan.results[job.op, job.variant] = (built, "built", outcome.seconds)
        return "built"
    plan.failures += [Failure(job.target, job.op, job.variant, why) for why in whys]
    return "failed"


def prove(job: Job, built: Built) -> list[str]:
    """Why a result can't be used: entries that break the schema, the launch proof or their budget; files
    astray."""
    if not built.kernels:
        return ["the result holds no kernel"]
    faults: list[str] = []
    for value in built.kernels:
        try:
            kernel = parse_kernel(value)
            if (kernel.op, kernel.inputs_digest) != (job.op, job.inputs_digest):
                faults.append(
                    f"the result is of {kernel.op} with inputs {kernel.inputs_digest}, not of its job"
                )
            elif kernel.file not in built.files:
                faults.append(f"the result has no file {kernel.file}")
            else:
                data = built.files[kernel.file]
                check_bytes(data, kernel.bytes, kernel.sha256, f"{kernel.file}, as made,")
                artifact = read_artifact(job.target, data)
                faults += prove_kernel(kernel, job.target, artifact)
        except ElfError as e:
            faults.append(f"{value['file']}: {e}")
        except KilnError as e:
            faults.append(str(e))
    return faults
