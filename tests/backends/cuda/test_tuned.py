"""What a target ships of an op's candidates, and that selection on a real manifest entry follows the
database."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kiln.backends.cuda import tuned
from kiln.backends.cuda.backend import CudaBackend, own_candidates
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.variants import gemm
from kiln.compiler.target import TARGETS
from kiln.compiler.tuning import Database, Row, Run, Time
from kiln.ir.spec import Op
from kiln.recipes.gemm import MATMUL_BT
from kiln.recipes.tuning import SPACES
from kiln.runtime.expr import Env, parse_pred, why_not

OWN = tuned.Candidates(gemm.CANDIDATES, gemm.DEFAULTS, frozenset(gemm.DEFAULTS))
GROUP = "out=bf16 weight=bf16 x=bf16"
DIGEST = "a" * 64
SIZE = {"N": 4096, "K": 4096}
ROOT = Path(__file__).parents[3]


def measured(*rows: tuple[int, dict[str, float]], **size: int) -> Database:
    found = tuple(
        Row(GROUP, {"M": m, **(size or SIZE)}, {n: Time(us, 0.1) for n, us in times.items()})
        for m, times in rows
    )
    names = {n for row in found for n in row.times}
    run = Run("H200", "13.0", "clocks", "13.4", "2026-01-01T00:00:00Z", dict.fromkeys(names, DIGEST), found)
    return Database("matmul_bt", "sm_90a", (run,))


def entries(known: Database, op: Op = MATMUL_BT) -> dict[str, tuned.Entry]:
    shipped = tuned.shipped(OWN, op, known)
    return {entry.variant: entry for kernel in shipped for entry in kernel.entries}


def call(m: int, n: int = 4096, k: int = 4096, aligned: bool = True, dtype: str = "bf16") -> Env:
    env = Env()
    env.dims = {"M": m, "N": n, "K": k}
    env.strides = {"x": k, "weight": k, "out": n}
    env.dtypes = dict.fromkeys(("x", "weight", "out"), dtype)
    env.pointers = dict.fromkeys(("x", "weight", "out"), 256 if aligned else 258)
    return env


def runs(found: dict[str, tuned.Entry], env: Env) -> str:
    """The entry that selection takes: highest priority, then by name."""
    order = sorted(found.values(), key=lambda e: (-e.priority, e.variant))
    return next(e.variant for e in order if why_not(parse_pred(e.when), env) is None)


def test_nothing_measured_is_the_model_and_the_defaults() -> None:
    found = entries(Database("matmul_bt", "sm_120a"))
    assert {e.tuned for v, e in found.items() if v.endswith(".rows")} == {"model"}
    assert not [v for v in found if v.endswith(".shapes")]
    assert {e.tuned for v, e in found.items() if "." not in v} == {"default"}
    assert set(gemm.DEFAULTS) <= found.keys()
    assert runs(found, call(16)) == "bf16_m16.rows"
    assert runs(found, call(16, aligned=False)) == "bf16_any_unaligned"


def test_measured_calls_take_what_was_measured() -> None:
    known = measured((1, {"bf16_m16": 9.0, "bf16_m64": 5.0}), (64, {"bf16_m64": 8.0, "bf16_any": 4.0}))
    found = entries(known)
    assert found["bf16_m64.shapes"].tuned == "measured"
    assert [runs(found, call(m)) for m in (1, 2, 64, 65)] == [
        "bf16_m64.shapes", "bf16_any.shapes", "bf16_any.shapes", "bf16_any.shapes",
    ]  # fmt: skip
    # Of a shape that nobody measured: what was best on the average, then the defaults.
    assert [runs(found, call(m, 512)) for m in (1, 64, 65)] == [
        "bf16_m64.rows",
        "bf16_any.rows",
        "bf16_any.rows",
    ]
    assert runs(found, call(1, aligned=False)) == "bf16_any_unaligned"
    assert runs(found, call(1, dtype="f16")) == "f16_any.rows"


def test_a_choice_beyond_the_needs_falls_to_the_next() -> None:
    found = entries(
        measured(
            (1, {"bf16_m16": 5.0}),
        )
    )
    assert runs(found, call(16)) == "bf16_m16.shapes"
    assert runs(found, call(17)) == "bf16_m64"  # the last range has no end, the kernel's needs have


def test_samples_of_a_candidate_that_is_gone_choose_nothing() -> None:
    found = entries(measured((1, {"gone": 1.0, "bf16_m16": 5.0})))
    assert not [v for v in found if v.startswith("gone")]
    assert runs(found, call(1)) == "bf16_m16.shapes"


def test_candidates_that_nothing_chooses_are_not_shipped() -> None:
    extra = replace(gemm.CANDIDATES[0], variant="bf16_extra", constants={})
    known = measured((1, {"bf16_extra": 9.0, "bf16_m16": 5.0}))
    own = replace(OWN, rows=(*gemm.CANDIDATES, extra))
    shipped = tuned.shipped(own, MATMUL_BT, known)
    assert "bf16_extra" not in [kernel.row.variant for kernel in shipped]
    known = measured((1, {"bf16_extra": 4.0, "bf16_m16": 5.0}))
    shipped = tuned.shipped(own, MATMUL_BT, known)
    kernel = next(kernel for kernel in shipped if kernel.row is extra)
    assert [(e.variant, e.priority) for e in kernel.entries] == [
        ("bf16_extra.shapes", 3000), ("bf16_extra.rows", 2000), ("bf16_extra", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("target", [t.name for t in TARGETS.values() if t.kind == "cuda"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_extent_hits_a_shipped_variant(target: str, dtype: str) -> None:
    """With the repository's own database and every candidate."""
    own = own_candidates()["matmul_bt"]
    kernels = tuned.shipped(own, MATMUL_BT, tuned.database("matmul_bt", target))
    found = {entry.variant: entry for kernel in kernels for entry in kernel.entries}
    assert {kernel.row.variant for kernel in kernels} == {v for v in found if "." not in v}
    for m in range(1, 130):
        assert runs(found, call(m, dtype=dtype)).startswith(dtype)
        if dtype != "f16":
            assert "unaligned" in runs(found, call(m, aligned=False, dtype=dtype))


