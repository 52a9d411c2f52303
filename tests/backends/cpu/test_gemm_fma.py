"""The fast mode's products by fused multiply-adds with blocks of their own: within their envelope, and the
same bits however a call is cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kiln.backends.cpu.compile import handwritten, source_text
from kiln.backends.cpu.toolchain import shared_object
from kiln.backends.cpu.variants.gemm import MIXES, Mix
from kiln.backends.cpu.variants.gemm_fma import COLS, DEPTH, LEAST_M, OP, PRIMITIVES, ROWS, TIERS
from kiln.runtime.cpu import load_object
from kiln.tests.backends.cpu.gemm_calls import (
    OPS,
    PROMISE,
    RUNNABLE,
    TARGET,
    Product,
    check_envelope,
    check_zeros_and_nan,
    flushing,
    operands,
)
from kiln.tools.oracle import compare

TIER = next((t for t in RUNNABLE if t.name in TIERS), None)
pytestmark = pytest.mark.skipif(TIER is None, reason=f"this CPU runs none of {', '.join(TIERS)}")
SHAPES = (
    (LEAST_M, 1, 1), (5, 35, 33), (7, 50, 1030), (8, 131, 257), (9, 48, 129), (13, COLS + 70, DEPTH + 2),
    (ROWS + 3, 33, 31),
)  # fmt: skip


@lru_cache(maxsize=1)
def entry_of() -> Any:
    """The entry."""
    assert TIER is not None
    made = shared_object(source_text(OPS[OP], [handwritten(PRIMITIVES[0])]), TARGET, TIER, OP)
    return load_object(made, f"{OP}.fma.so")[PRIMITIVES[0].entry]


@dataclass(frozen=True)
class Blocked(Product):
    """A product with blocks of its own."""

    def entry(self) -> Any:
        """See Product."""
        return entry_of()

    def tiles(self, m: int, n: int) -> int:
        """See Product."""
        return -(-m // ROWS) * -(-n // COLS)


@pytest.fixture
def product() -> Blocked:
    """The product."""
    assert TIER is not None
    return Blocked(OP, TIER, "fast")


@pytest.mark.parametrize("mix", MIXES, ids=lambda m: m.name)
def test_stays_in_its_envelope(product: Blocked, mix: Mix) -> None:
    for m, n, k in SHAPES:
        check_envelope(product, mix, m, n, k)


@pytest.mark.parametrize("mix", MIXES, ids=lambda m: m.name)
def test_nothing_to_sum_gives_zeros_and_a_nan_stays_in_its_row(product: Blocked, mix: Mix) -> None:
    for m in (6, 21):
        check_zeros_and_nan(product, mix, m, 200)


@pytest.mark.parametrize("m", [8, ROWS + 9])
def test_pieces_have_the_same_bits(product: Blocked, m: int) -> None:
    x, weight = operands(m, 3 * COLS - 5, 300, "f32", "f32")
    whole = product(x, weight, "f32")
    for split in (2, product.tiles(*whole.shape)):
        assert product(x, weight, "f32", split).tobytes() == whole.tobytes()


@pytest.mark.parametrize("m", [6, 20])
def test_subnormal_values_count_whatever_the_host_has_set(product: Blocked, m: int) -> None:
    x, weight = operands(m, 50, 64, "f32", "f32")
    x, weight = x * np.float32(1e-39), weight * np.float32(1e30)
    want = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    with flushing() as times:
        got = product(x, weight, "f32")
        assert times(2.0**-130) == 0.0
    assert compare(got, want, PROMISE).why is None
