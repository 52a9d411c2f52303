"""The fast mode of the C matrix products: any order, within its envelope, on the tiers that have it."""

from __future__ import annotations

import numpy as np
import pytest

from kiln.backends.cpu.variants.gemm import LAYOUTS, MIXES, ROWS, Mix, fast_tiers
from kiln.compiler.target import IsaTier
from kiln.recipes.gemm import ENVELOPE, matmul_bt_in_order
from kiln.runtime.entities import Contract
from kiln.tests.backends.cpu.gemm_calls import DTYPES, RUNNABLE, Product, operands
from kiln.tools.oracle import compare

SHAPES = ((1, 1, 1), (1, 131, 257), (2, 17, 64), (5, 35, 33), (4, 16, 5000), (9, 48, 129), (ROWS + 3, 33, 31))
PROMISE = Contract(ENVELOPE.kind, ENVELOPE.rel_l2, ENVELOPE.max_eps)
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
        x, weight = operands(m, n, k, mix.x.name, mix.weight.name)
        want = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(DTYPES[mix.out.name])
        assert compare(product(x, weight, mix.out.name), want, PROMISE).why is None, (m, n, k)


@pytest.mark.parametrize(("op", "tier", "mix"), FAST, ids=lambda p: getattr(p, "name", p))
def test_nothing_to_sum_gives_zeros_and_a_nan_stays_in_its_row(op: str, tier: IsaTier, mix: Mix) -> None:
    product = Product(op, tier, "fast")
    for m in (3, 11):
        x, weight = operands(m, 20, 40, mix.x.name, mix.weight.name)
        assert not product(x[:, :0], weight[:, :0], mix.out.name).view(np.uint8).any()
        clean = product(x, weight, mix.out.name)
        x[2, 3] = np.nan
        got = product(x, weight, mix.out.name)
        assert np.isnan(got[2].astype(np.float32)).all()
        assert np.delete(got, 2, 0).tobytes() == np.delete(clean, 2, 0).tobytes()


@pytest.mark.parametrize(
    ("op", "tier"), dict.fromkeys((op, tier) for op, tier, mix in FAST if mix.x.name == "f32"), ids=str
)
def test_is_another_sum_than_the_exact_one(op: str, tier: IsaTier) -> None:
    x, weight = operands(20, 48, 300, "f32", "f32")
    exact = matmul_bt_in_order(x, weight)
    assert (Product(op, tier, "fast")(x, weight, "f32") != exact).any()
