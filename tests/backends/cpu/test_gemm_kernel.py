"""The C matrix products: the bits of the sum in order, in every layout of weight, on every tier that runs
here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kiln.backends.cpu.toolchain import shared_object
from kiln.backends.cpu.variants.gemm import COLS, LAYOUTS, ROWS
from kiln.recipes.gemm import matmul_bt_in_order
from kiln.recipes.gemm_packed import pack, unpack
from kiln.runtime.cpu import load_object
from kiln.runtime.errors import IntegrityError
from kiln.tests.backends.cpu.gemm_calls import DTYPES, RUNNABLE, TARGET, Product, operands, source

EXACT = tuple(t for t in RUNNABLE if t in TARGET.tiers)
MIXES = [(x, w, out) for x in DTYPES for w in DTYPES for out in DTYPES]
SHAPES = ((1, 1, 1), (1, 131, 257), (2, 17, 64), (3, 15, 7), (5, 48, 33), (17, 33, 130), (ROWS + 3, 16, 4))
"""Ragged in every way: one row, tails of registers, of panels, of steps of k and of tiles."""


@pytest.fixture(params=[(op, t) for op in LAYOUTS for t in EXACT], ids=lambda p: f"{p[0]}.{p[1].name}")
def product(request: pytest.FixtureRequest) -> Product:
    return Product(*request.param)


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_gives_the_bits_of_the_sum_in_order(product: Product, mix: tuple[str, str, str]) -> None:
    for m, n, k in SHAPES:
        x, weight = operands(m, n, k, *mix[:2])
        want = matmul_bt_in_order(x, weight, DTYPES[mix[2]])
        assert product(x, weight, mix[2]).tobytes() == want.tobytes(), (m, n, k)


@pytest.mark.parametrize(("m", "n"), [(1, 5 * COLS + 3), (2 * ROWS + 1, 2 * COLS)])
def test_threads_do_not_change_a_bit(product: Product, m: int, n: int) -> None:
    x, weight = operands(m, n, 140, "f32", "bf16")
    whole = product(x, weight, "f32")
    assert whole.tobytes() == matmul_bt_in_order(x, weight).tobytes()
    for threads in (2, 3, 4):
        assert product(x, weight, "f32", threads).tobytes() == whole.tobytes()


def test_products_are_rounded_before_they_are_added_in_order(product: Product) -> None:
    for rows in (1, 2, 9):
        x = np.array([[1, 1e8, -1e8, 1]] * rows, np.float32)
        assert (product(x, np.ones((1, 4), np.float32), "f32") == 1.0).all()
        x = np.array([[-1, 1 + 2**-12]] * rows, np.float32)
        assert (product(x, np.array([[1, 1 + 2**-12]], np.float32), "f32") == 0.00048828125).all()


@pytest.mark.parametrize("product", [("matmul_bt", t) for t in EXACT], indirect=True)
def test_bf16_whose_products_are_not_exact_are_added_as_rounded_products(product: Product) -> None:
    """Fused, 2**-149 + 2**-150 is a tie that rounds up, and 1.5 * 2**127 - 2**128 does not overflow."""
    for left, right, total in (
        ((2.0**-75, 2.0**-75), (2.0**-74, 2.0**-75), 2.0**-149),
        ((1.5 * 2.0**127, -(2.0**64)), (1, 2.0**64), -np.inf),
    ):
        x, weight = np.array([left] * 4, DTYPES["bf16"]), np.array([right], DTYPES["bf16"])
        assert product(x, weight, "f32").tolist() == [[total]] * 4
    edge = np.full((4, 2), 2.0**-67, DTYPES["bf16"])
    edge[:, 0] = 2.0**-67 * (1 + 2**-7)
    want = matmul_bt_in_order(edge, edge[:1], np.float32)
    assert want.all()
    assert product(edge, edge[:1], "f32").tobytes() == want.tobytes()


def test_bf16_rounds_to_even(product: Product) -> None:
    x = np.array([[1, 2**-8], [1, 3 * 2**-8]], DTYPES["bf16"])
    weight = np.ones((1, 2), DTYPES["bf16"])
    assert product(x, weight, "bf16").astype(np.float32).tolist() == [[1.0], [1.015625]]


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_every_16_bit_pattern_survives_a_product_with_one(product: Product, name: str) -> None:
    codes = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(DTYPES[name])
    one = np.ones((1, 1), DTYPES[name])
    for x, weight in ((codes[:, None], one), (one, codes[:, None])):
        got = product(x, weight, name).reshape(-1).astype(np.float32)
        want = codes.astype(np.float32)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert np.array_equal(np.nan_to_num(got), np.nan_to_num(want))


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_results_between_two_codes_round_to_nearest_even(product: Product, name: str) -> None:
    """Large by tiny sums: normal, subnormal and overflowing results of the narrow type, next to ties."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((400, 2)) * 2.0 ** rng.integers(-14, 9, (400, 2))).astype(DTYPES[name])
    weight = (rng.standard_normal((40, 2)) * 2.0 ** rng.integers(-12, 9, (40, 2))).astype(DTYPES[name])
    with np.errstate(over="ignore"):
        want = matmul_bt_in_order(x, weight)
    assert product(x, weight, name).tobytes() == want.tobytes()


def test_subnormals_are_numbers(product: Product) -> None:
    x = np.full((2, 1), 1e-40, np.float32)
    assert (
        product(x, np.ones((3, 1), np.float32), "f32").tobytes()
        == np.full((2, 3), 1e-40, np.float32).tobytes()
    )


@pytest.mark.parametrize("m", [1, 3])
def test_nothing_to_sum_gives_zeros(product: Product, m: int) -> None:
    x, weight = np.zeros((m, 0), np.float32), np.zeros((5, 0), np.float32)
    assert product(x, weight, "f32").tobytes() == bytes(m * 5 * 4)


def test_a_nan_stays_in_its_row(product: Product) -> None:
    x, weight = operands(4, 20, 8, "f32", "f32")
    clean = product(x, weight, "f32")
    x[2, 3] = np.nan
    got = product(x, weight, "f32")
    assert np.isnan(got[2]).all()
    assert np.array_equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_a_sum_of_negative_zeros_is_positive(product: Product) -> None:
    x = np.full((2, 2), -0.0, np.float32)
    for rows in (x[:1], x):
        assert not np.signbit(product(rows, np.ones((1, 2), np.float32), "f32")).any()


@pytest.mark.parametrize("op", LAYOUTS)
def test_an_object_that_fuses_what_it_should_not_is_refused_when_loaded(op: str) -> None:
    fused = source(op).replace("s[m][v] + a * w[v]", "__builtin_elementwise_fma(a, w[v], s[m][v])")
    tier = next((t for t in RUNNABLE if t.has_fma), None)
    if tier is None:
        pytest.skip("this CPU has no fused multiply-add")
    with pytest.raises(IntegrityError, match="its arithmetic is not what it was built for"):
        load_object(shared_object(fused, TARGET, tier, op), op)
    load_object(shared_object(source(op), TARGET, tier, op), op)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 5), (33, 7)])
def test_unpacking_gives_what_was_packed(name: str, n: int, k: int) -> None:
    weight: Any = operands(1, n, k, "f32", name)[1]
    packed = pack(weight)
    assert packed.shape == (-(-n // 16), k, 16)
    assert unpack(packed, n).tobytes() == weight.tobytes()
    assert not packed.transpose(0, 2, 1).reshape(-1, k)[n:].any()