def test_where_a_kernel_is_used_leaves_its_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ops = CudaBackend(), {"matmul_bt": MATMUL_BT}
    plain = {j.variant: j for j in backend.plan(ops, ("kiln.recipes",), "sm_90a")}
    known = measured((1, {"bf16_m16": 9.0, "bf16_m64": 5.0}))
    monkeypatch.setattr(tuned, "database", lambda op, target: known)
    again = {j.variant: j for j in backend.plan(ops, ("kiln.recipes",), "sm_90a")}
    both = again.keys() & plain.keys()
    assert both >= set(gemm.DEFAULTS)
    assert [again[v].inputs_digest for v in both] == [plain[v].inputs_digest for v in both]
    assert again["bf16_m64"].selections != plain["bf16_m64"].selections
    assert again["bf16_m64"].selections[0]["tuned"] == "stale"  # of inputs that are not its own
    bundle = {j.variant: j for j in backend.candidate_jobs("matmul_bt", ("kiln.recipes",), "sm_90a")}
    assert all(bundle[v].inputs_digest == j.inputs_digest for v, j in plain.items())
    other = {j.variant: j for j in backend.candidate_jobs("matmul_bt", ("kiln.recipes",), "sm_100a")}
    assert other["bf16_any"].inputs_digest != bundle["bf16_any"].inputs_digest


def test_samples_of_other_inputs_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ops = CudaBackend(), {"matmul_bt": MATMUL_BT}
    assert backend.stale_samples(ops, ("kiln.recipes",), "sm_120a") == []
    now = {
        j.variant: j.inputs_digest for j in backend.candidate_jobs("matmul_bt", ("kiln.recipes",), "sm_90a")
    }
    fresh = measured((1, {"bf16_m16": 9.0}))
    fresh = replace(
        fresh, runs=tuple(replace(r, candidates={"bf16_m16": now["bf16_m16"]}) for r in fresh.runs)
    )
    monkeypatch.setattr(tuned, "database", lambda op, target: fresh)
    assert backend.stale_samples(ops, ("kiln.recipes",), "sm_90a") == []
    monkeypatch.setattr(tuned, "database", lambda op, target: measured((1, {"bf16_m16": 9.0, "gone": 1.0})))
    found = dict(backend.stale_samples(ops, ("kiln.recipes",), "sm_90a"))
    assert list(found) == ["matmul_bt.bf16_m16", "matmul_bt.gone"]
    assert f"aaaaaaaaaaaa, which are {now['bf16_m16'][:12]} now" in found["matmul_bt.bf16_m16"]
    assert "no candidate any more" in found["matmul_bt.gone"]


def test_a_database_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "matmul_bt.sm_80.json").write_bytes(
        json.dumps({"schema": 1, "op": "matmul_bt", "target": "sm_90a", "runs": []}).encode()
    )
    with pytest.raises(Exception, match="samples of matmul_bt on sm_90a"):
        tuned.database("matmul_bt", "sm_80", tmp_path)
    assert tuned.database("matmul_bt", "sm_86", tmp_path) == Database("matmul_bt", "sm_86")


def test_the_model_prefers_small_tiles_for_few_rows() -> None:
    for target in ("sm_80", "sm_90a", "sm_121a"):
        table = tuned.tables(OWN, MATMUL_BT, Database("matmul_bt", target))[GROUP]
        by_rows = {dict(s)["M"]: c.candidate for s, c in table.rows.items()}
        assert by_rows[1] == "bf16_m16"
        assert by_rows[4096] == "bf16_any"


def test_every_candidate_declares_only_needs() -> None:
    for op, own in own_candidates().items():
        assert op in SPACES, f"recipes/tuning.py has no calls for {op}"
        names = [row.variant for row in own.rows]
        overlapping: list[CudaPrimitive] = [r for r in own.rows if "." in r.variant]
        assert overlapping == [], "a dot separates a candidate's name from its entry's"
        assert set(own.defaults) <= set(names)


SELECT = """
import json
from kiln.tests.backends.cuda.test_tuned import MATMUL_BT, call, entries, measured, runs
known = measured((1, {"bf16_m16": 5.0, "bf16_m64": 5.05}), (64, {"bf16_m64": 8.0, "bf16_any": 8.1}))
found = entries(known)
print(json.dumps([runs(found, call(m, n)) for m in range(1, 130) for n in (4096, 512)]))
"""


def test_two_processes_select_the_same_variants() -> None:
    answers: list[Any] = []
    for seed in ("1", "2"):
        made = subprocess.run(
            [sys.executable, "-c", SELECT], capture_output=True, text=True, check=True, cwd=ROOT,
            env={"PYTHONPATH": ".typing", "PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        answers.append(json.loads(made.stdout))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_targets_that_nobody_measured_ship_general_defaults_alone() -> None:
    own = replace(OWN, general=frozenset({"bf16_m64", "bf16_any", "bf16_any_unaligned"}))
    names = {k.row.variant for k in tuned.shipped(own, MATMUL_BT, Database("matmul_bt", "sm_120a"))}
    assert names == own.general
    known = measured((1, {"bf16_m16": 5.0, "bf16_m64": 6.0}))
    names = {k.row.variant for k in tuned.shipped(own, MATMUL_BT, known)}
    assert {"bf16_m16", "bf16_m64"} <= names
