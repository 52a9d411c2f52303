"""Matrix products: hand-worked numbers, properties and refusals, on the oracle and on this CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.ir.spec import Op
from kiln.recipes.gemm import MATMUL, MATMUL_BT, matmul_bt_in_order
from kiln.runtime.errors import ContractError
from kiln.runtime.load import Library, load
from kiln.runtime.merged import merged
from kiln.runtime.targets import cpu_target
from kiln.tests.recipes.literals import literal
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]
Product: TypeAlias = Callable[..., Array]
"""x [M, K] and weight [N, K] to out [M, N], of x's type or the given one."""

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float16, BF16]


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Both orientations for the best ISA tier of this machine."""
    out: Path = tmp_path_factory.mktemp("products") / "tree"
    build_from(out, [cpu_target()], ["matmul_bt", "matmul"], [CpuBackend()])
    with load(out, "cpu") as library:
        yield library


def _oracle(x: Array, weight: Array, out: Any = None, op: Op = MATMUL_BT) -> Array:
    assert op.reference is not None
    (exact,) = op.reference(x=x, weight=weight)
    rounded: Array = exact.astype(x.dtype if out is None else out)
    return rounded


def _oracle_by_columns(x: Array, weight: Array, out: Any = None) -> Array:
    return _oracle(x, weight.T, out, MATMUL)


@pytest.fixture(params=["oracle", "oracle_by_columns", "in_order", "cpu", "cpu_by_columns"])
def product(request: pytest.FixtureRequest) -> Product:
    """Each way to multiply in turn."""
    ways: dict[str, Product] = {
        "oracle": _oracle,
        "oracle_by_columns": _oracle_by_columns,
        "in_order": matmul_bt_in_order,
    }
    if request.param in ways:
        return ways[request.param]
    library: Library = request.getfixturevalue("products")

    def run(x: Array, weight: Array, out: Any = None) -> Array:
        """Into poisoned memory."""
        kind = x.dtype if out is None else out
        made = np.full((len(x), len(weight)), 99, kind)
        if request.param == "cpu":
            return np.asarray(library.op("matmul_bt")(x, weight, out=made))
        return np.asarray(library.op("matmul")(x, weight.T.copy(), out=made))

    return run


@literal("gemm/1.out")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_times_three(product: Product, dtype: Any) -> None:
    x, weight = np.array([[1, 2]], dtype), np.array([[1, 1], [2, -1], [4, 0.5]], dtype)
    assert product(x, weight).tolist() == [[3, 0, 5]]
    assert product(x, weight, np.float32).tolist() == [[3, 0, 5]]


@pytest.mark.parametrize(
    ("last", "want"),
    [
        pytest.param(2**-8, 1.0, marks=literal("gemm/2.tie")),
        pytest.param(3 * 2**-8, 1.015625, marks=literal("gemm/2.above")),
    ],
)
def test_one_rounding_to_the_type_that_is_asked_for(product: Product, last: float, want: float) -> None:
    x, ones = np.array([[1, last]], BF16), np.ones((1, 2), BF16)
    assert product(x, ones).astype(np.float32).tolist() == [[want]]
    assert product(x, ones, np.float32).tolist() == [[1 + last]]


@literal("gemm/3.separate")
def test_merged_weights_are_separate_ones_side_by_side(product: Product) -> None:
    x, weight = np.array([[1, 2]], BF16), np.array([[1, 1], [2, -1], [4, 0.5]], BF16)
    merged = product(x, weight)
    assert [product(x, weight[n : n + 1])[0, 0] for n in range(3)] == merged[0].tolist()


@literal("gemm/3.guards")
def test_columns_of_a_wider_buffer_are_written_and_no_others(products: Library) -> None:
    x, weight = np.array([[1, 2], [2, 4]], BF16), np.array([[1, 1], [2, -1], [4, 0.5]], BF16)
    buffer = np.full((2, 3 + 7), 99, BF16)
    products.op("matmul_bt")(x, weight, out=buffer[:, 4:7])
    rows = [[99] * 4 + row + [99] * 3 for row in ([3, 0, 5], [6, 0, 10])]
    assert buffer.astype(np.float32).tolist() == rows


@literal("gemm/4.no_k")
def test_nothing_to_sum_gives_zeros(product: Product) -> None:
    assert product(np.zeros((2, 0), BF16), np.zeros((3, 0), BF16)).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("m", "n"), [pytest.param(0, 3, marks=literal("gemm/4.no_m")), (2, 0), (0, 0)])
def test_no_rows_and_no_columns_write_nothing(product: Product, m: int, n: int) -> None:
    assert product(np.ones((m, 4), BF16), np.ones((n, 4), BF16)).shape == (m, n)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        pytest.param(np.nan, [np.nan, np.nan], marks=literal("gemm/5.nan")),
        pytest.param(np.inf, [np.inf, -np.inf], marks=literal("gemm/5.infinity")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(
    product: Product, dtype: Any, value: float, want: list[float]
) -> None:
    x, weight = np.ones((3, 2), dtype), np.array([[1, 1], [-1, 1]], dtype)
    x[1, 0] = value
    got = product(x, weight).astype(np.float32)
    assert np.array_equal(got, np.array([[2, 0], want, [2, 0]]), equal_nan=True)


SIZES = list(itertools.product((1, 3, 17, 129), (1, 8, 63, 130), (1, 31, 64, 496)))


def _operands(m: int, n: int, k: int, dtype: Any = BF16) -> tuple[Array, Array]:
    rng = np.random.default_rng([m, n, k])
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)


def test_bits_are_those_of_the_sum_in_order(products: Library) -> None:
    for m, n, k in SIZES:
        x, weight = _operands(m, n, k)
        for out in (BF16, np.float32):
            got = products.op("matmul_bt")(x, weight, out=np.full((m, n), 99, out))
            assert got.tobytes() == matmul_bt_in_order(x, weight, out).tobytes()
            by_columns = products.op("matmul")(x, weight.T.copy(), out=np.full((m, n), 99, out))
            assert by_columns.tobytes() == got.tobytes()


def test_properties_of_every_size(products: Library) -> None:
    """Equal rows stay equal, permuted weights permute, merged weights are separate ones."""
    for m, n, k in SIZES:
        x, weight = _operands(m, n, k)
        x[:] = x[0]
        got = np.asarray(products.op("matmul_bt")(x, weight))
        order = np.random.default_rng(0).permutation(n)
        assert (got.view(np.uint16) == got[0].view(np.uint16)).all()
        assert np.asarray(products.op("matmul_bt")(x, weight[order])).tobytes() == got[:, order].tobytes()
        cut = n // 3
        for part in (slice(0, cut), slice(cut, n)):
            assert np.asarray(products.op("matmul_bt")(x, weight[part])).tobytes() == got[:, part].tobytes()


def test_operands_and_results_may_be_columns_of_wider_buffers(products: Library) -> None:
    x, weight = _operands(5, 24, 40)
    wide_x, wide_w = np.full((5, 47), 7, BF16), np.full((24, 53), 7, BF16)
    wide_x[:, 3:43], wide_w[:, 9:49] = x, weight
    buffer = np.full((5, 31), 99, BF16)
    products.op("matmul_bt")(wide_x[:, 3:43], wide_w[:, 9:49], out=buffer[:, 5:29])
    assert buffer[:, 5:29].tobytes() == matmul_bt_in_order(x, weight).tobytes()
    assert (buffer[:, :5] == 99).all()
    assert (buffer[:, 29:] == 99).all()


def test_the_oracle_sums_in_float64_and_the_fold_in_float32() -> None:
    x, ones = np.array([[1, 1e8, -1e8, 1]], np.float32), np.ones((1, 4), np.float32)
    assert _oracle(x, ones).tolist() == [[2.0]]
    assert matmul_bt_in_order(x, ones).tolist() == [[1.0]]


def test_the_contract_is_an_envelope() -> None:
    for op in (MATMUL_BT, MATMUL):
        assert op.contract.kind == "envelope"
        assert 0 < op.contract.rel_l2 <= 2**-8


X = np.ones((4, 8), BF16)
WEIGHT = np.ones((6, 8), BF16)
SQUARE = np.ones((8, 8), BF16)


def test_views_of_a_merged_projection(products: Library) -> None:
    """q, k and v of one product: bits of three, in one buffer."""
    x, weight = _operands(3, 40, 24)
    out = np.asarray(products.op("matmul_bt")(x, weight))
    begin = 0
    for view, n in zip(merged(out, (24, 8, 8)), (24, 8, 8), strict=True):
        assert view.base is not None
        assert view.strides == out.strides
        assert view.tobytes() == matmul_bt_in_order(x, weight[begin : begin + n]).tobytes()
        begin += n


@pytest.mark.parametrize(
    ("shards", "told"),
    [
        ((24, 8), "merged: shards [24, 8] sum to 32, expected N=40"),
        ((48, -8), "merged: shards [48, -8] sum to 40, expected N=40"),
        ((), "merged: shards [] sum to 0, expected N=40"),
    ],
)
def test_shards_that_are_not_the_columns(shards: tuple[int, ...], told: str) -> None:
    with pytest.raises(ContractError) as caught:
        merged(np.ones((3, 40), BF16), shards)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda f: f(X, np.ones((6, 9), BF16)), "matmul_bt: weight has K=9 but x gave K=8"),
        (lambda f: f(X[:, ::2], np.ones((6, 4), BF16)), "elements of a row of x are 2 apart, expected 1"),
        (lambda f: f(X, WEIGHT, out=np.ones((4, 12), BF16)[:, ::2]), "elements of a row of out are 2 apart"),
        (lambda f: f(X, WEIGHT, out=np.ones((4, 7), BF16)), "out has N=7 but weight gave N=6"),
        (lambda f: f(X.astype(np.float64), WEIGHT), "x is f64, expected one of bf16, f16, f32"),
        (lambda f: f(X.astype(np.int32), WEIGHT), "x is i32, expected one of bf16, f16, f32"),
        (lambda f: f(SQUARE, SQUARE.copy(), out=SQUARE), "out, which is written, overlaps that of x"),
        (lambda f: f(X.repeat(2, 0), SQUARE, out=SQUARE), "out, which is written, overlaps that of weight"),
    ],
)
def test_refusals(products: Library, call: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(ContractError) as caught:
        call(products.op("matmul_bt"))
    assert told in str(caught.value)
