"""Which kernels prove a row of the matrix that has no ops of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiln.tests.tools.synthetic import kernel, manifest, write_tree
from kiln.tools.states import State, rows
from kiln.tools.trees import read_tree

TARGETS = ("sm_90a", "cpu-x86_64")
FP8, SCRATCH = "FIX-FP8-PLAN-CAPTURE", "KERNEL-GDN-SCRATCH"
CPU, WIDE = "KERNEL-GEMM-CPU-ELEM", "KERNEL-GEMM-CPU-ELEM-X86WIDE"
SSE2: dict[str, Any] = {"tier": "x86-64", "features": []}
AVX2: dict[str, Any] = {"tier": "x86-64-v3", "features": []}
CHUNK = "gated_delta_rule_chunk_state"


@pytest.mark.parametrize(
    ("family", "op", "target", "isa", "proves"),
    [
        (FP8, "scaled_matmul_bt_block", "sm_90a", None, True),
        (FP8, "scaled_matmul_bt", "cpu-x86_64", SSE2, False),
        (FP8, "matmul_bt", "sm_90a", None, False),
        (SCRATCH, CHUNK, "sm_90a", None, True),
        (SCRATCH, CHUNK, "cpu-x86_64", SSE2, False),
        (SCRATCH, "matmul_bt", "sm_90a", None, False),
        (CPU, "matmul", "cpu-x86_64", SSE2, True),
        (CPU, "matmul", "sm_90a", None, False),
        (CPU, "rms_norm", "cpu-x86_64", SSE2, False),
        (WIDE, "matmul_bt", "cpu-x86_64", AVX2, True),
        (WIDE, "matmul_bt", "cpu-x86_64", SSE2, False),
        (WIDE, "rms_norm", "cpu-x86_64", AVX2, False),
    ],
)
def test_what_proves_a_row(
    tmp_path: Path, family: str, op: str, target: str, isa: dict[str, Any] | None, proves: bool
) -> None:
    file = f"{op}.so" if isa else f"{op}.generic.cubin"
    tree = write_tree(tmp_path / "t", manifest(target, [kernel(op, file=file, isa=isa)]))
    row = next(r for r in rows({}, read_tree(tree), TARGETS) if r.family == family)
    other = next(t for t in TARGETS if t != target)
    expected = State.COMPILED if proves else State.DECLARED
    assert (row.targets[target], row.targets[other]) == (expected, State.DECLARED)
