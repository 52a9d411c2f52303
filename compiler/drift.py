"""Do declarations, toolchain, manifests and artifacts still agree? Every disagreement is named and
classified."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kiln.compiler.backend import TUNED, Backend, Job, as_selected
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.compare import compare
from kiln.compiler.content import TargetPlan, runnable
from kiln.compiler.errors import CheckError
from kiln.compiler.pipeline import Progress, plan_targets, prove
from kiln.compiler.reuse import Existing
from kiln.compiler.signatures import signature_json
from kiln.compiler.tree import parsed
from kiln.compiler.workers import Outcome, run_jobs
from kiln.runtime.errors import IntegrityError, UnavailableError
from kiln.runtime.files import Folder
from kiln.runtime.manifest import Index, Kernel, Manifest, parse_index
from kiln.runtime.verify import INDEX, MANIFEST, MAX_INDEX_BYTES, Fault, verify_target

Class = Literal[
    "debug-only", "code", "resources", "contract", "missing", "extra", "stale-inputs", "stale-samples",
    "toolchain",
]  # fmt: skip

_BY_KIND: Mapping[str, Class] = {"bytes": "code", "missing": "missing", "extra": "extra", "proof": "contract"}


@dataclass(frozen=True, order=True)
class Drift:
    """One disagreement."""

    target: str
    kernel: str
    """`op.variant`; or an op, a file, or MANIFEST.json where it isn't of one kernel."""
    cls: Class
    why: str


def check(
    catalogs: Sequence[str],
    root: str | os.PathLike[str],
    targets: Sequence[str] | None = None,
    rebuild: bool = False,
    sample: int | None = None,
    *,
    backends: Iterable[Backend],
    ops: Sequence[str] | None = None,
    jobs: int | None = None,
    executor: concurrent.futures.Executor | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Drift]:
    """Every drift between the declarations and the tree at `root`, sorted; none means that they agree.

    Args:
        catalogs: packages that declare ops.
        root: the tree.
        targets: names; None for every target of the tree.
        rebuild: compile again, and compare bytes and manifest entries.
        sample: with `rebuild`, only this many jobs: those whose names' SHA-256 come first, the same ones each
        time. backends: who compiles.
        ops: globs; only ops that match one are looked at.
        jobs, executor, progress: as for `kiln.compiler.pipeline.build`.

    Raises:
        CheckError: there is no tree to compare, or a kernel could not be compiled again.
        BuildError: a target or a glob that selects nothing.
    """
    path = Path(root)
    index = _read_index(path)
    known = {t: b for b in reversed(list(backends)) for t in b.targets()}
    names = list(index.targets) if targets is None else list(targets)
    loaded = load_catalogs(tuple(catalogs))
    plans = plan_targets(
        catalogs, loaded, [t for t in names if t in known or targets is not None], known.values(), ops
    )
    found = {t: _unknown(t) for t in names if t not in known}
    signatures = {name: _text(signature_json(op)) for name, op in loaded.items()}
    for plan in plans:
        found[plan.target] = _target_drift(plan, path, index, signatures)
        selected = {n: op for n, op in loaded.items() if n in plan.selected}
        for kernel, why in known[plan.target].stale_samples(selected, catalogs, plan.target):
            found[plan.target].setdefault(kernel, Drift(plan.target, kernel, "stale-samples", why))
    if rebuild:
        for drift in _rebuilt(plans, path, sample, jobs, executor, progress):
            found[drift.target][drift.kernel] = drift
    return sorted(d for drifts in found.values() for d in drifts.values())


def _read_index(root: Path) -> Index:
    try:
        with Folder.open_root(root) as folder:
            return parse_index(folder.read(INDEX, MAX_INDEX_BYTES))
    except (IntegrityError, UnavailableError) as e:
        raise CheckError(f"there is no tree to compare: {e}") from e


def _unknown(target: str) -> dict[str, Drift]:
    why = "The tree holds this target, and no backend compiles for it; remove it or restore its backend."
    return {MANIFEST: Drift(target, MANIFEST, "extra", why)}


