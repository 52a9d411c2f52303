"""The fast mode of the C matrix products: any order, within its envelope, on the tiers that have it."""

from __future__ import annotations

import pytest

from kiln.backends.cpu.variants.gemm import LAYOUTS, MIXES, ROWS, Mix, fast_tiers
from kiln.compiler.target import IsaTier
from kiln.recipes.gemm import matmul_bt_in_order
from kiln.tests.backends.cpu.gemm_calls import (
    RUNNABLE,
    Product,
    check_envelope,
    check_zeros_and_nan,
    operands,
)

SHAPES = ((1, 1, 1), (1, 131, 257), (2, 17, 64), (5, 35, 33), (4, 16, 5000), (9, 48, 129), (ROWS + 3, 33, 31))
FAST = [
    (op, tier, mix)
    for op in LAYOUTS
    for mix in MIXES
    for tier in RUNNABLE
    if tier.name in fast_tiers(op, mix)
]


@pytest.mark.parametrize(("op", "tier", "mix"), FAST, ids=lambda p: getattr(p, "name", p))
def test_stays_in_its_envelope(op: str, tier: IsaTier, mix: Mix) -> None:
    product = Product(op, tier, "fast")
    for m, n, k in SHAPES:
        check_envelope(product, mix, m, n, k)


@pytest.mark.parametrize(("op", "tier", "mix"), FAST, ids=lambda p: getattr(p, "name", p))
def test_nothing_to_sum_gives_zeros_and_a_nan_stays_in_its_row(op: str, tier: IsaTier, mix: Mix) -> None:
    product = Product(op, tier, "fast")
    for m in (3, 11):
        check_zeros_and_nan(product, mix, m, 20)


@pytest.mark.parametrize(
    ("op", "tier"), dict.fromkeys((op, tier) for op, tier, mix in FAST if mix.x.name == "f32"), ids=str
)
def test_is_another_sum_than_the_exact_one(op: str, tier: IsaTier) -> None:
    x, weight = operands(20, 48, 300, "f32", "f32")
    exact = matmul_bt_in_order(x, weight)
    assert (Product(op, tier, "fast")(x, weight, "f32") != exact).any()
