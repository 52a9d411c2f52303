"""The two launches of the chunked gated delta rule on Hopper, compiled without a GPU: what their speed rests
on."""

import re

import pytest

from kiln.backends.cuda.compile import Compiled, assemble, handwritten
from kiln.backends.cuda.variants.gdn_chunk import PLANS, PRIMITIVES
from kiln.compiler.catalog import OWN, load
from kiln.compiler.target import TARGETS
from kiln.ir.spec import Op
from kiln.recipes.gdn_chunk_walk import SOLVE, WALK
from kiln.runtime.cubin import read_cubin

SM_SHARED = 233472
"""Bytes of shared memory of a Hopper multiprocessor; every program takes 1024 more than it asks for."""
PRODUCT = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16 \{[^}]*\},\s*\{"
"""Of which the left operand is in registers, not in shared memory."""


def _made(op: str, variant: str) -> Compiled:
    payload = {"op": op, "variant": variant}
    return assemble(handwritten(load((OWN,)).ops[op], payload, (OWN,), 90), TARGETS["sm_90a"])


@pytest.mark.parametrize(
    ("op", "variant", "programs"), [(SOLVE, "bf16", 8), (WALK, "bf16_bf16", 2), (WALK, "bf16_f32", 2)]
)
def test_as_many_programs_fit_as_are_meant_to(op: Op, variant: str, programs: int) -> None:
    made = _made(op.name, variant)
    kernel = read_cubin(made.cubin).kernels[made.name]
    assert (made.spill_stores, made.spill_loads, kernel.stack) == (0, 0, 0)
    assert programs * (made.shared + 1024) <= SM_SHARED
    assert programs * 32 * made.warps * kernel.registers <= 65536


def test_a_step_of_the_walk_multiplies_from_registers() -> None:
    ptx = _made(WALK.name, "bf16_bf16").asm["ptx"]
    # 8 products of the state with keys and queries, 4 with the chunk's matrices, 4 of the state's update.
    assert re.findall(PRODUCT, ptx) == ["128"] * 16
    assert ptx.count("wgmma.mma_async") == 16


@pytest.mark.parametrize("target", [t.name for t in TARGETS.values() if t.kind == "cuda"])
def test_every_target_has_the_kernels_of_one_plan(target: str) -> None:
    capability = TARGETS[target].capability
    here = {p.op for p in PRIMITIVES if p.min_sm <= capability <= p.max_sm}
    whole = [p.variant for p in PLANS if {s.op for s in p.steps} <= here]
    kind = "walk" if target == "sm_90a" else "chunks"
    assert whole == [f"bf16_{o}_{kind}" for o in ("bf16", "f32")]
