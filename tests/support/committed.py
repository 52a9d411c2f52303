"""Trees for tests, without compiling what the committed tree holds already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kiln.compiler.backend import Backend
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.kept import Kept
from kiln.compiler.pipeline import build, plan_targets
from kiln.compiler.report import BuildReport
from kiln.compiler.reuse import Existing

TREE = Path(__file__).parents[2] / "aot_artifacts"
CATALOG = "kiln.recipes"


def build_from(
    out: Path,
    targets: Sequence[str],
    ops: Iterable[str],
    backends: Sequence[Backend],
    catalogs: Sequence[str] = (CATALOG,),
    tree: Path = TREE,
) -> BuildReport:
    """Build ops of catalogs at `out`; kernels whose inputs are those of a kernel of `tree` are its.

    An inputs digest stands for all that makes an artifact's bytes, the compiler's sources and the versions of
    its tools included, and `kiln check --rebuild` holds the committed tree to it. The rest is compiled.
    """
    wanted, kept = list(ops), Kept(out)
    for plan in plan_targets(catalogs, load_catalogs(tuple(catalogs)), targets, backends, wanted):
        made = Existing.open(tree, plan.target).results(plan.jobs)
        for job in plan.jobs:
            if (job.op, job.variant) in made:
                kept.keep(job, made[job.op, job.variant])
    return build(catalogs, targets, out, backends=backends, ops=wanted, jobs=2)