def _target_drift(
    plan: TargetPlan, root: Path, index: Index, signatures: Mapping[str, str]
) -> dict[str, Drift]:
    """By kernel (or file, or op): how a target differs from what is declared, without compiling."""
    if plan.target not in index.targets:
        return {MANIFEST: Drift(plan.target, MANIFEST, "missing", "The tree has no such target; build it.")}
    with Folder.open_root(root) as folder:
        faults = list(verify_target(folder, plan.target, index, _parsed))
    existing = Existing.open(root, plan.target)
    if existing.manifest is None:
        return {d.kernel: d for d in _from_faults(plan, faults, {})}
    kernels = [k for k in existing.manifest.kernels if not plan.is_partial or k.op in plan.selected]
    drifts = [
        *_input_drift(plan, existing.manifest.toolchain, kernels),
        *_declaration_drift(plan, existing, signatures, kernels),
        *_from_faults(plan, faults, _by_own_file(plan.target, existing.manifest.kernels)),
    ]
    return {d.kernel: d for d in drifts}


def _parsed(data: bytes, target: str) -> Manifest:
    """The manifest, read once for its integrity and for its content."""
    return parsed(data, target).manifest


def _by_own_file(target: str, kernels: Iterable[Kernel]) -> dict[str, Kernel]:
    """Kernels by path in the tree, where a file holds only one."""
    files: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        files.setdefault(f"{target}/{kernel.file}", []).append(kernel)
    return {file: own[0] for file, own in files.items() if len(own) == 1}


def _from_faults(plan: TargetPlan, faults: Iterable[Fault], kernels: Mapping[str, Kernel]) -> Iterator[Drift]:
    for fault in faults:
        kernel = kernels.get(fault.file)
        if kernel is None:
            yield Drift(
                plan.target, fault.file.removeprefix(f"{plan.target}/"), _BY_KIND[fault.kind], fault.why
            )
        elif not plan.is_partial or kernel.op in plan.selected:
            yield Drift(plan.target, _name(kernel), _BY_KIND[fault.kind], fault.why)


def _name(kernel: Kernel | Job) -> str:
    return f"{kernel.op}.{kernel.variant}"


def _input_drift(
    plan: TargetPlan, toolchain: Mapping[str, str], kernels: Sequence[Kernel]
) -> Iterator[Drift]:
    """Jobs without a kernel, kernels without a job, kernels whose inputs changed since."""
    moved = _moves(toolchain, plan.toolchain)
    if moved:
        yield Drift(plan.target, MANIFEST, "toolchain", f"Built by other tools: {moved}; build it again.")
    claimed: set[str] = set()
    made: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        made.setdefault((kernel.op, kernel.inputs_digest), []).append(kernel)
    for job in plan.jobs:
        same = made.get((job.op, job.inputs_digest), [])
        near = same or [k for k in kernels if k.op == job.op and _is_of(k.variant, job.variant)]
        claimed |= {_name(k) for k in near}
        if not near:
            yield Drift(
                plan.target, _name(job), "missing", "Declared, but the tree has no such kernel; build it."
            )
        elif not same:
            for kernel in near:
                why = "What determines it (sources, options, tools) changed since; build it again."
                cls: Class = "toolchain" if moved else "stale-inputs"
                yield Drift(plan.target, _name(kernel), cls, f"{why} {moved}".strip())
        else:
            yield from _selection_drift(plan.target, job, same)
    for kernel in kernels:
        if _name(kernel) not in claimed:
            why = "The tree holds it, but nothing declares it; build the target again to drop it."
            yield Drift(plan.target, _name(kernel), "extra", why)


def _selection_drift(target: str, job: Job, kernels: Sequence[Kernel]) -> Iterator[Drift]:
    """Entries of a job's kernel that are used for other calls than declared, or that are missing or too
    many."""
    wanted = {str(s["variant"]): s for s in job.selections}
    there = {k.variant: k for k in kernels}
    for variant in sorted({*wanted, *there} if wanted else ()):
        name = f"{job.op}.{variant}"
        if variant not in there:
            why = "The tree has its kernel, but not this entry of it; build it again."
            yield Drift(target, name, "missing", why)
        elif variant not in wanted:
            why = "The tree holds this entry, but nothing declares it; build it again."
            yield Drift(target, name, "extra", why)
        elif not _same(_uses(there[variant]), {k: wanted[variant][k] for k in ("when", "priority", "tuned")}):
            why = "When it is used differs from what is declared or measured; build it again."
            yield Drift(target, name, "contract", why)


def _uses(kernel: Kernel) -> dict[str, Any]:
    tuned = kernel.specialization.get(TUNED)
    return {"when": kernel.when, "priority": kernel.priority, "tuned": tuned}


def _is_of(variant: str, job: str) -> bool:
    """Whether a kernel's variant is the job's, or one of several that the job makes (`job.tier`)."""
    return variant == job or variant.startswith(f"{job}.")


