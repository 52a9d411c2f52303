"""Kernels of 8-bit products, compiled without a GPU: they fit into the registers, and use the tensor cores
that a target has for the type."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kiln.backends.cuda.compile import BUDGET, assemble, handwritten
from kiln.backends.cuda.variants.gemm_fp8 import CANDIDATES, DEFAULTS, GENERAL
from kiln.compiler.catalog import OWN, load
from kiln.compiler.target import TARGETS
from kiln.runtime.cubin import read_cubin
from kiln.tests.cubins import nvidia_tool

F8_MMA = r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3"
F16_MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16"
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3"
TCGEN05 = r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4"


@pytest.mark.parametrize(
    ("target", "op", "variant", "instruction"),
    [
        ("sm_80", "scaled_matmul_bt", "via_f16_bf16_any", F16_MMA),
        ("sm_80", "scaled_matmul_bt_block", "via_f16_bf16_any_unaligned", F16_MMA),
        ("sm_89", "scaled_matmul_bt", "bf16_any", F8_MMA),
        ("sm_89", "scaled_matmul_bt_block", "bf16_split4_m16_n128_w4_s5", F8_MMA),
        ("sm_90a", "scaled_matmul_bt_alpha", "f32_any", WGMMA),
        ("sm_90a", "scaled_matmul_bt_block", "bf16_split4_m32_n64_w4_s6", WGMMA),
        ("sm_90a", "scaled_matmul_bt_block", "bf16_ws_m128_n256_s4", WGMMA),
        ("sm_90a", "scaled_matmul_bt", "f16_ws_m64_n128_s8", WGMMA),
        ("sm_90a", "scaled_matmul_bt_alpha", "f32_ws_m128_n128_s6", WGMMA),
        ("sm_100a", "scaled_matmul_bt_block", "bf16_any", TCGEN05),
        ("sm_120a", "scaled_matmul_bt", "bf16_any_unaligned", F8_MMA),
        ("sm_120a", "scaled_matmul_bt_int8", "f32_any", r"mma\.sync\S*\.s32\.s8\.s8"),
    ],
)
def test_kernels_fit_and_use_the_tensor_cores(target: str, op: str, variant: str, instruction: str) -> None:
    declared = load((OWN,)).ops[op]
    capability = TARGETS[target].capability
    source = handwritten(declared, {"op": op, "variant": variant}, (OWN,), capability)
    made = assemble(source, TARGETS[target])
    kernel = read_cubin(made.cubin).kernels[made.name]
    assert (made.spill_stores, made.spill_loads, kernel.stack) == (0, 0, 0)
    assert kernel.registers <= BUDGET["registers"]
    assert made.shared <= TARGETS[target].max_shared
    assert re.search(instruction, made.asm["ptx"])


PRODUCT = re.compile(r"[HQ]GMMA\S+ (R\d+), \S+, (\w+)")
"""Where an instruction's sums go, and what they are added to."""


@pytest.mark.parametrize(
    ("op", "variant", "promoted"),
    [
        ("scaled_matmul_bt", "bf16_ws_m128_n256_s3", True),
        ("scaled_matmul_bt_block", "bf16_ws_m64_n128_s8_x2", True),
        ("matmul_bt", "bf16_ws_m128_n128_s6_g16", False),
    ],
)
def test_sums_of_codes_leave_the_tensor_cores_every_128(
    op: str, variant: str, promoted: bool, tmp_path: Path
) -> None:
    """Of the four instructions of 32 that a stage has, the first adds to nothing."""
    declared = load((OWN,)).ops[op]
    source = handwritten(declared, {"op": op, "variant": variant}, (OWN,), 90)
    made = assemble(source, TARGETS["sm_90a"])
    file = tmp_path / "k.cubin"
    file.write_bytes(made.cubin)
    listed = subprocess.run(
        [nvidia_tool("nvdisasm"), "-c", str(file)], capture_output=True, text=True, check=True
    )
    added = [to == "RZ" for _, to in PRODUCT.findall(listed.stdout)]
    assert len(added) >= 8
    assert added == [promoted, False, False, False] * (len(added) // 4)


def test_every_default_is_a_candidate() -> None:
    names = {row.variant for row in CANDIDATES}
    assert not set(DEFAULTS) - names
    assert len(set(DEFAULTS)) == len(DEFAULTS)


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_every_target_has_each_op_for_each_output(capability: int) -> None:
    """Of any number of rows; bf16 outputs whatever the alignment, others of multiples of 16 elements."""
    here = [r for r in CANDIDATES if r.min_sm <= capability <= r.max_sm and r.variant in GENERAL]
    for op in {r.op for r in CANDIDATES}:
        for out in ("bf16", "f16", "f32"):
            whens = [r.when for r in here if r.op == op and ["dtype", "out", out] in r.when]
            open_ended = [w for w in whens if not any(test[0] == "le" for test in w[1:])]
            assert open_ended, (op, out)
            assert (["and", ["dtype", "out", out]] in whens) == (out == "bf16"), (op, out)
