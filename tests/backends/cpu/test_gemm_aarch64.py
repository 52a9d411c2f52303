"""The C matrix products for aarch64, run under qemu-user: the bits of the sum in order there too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kiln.backends.cpu.variants.gemm import LAYOUTS
from kiln.recipes.gemm import matmul_bt_in_order
from kiln.recipes.gemm_packed import pack
from kiln.tests.backends.cpu.aarch64 import MISSING, QEMU, call
from kiln.tests.backends.cpu.gemm_calls import CODES, DTYPES, operands, source

pytestmark = pytest.mark.skipif(QEMU is None, reason=MISSING)
MIXES = (("f32", "f32", "f32"), ("f32", "bf16", "f32"), ("bf16", "bf16", "bf16"), ("f16", "f16", "f16"))


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
@pytest.mark.parametrize("op", LAYOUTS)
def test_gives_the_bits_of_the_sum_in_order(tmp_path: Path, op: str, mix: tuple[str, str, str]) -> None:
    for m, n, k in ((1, 37, 70), (7, 50, 141)):
        x, weight = operands(m, n, k, mix[0], mix[1])
        laid = {"bt": weight, "nn": np.ascontiguousarray(weight.T), "packed": pack(weight)}[LAYOUTS[op]]
        out = np.zeros((m, n), DTYPES[mix[2]])
        ints = [m, n, k, k, laid.shape[1], n, *(CODES[name] for name in mix), 0]
        found = call(tmp_path, source(op), f"kiln_{op}", [x, laid, out], ints, [], 1)
        assert found.status == 0
        assert found.memory[2] == matmul_bt_in_order(x, weight, DTYPES[mix[2]]).tobytes()


def test_products_are_rounded_before_they_are_added(tmp_path: Path) -> None:
    x, weight = np.array([[-1, 1 + 2**-12]] * 2, np.float32), np.array([[1, 1 + 2**-12]], np.float32)
    out = np.zeros((2, 1), np.float32)
    found = call(
        tmp_path,
        source("matmul_bt"),
        "kiln_matmul_bt",
        [x, weight, out],
        [2, 1, 2, 2, 2, 1, 0, 0, 0, 0],
        [],
        1,
    )
    assert np.frombuffer(found.memory[2], np.float32).tolist() == [0.00048828125] * 2
