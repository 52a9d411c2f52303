"""The C matrix product: the bits of the sum in order, on every tier that runs here."""

from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.variants.gemm import COLS, PRIMITIVES, ROWS
from kiln.recipes.gemm import matmul_bt_in_order
from kiln.tests.backends.cpu.native import Native, runnable_tiers

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


@pytest.fixture(scope="module", params=runnable_tiers())
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Native]:
    folder = tmp_path_factory.mktemp("gemm")
    return {p.variant: Native(p, request.param, folder) for p in PRIMITIVES}


def _call(kernel: Native, x: Array, weight: Array, split: int = 1, out_type: Any = None) -> Array:
    """Run in `split` pieces into a column slice of a poisoned buffer."""
    m, n, size = x.shape[0], weight.shape[0], x.itemsize
    buffer = np.full((m + 1, n + 7), 99, x.dtype if out_type is None else out_type)
    out = buffer[:m, 3 : 3 + n]
    numbers = {"M": m, "N": n, "K": x.shape[1]}
    numbers |= {
        "x_stride": x.strides[0] // size,
        "weight_stride": weight.strides[0] // size,
        "out_stride": n + 7,
    }
    tiles = -(-m // ROWS) * -(-n // COLS)
    edges = np.linspace(0, tiles, split + 1).astype(int)
    for begin, end in pairwise(edges):
        kernel({"x": x, "weight": weight, "out": out}, numbers, int(begin), int(end))
    assert (buffer[m] == 99).all()
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, 3 + n :] == 99).all()
    return out.copy()


def _operands(m: int, n: int, k: int, dtype: Any) -> tuple[Array, Array]:
    rng = np.random.default_rng(m * 1000 + n * 10 + k)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 33, 31), (5, 32, 256), (65, 63, 257), (2, 130, 600)]
)
def test_gives_the_bits_of_the_sum_in_order(
    kernels: dict[str, Native], name: str, m: int, n: int, k: int
) -> None:
    x, weight = _operands(m, n, k, DTYPES[name])
    want = matmul_bt_in_order(x, weight)
    assert _call(kernels[name], x, weight).tobytes() == want.tobytes()
    assert _call(kernels[name], x, weight, split=3).tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_an_f32_output_is_the_sum_itself(kernels: dict[str, Native], name: str) -> None:
    x, weight = _operands(5, 33, 70, DTYPES[name])
    want = matmul_bt_in_order(x, weight, np.float32)
    assert _call(kernels[f"{name}_f32"], x, weight, out_type=np.float32).tobytes() == want.tobytes()
    assert want.astype(x.dtype).astype(np.float32).tobytes() != want.tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_literals(kernels: dict[str, Native], name: str) -> None:
    x = np.array([[1, 2]], DTYPES[name])
    weight = np.array([[1, 1], [2, -1], [4, 0.5]], DTYPES[name])
    assert _call(kernels[name], x, weight).tolist() == [[3, 0, 5]]


def test_products_are_rounded_before_they_are_added_in_order(kernels: dict[str, Native]) -> None:
    x = np.array([[1, 1e8, -1e8, 1]], np.float32)
    assert _call(kernels["f32"], x, np.ones((1, 4), np.float32)).tolist() == [[1.0]]
    x, weight = np.array([[-1, 1 + 2**-12]], np.float32), np.array([[1, 1 + 2**-12]], np.float32)
    assert _call(kernels["f32"], x, weight).tolist() == [[0.00048828125]]


def test_bf16_rounds_to_even(kernels: dict[str, Native]) -> None:
    x = np.array([[1, 2**-8], [1, 3 * 2**-8]], ml_dtypes.bfloat16)
    weight = np.ones((1, 2), ml_dtypes.bfloat16)
    assert _call(kernels["bf16"], x, weight).astype(np.float32).tolist() == [[1.0], [1.015625]]


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_every_16_bit_pattern_survives_a_product_with_one(kernels: dict[str, Native], name: str) -> None:
    x = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(DTYPES[name])[:, None]
    with np.errstate(invalid="ignore"):
        want = matmul_bt_in_order(x, np.ones((1, 1), x.dtype)).astype(np.float32)
    got = _call(kernels[name], x, np.ones((1, 1), x.dtype)).astype(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(np.nan_to_num(got), np.nan_to_num(want))


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_results_between_two_codes_round_to_nearest_even(kernels: dict[str, Native], name: str) -> None:
    """Large by tiny sums: normal, subnormal and overflowing results of the narrow type, next to ties."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((400, 2)) * 2.0 ** rng.integers(-14, 9, (400, 2))).astype(DTYPES[name])
    weight = (rng.standard_normal((40, 2)) * 2.0 ** rng.integers(-12, 9, (40, 2))).astype(DTYPES[name])
    with np.errstate(over="ignore"):
        want = matmul_bt_in_order(x, weight)
    assert _call(kernels[name], x, weight).tobytes() == want.tobytes()


def test_nothing_to_sum_gives_zeros(kernels: dict[str, Native]) -> None:
    x, weight = np.zeros((3, 0), np.float32), np.zeros((5, 0), np.float32)
    assert _call(kernels["f32"], x, weight).tobytes() == bytes(3 * 5 * 4)


def test_a_nan_stays_in_its_row(kernels: dict[str, Native]) -> None:
    x, weight = _operands(4, 20, 8, np.float32)
    clean = _call(kernels["f32"], x, weight)
    x[2, 3] = np.nan
    got = _call(kernels["f32"], x, weight)
    assert np.isnan(got[2]).all()
    assert np.array_equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_a_sum_of_negative_zeros_is_positive(kernels: dict[str, Native]) -> None:
    x = np.full((1, 2), -0.0, np.float32)
    assert not np.signbit(_call(kernels["f32"], x, np.ones((1, 2), np.float32))).any()
