"""What kernels of the delta rule take on every target: no spill and no stack, beside the sheets' figures."""

from __future__ import annotations

import pytest

from kiln.compiler.target import TARGETS
from kiln.recipes import catalog
from kiln.runtime.manifest import Kernel
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tools.sheet_figures import FIGURES, Figure, beside
from kiln.tools.trees import read_tree, shipped

CUDA = tuple(t.name for t in TARGETS.values() if t.kind == "cuda")
GATE = {"spill_loads": 0, "spill_stores": 0, "stack": 0}


def _kernels(target: str) -> list[Kernel]:
    manifest = read_tree(shipped(), [target]).manifests[target]
    return [k for k in manifest.kernels if k.op.startswith("gated_delta_rule_")]


@pytest.mark.parametrize("target", CUDA)
def test_none_spills_and_none_has_a_stack(target: str) -> None:
    kernels = _kernels(target)
    ops = {k.op for k in kernels}
    assert {"gated_delta_rule_packed_decode", "gated_delta_rule_replay_decode"} < ops
    assert len(ops) >= 4
    for k in kernels:
        assert {n: k.resources[n] for n in GATE} == GATE, k.variant
        assert 0 < k.resources["registers"] <= 255


def test_figures_are_of_ops_and_targets_that_there_are() -> None:
    assert set(FIGURES) <= {op.name for op in catalog().ops}
    assert {t for figures in FIGURES.values() for t in figures} <= set(CUDA)
    assert all(0 < f.registers <= 255 for by in FIGURES.values() for fs in by.values() for f in fs)


def test_some_figures_as_the_sheets_have_them() -> None:
    assert beside("gated_delta_rule_packed_decode", "sm_90a") == (Figure("upstream 32 w1", 212),)
    assert Figure("delta_h 64 w4s3", 255, 8) in beside("gated_delta_rule_chunk_state", "sm_80")
    assert Figure("chunk_o 128 w4s2", 255, 80) in beside("gated_delta_rule_chunk_output", "sm_121a")
    assert beside("gated_delta_rule_packed_decode", "sm_87") == ()
    assert beside("rms_norm", "sm_90a") == ()


def test_one_table_has_ours_and_theirs(kiln_json: RunJson) -> None:
    name = "gated_delta_rule_packed_decode"
    code, found = kiln_json("show", name, "--resources", "--tree", str(shipped()))
    assert code == 0
    rows = {r["target"]: r for r in found["kernels"] if r["target"] in CUDA}
    assert set(rows) == set(CUDA)
    for target, row in rows.items():
        assert row["registers"] > 0
        assert row["sass"] == row["code_bytes"] // 16
        assert ("sheet" in row) == (target != "sm_87")
    assert rows["sm_90a"]["sheet"] == [{"kernel": "upstream 32 w1", "registers": 212, "stack": 0}]


def test_the_table_names_each_stage(kiln: Run) -> None:
    code, out, _ = kiln("show", "gated_delta_rule_chunk_state", "--resources", "--tree", str(shipped()))
    assert code == 0
    assert out.splitlines()[0].split()[-1] == "sheet"
    assert "delta_h 64 w4s3 255/8, delta_h 32 w4s2 182/0" in out


def test_without_figures_there_is_no_column(kiln: Run) -> None:
    code, out, _ = kiln("show", "silu_mul", "--target", "sm_90a", "--resources", "--tree", str(shipped()))
    assert code == 0
    assert "sheet" not in out
