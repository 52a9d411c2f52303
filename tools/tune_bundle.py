"""Making a tuning bundle: every candidate of an op, compiled into a tree of its own by the build's
machinery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kiln.backends.cuda import tuned
from kiln.backends.cuda.backend import CudaBackend, own_candidates
from kiln.backends.cuda.cost_model import operand_types
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.compiler.backend import Backend, Job
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.content import TargetPlan, assemble
from kiln.compiler.errors import Failure
from kiln.compiler.pipeline import Progress, plan_targets, run_plans, source_folders
from kiln.compiler.tree import claim_output, locked, write_tree
from kiln.ir.dtypes import DType
from kiln.ir.spec import Op
from kiln.recipes.tuning import SPACES, Space
from kiln.tools.console import UsageError, nearest
from kiln.tools.declared import KILN
from kiln.tools.tune_plan import SCHEMA, TREE, Group, Plan, write_plans


@dataclass(frozen=True)
class Made:
    """A bundle that was written."""

    root_digest: str
    plans: tuple[Plan, ...]
    failures: tuple[Failure, ...]
    """Candidates that did not compile; the bundle is without them."""


class CandidateBackend:
    """A Backend whose artifacts are the candidates of one op."""

    name = "cuda"

    def __init__(self, globs: Sequence[str] | None) -> None:
        self._inner, self._globs = CudaBackend(), globs

    def targets(self) -> tuple[str, ...]:
        """See Backend."""
        return self._inner.targets()

    def toolchain(self, target: str) -> dict[str, str]:
        """See Backend."""
        return self._inner.toolchain(target)

    def recipes(self, ops: Mapping[str, Op], catalogs: Sequence[str]) -> list[dict[str, Any]]:
        """None: candidates are kernels."""
        return []

    def stale_samples(
        self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str
    ) -> list[tuple[str, str]]:
        """None: a bundle is what will be measured."""
        return []

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        """See Backend."""
        found = [job for op in ops for job in self._inner.candidate_jobs(op, catalogs, target)]
        return [
            j for j in found if self._globs is None or any(fnmatchcase(j.variant, g) for g in self._globs)
        ]


def make_bundle(
    op: str,
    targets: Sequence[str],
    out: Path,
    shapes: Sequence[Mapping[str, int]] | None = None,
    globs: Sequence[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Made:
    """Compile candidates for targets into a bundle; what it already holds with the same inputs is reused.

    Args:
        op: one that has candidates.
        targets: CUDA targets.
        out: the bundle's folder, made if missing.
        shapes: calls to measure; default: the op's of recipes/tuning.py.
        globs: only candidates whose names match one.
        jobs: worker processes.
        progress: called for each candidate that is done.
    """
    known = own_candidates()
    if op not in known:
        raise UsageError(nearest(op, known, "op with candidates to tune"))
    loaded = load_catalogs((KILN,))
    backend: Backend = CandidateBackend(globs)
    plans = plan_targets((KILN,), loaded, targets, [backend], [op])
    path = claim_output(out / TREE, source_folders((KILN,)))
    with locked(path):
        run_plans(plans, path, jobs, None, progress)
        failures = tuple(failure for plan in plans for failure in plan.failures)
        for plan in plans:
            plan.failures.clear()
            plan.is_partial = False  # candidates that are gone leave the bundle
        contents = {p.target: content for p in plans if (content := assemble(p, loaded, path)) is not None}
        if not contents:
            raise UsageError(_nothing(op, failures))
        written = write_tree(path, contents)
    wanted = tuple(shapes or SPACES.get(op, Space()).shapes())
    made = tuple(_plan(p, loaded[op], wanted) for p in plans if p.target in contents)
    write_plans(out, made)
    return Made(written.root_digest, made, failures)


def _nothing(op: str, failures: Sequence[Failure]) -> str:
    if failures:
        return f"no candidate of {op} compiled: {failures[0].op}.{failures[0].variant}: {failures[0].why}"
    return f"no candidate of {op} is for these targets and globs"


def _plan(target: TargetPlan, op: Op, shapes: Sequence[Mapping[str, int]]) -> Plan:
    own = own_candidates()[op.name]
    rows = {row.variant: row for row in tuned.legal(own.rows, target.target)}
    digests = {
        entry["variant"]: entry["inputs_digest"]
        for built, _, _ in target.results.values()
        for entry in built.kernels
    }
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(digests):
        groups.setdefault(tuned.group(rows[name]), {})[name] = digests[name]
    ranked = [*own.defaults, *sorted(digests)]
    found = {}
    for label, names in sorted(groups.items()):
        # The default that takes most calls is the one that the others are compared with.
        trusted = [n for n in reversed(own.defaults) if n in names] or [n for n in ranked if n in names]
        first = rows[trusted[0]]
        types, derived = _types(op, first), SPACES.get(op.name, Space()).derived
        found[label] = Group(types, tuned.attrs_of(first), trusted[0], names, derived)
    return Plan(SCHEMA, op.name, target.target, op.rows, found, tuple(shapes))


def _types(op: Op, row: CudaPrimitive) -> dict[str, str]:
    """Element types of the operands as a call has them: a kernel may read codes as bytes."""
    fixed = {t.name: t.dtype.name for t in op.tensors if isinstance(t.dtype, DType)}
    return {name: fixed.get(name, dtype) for name, dtype in operand_types(row).items()}
