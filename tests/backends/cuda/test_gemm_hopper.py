"""Hopper's matrix product: what the assembler makes of it. Nothing but the device runs it."""

from typing import Any

import pytest

from kiln.backends.cuda import compile as worker
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.variants import gemm_hopper as table
from kiln.compiler.backend import Job
from kiln.compiler.target import TARGETS
from kiln.recipes.gemm import MATMUL_BT
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_launch

TARGET = "sm_90a"


def compiled(row: CudaPrimitive) -> tuple[dict[str, Any], worker.Compiled]:
    """The manifest entry and what the assembler said."""
    module, _, function = row.kernel.partition(":")
    entry = {
        "tier": "primitive", "mode": row.mode, "grid": list(row.grid), "when": row.when,
        "priority": row.priority, "scratch": [s.json() for s in row.scratch], "budget": worker.BUDGET,
    }  # fmt: skip
    source = worker.Source(
        module,
        function,
        "",
        tuple(row.json_params()),
        dict(row.constants),
        row.compile_options(),
        entry=entry,
    )
    made = worker.assemble(source, TARGETS[TARGET])
    job = Job(TARGET, row.op, row.variant, "0" * 64, "", {})
    return worker.manifest_entry(job, MATMUL_BT, source, made, "x.cubin"), made


SAMPLE = ("bf16_ws_m128_n256_s4_g16", "bf16_ws_m64_n128_s8_g16_split", "bf16_f32_ws_m128_n128_s6_g16")


@pytest.mark.parametrize("variant", SAMPLE)
def test_compiles_without_spills_and_launches(variant: str) -> None:
    (row,) = (r for r in table.CANDIDATES if r.variant == variant)
    entry, made = compiled(row)
    used = entry["resources"]
    assert (used["spill_stores"], used["spill_loads"], used["stack"]) == (0, 0, 0)
    assert made.shared <= table.SHARED
    assert entry["block"] == [384, 1, 1]
    assert entry["cluster"] == [1, 1, 1]
    assert prove_launch(parse_kernel(entry), TARGET, made.cubin) == []
    ptx: str = made.asm["ptx"]
    assert "wgmma.mma_async" in ptx


def test_blocks_that_spill_are_no_candidates() -> None:
    names = {r.variant for r in table.CANDIDATES}
    assert "bf16_ws_m128_n256_s4_g16_split" in names
    assert "bf16_f32_ws_m128_n256_s4_g16_split" not in names