def _moves(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    names = sorted(n for n in {*old, *new} if old.get(n) != new.get(n))
    return ", ".join(f"{n} {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in names)


def _declaration_drift(
    plan: TargetPlan, existing: Existing, signatures: Mapping[str, str], kernels: Sequence[Kernel]
) -> Iterator[Drift]:
    """Signatures and plans that are not what is declared."""
    manifest = existing.manifest
    if manifest is None:
        return
    recipes = {(p["op"], p["variant"]): p for p in runnable(plan.recipes, {k.op for k in manifest.kernels})}
    there = {
        (p["op"], p["variant"]): p
        for p in existing.document["recipes"]
        if not plan.is_partial or p["op"] in plan.selected
    }
    for key in sorted({*recipes, *there}):
        name = ".".join(key)
        if key not in there:
            yield Drift(plan.target, name, "missing", "This plan is declared, but not in the tree; build it.")
        elif key not in recipes:
            yield Drift(
                plan.target, name, "extra", "The tree holds this plan, but nothing declares it; build again."
            )
        elif not _same(recipes[key], there[key]):
            yield Drift(
                plan.target, name, "contract", "The plan differs from its declaration; build it again."
            )
    for op in sorted({k.op for k in kernels} | {op for op, _ in recipes}):
        if op in signatures and op in manifest.ops and signatures[op] != _text(existing.document["ops"][op]):
            yield Drift(
                plan.target, op, "contract", "The op's signature differs from its declaration; build again."
            )


def _same(a: Any, b: Any) -> bool:
    return _text(a) == _text(b)


_text = json.JSONEncoder(sort_keys=True, allow_nan=False).encode
"""A JSON value as a text that is equal for equal values alone, tuples being lists."""


def _sampled(jobs: Sequence[Job], sample: int | None) -> list[Job]:
    """The first jobs in the order of their names' SHA-256."""
    if sample is None:
        return list(jobs)
    key = {id(j): hashlib.sha256(f"{j.target}/{_name(j)}".encode()).digest() for j in jobs}
    return sorted(jobs, key=lambda j: key[id(j)])[:sample]


def _rebuilt(
    plans: Sequence[TargetPlan],
    root: Path,
    sample: int | None,
    count: int | None,
    executor: concurrent.futures.Executor | None,
    progress: Callable[[Progress], None] | None,
) -> Iterator[Drift]:
    """Drifts of kernels that were compiled again and came out differently."""
    by_target = {plan.target: plan for plan in plans}
    trees = {target: Existing.open(root, target) for target in by_target}
    jobs = _sampled([job for plan in plans for job in plan.jobs if trees[plan.target].manifest], sample)
    failures: list[str] = []
    with contextlib.closing(run_jobs(jobs, count, executor)) as outcomes:
        for done, outcome in enumerate(outcomes, 1):
            job, whys = outcome.job, [outcome.why]
            if outcome.built is not None:
                whys = prove(job, outcome.built)
                yield from _compared(outcome, by_target[job.target], trees[job.target])
            if progress is not None:
                progress(Progress(done, len(jobs), job, "failed" if whys else "built", outcome.seconds))
            failures += [f"{job.target} {_name(job)}: {why}" for why in whys]
    if failures:
        raise CheckError("\n  ".join(["kernels could not be compiled again:", *sorted(failures)]))


def _compared(outcome: Outcome, plan: TargetPlan, existing: Existing) -> Iterator[Drift]:
    job = outcome.job
    before = existing.of_op(job.op)
    if outcome.built is None or before is None:
        return
    built = as_selected(job, outcome.built)
    old = {k["variant"]: k for k in before.kernels}
    for new in built.kernels:
        name = f"{job.op}.{new['variant']}"
        if new["variant"] not in old:
            yield Drift(
                job.target, name, "missing", "Compiled again, but the tree has no such kernel; build it."
            )
            continue
        was = old[new["variant"]]
        now = {**new, "toolchain": {**plan.toolchain, **new["toolchain"]}}
        cls, why = compare(job.target, was, now, before.files[was["file"]], built.files[new["file"]])
        if cls != "identical":
            yield Drift(job.target, name, cls, f"Compiled again: {why}.")
    made = {new["variant"] for new in built.kernels}
    for variant, was in old.items():
        if was["inputs_digest"] == job.inputs_digest and variant not in made:
            why = "Compiled again, its job makes no such kernel; build the target again."
            yield Drift(job.target, f"{job.op}.{variant}", "extra", why)
    for name, data in built.sources.items():
        if before.sources.get(name) != data:
            yield Drift(job.target, name, "code", "Generated again, the source differs; build it again.")
