"""The Triton matrix product in Triton's interpreter, on small blocks: weight by rows and by columns."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gemm import MATMUL, MATMUL_BT
from kiln.tests.backends.cuda.interpreter import View, interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNEL = "kiln.backends.cuda.kernels.gemm:matmul"
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP": 2}
OPS = {True: MATMUL_BT, False: MATMUL}
ORIENTATIONS = pytest.mark.parametrize("bt", [True, False])


def _matmul(x: Array, weight: Array, bt: bool = True, out: Any = None, **blocks: int) -> Array:
    """Run into a column slice of a poisoned buffer; weight is [N, K] if `bt`, else [K, N]."""
    sizes = BLOCKS | blocks
    (m, k), n = x.shape, weight.shape[0 if bt else 1]
    buffer = np.full((m + 1, n + 7), 99, x.dtype if out is None else out)
    programs = -(-m // sizes["BLOCK_M"]) * -(-n // sizes["BLOCK_N"])
    numbers = (m, n, k, k, weight.shape[1], n + 7)
    constants = {"extra": None, "BT": bt, "EPILOGUE": None}
    *_, buffer = interpret(KERNEL, (programs,), x, weight, View(buffer, 3), *numbers, **constants, **sizes)
    assert (buffer[m] == 99).all()
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, 3 + n :] == 99).all()
    return buffer[:m, 3 : 3 + n].copy()


def _operands(m: int, n: int, k: int, dtype: Any, bt: bool = True) -> tuple[Array, Array]:
    rng = np.random.default_rng(m + n + k)
    x, weight = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)
    return x, weight if bt else weight.T.copy()


def _error(got: Array, want: Array) -> float:
    """Relative L2 distance."""
    exact = want.astype(np.float64)
    return float(np.linalg.norm(got.astype(np.float64) - exact) / max(float(np.linalg.norm(exact)), 1e-30))


def _reference(x: Array, weight: Array, bt: bool = True) -> Array:
    reference = OPS[bt].reference
    assert reference is not None
    (want,) = reference(x=x, weight=weight)
    found: Array = want
    return found


@ORIENTATIONS
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 16, 16), (17, 33, 31), (40, 50, 70)])
def test_meets_the_contract(dtype: Any, m: int, n: int, k: int, bt: bool) -> None:
    x, weight = _operands(m, n, k, dtype, bt)
    bound = 1e-6 if dtype is np.float32 else MATMUL_BT.contract.rel_l2
    assert _error(_matmul(x, weight, bt), _reference(x, weight, bt)) <= bound


@ORIENTATIONS
def test_an_f32_output_is_not_rounded_to_the_type_of_x(bt: bool) -> None:
    x, weight = _operands(17, 33, 31, ml_dtypes.bfloat16, bt)
    got = _matmul(x, weight, bt, np.float32)
    assert _error(got, _reference(x, weight, bt)) <= 1e-6
    assert np.array_equal(got.astype(x.dtype), _matmul(x, weight, bt))


def test_both_orientations_give_the_same_bits() -> None:
    x, weight = _operands(17, 33, 31, ml_dtypes.bfloat16)
    assert _matmul(x, weight).tobytes() == _matmul(x, weight.T.copy(), bt=False).tobytes()


def test_a_swapped_operand_does_not_meet_it() -> None:
    x, weight = _operands(16, 16, 16, np.float32)
    assert _error(_matmul(x, weight), _reference(weight, x)) > MATMUL_BT.contract.rel_l2
    assert _error(_matmul(x, weight), _reference(x, weight, bt=False)) > MATMUL_BT.contract.rel_l2


@ORIENTATIONS
def test_nothing_to_sum_gives_zeros(bt: bool) -> None:
    pad, buffer = np.zeros(1, np.float32), np.full((3, 5), 99, np.float32)
    constants = BLOCKS | {"extra": None, "BT": bt, "EPILOGUE": None}
    *_, out = interpret(KERNEL, (1,), pad, pad, buffer, 3, 5, 0, 1, 1, 5, **constants)
    assert out.tolist() == [[0.0] * 5] * 3


@ORIENTATIONS
def test_a_nan_stays_in_its_row(bt: bool) -> None:
    x, weight = _operands(20, 9, 8, np.float32, bt)
    clean = _matmul(x, weight, bt)
    x[17, 3] = np.nan
    got = _matmul(x, weight, bt)
    assert np.isnan(got[17]).all()
    rest = [i for i in range(20) if i != 17]
    assert np.array_equal(got[rest], clean[rest])


@ORIENTATIONS
def test_equal_rows_give_equal_rows(bt: bool) -> None:
    x, weight = _operands(40, 33, 70, ml_dtypes.bfloat16, bt)
    x[:] = x[0]
    got = _matmul(x, weight, bt)
    assert len({row.tobytes() for row in got}) == 1


def test_permuting_weights_permutes_bits() -> None:
    x, weight = _operands(17, 50, 70, ml_dtypes.bfloat16)
    order = np.random.default_rng(0).permutation(50)
    assert _matmul(x, weight[order]).tobytes() == _matmul(x, weight)[:, order].tobytes()


def test_merged_weights_give_the_same_bits_as_separate_ones() -> None:
    x, weight = _operands(5, 40, 48, np.float32)
    merged = _matmul(x, weight)
    for begin, end in ((0, 13), (13, 40)):
        assert np.array_equal(merged[:, begin:end], _matmul(x, weight[begin:end].copy()))


def test_every_block_is_computed_once_whatever_the_group() -> None:
    x, weight = _operands(70, 50, 16, np.float32)
    assert np.array_equal(_matmul(x, weight, GROUP=1), _matmul(x, weight, GROUP=3))


@pytest.mark.parametrize("heads", [False, True])
def test_a_batch_gives_the_bits_of_one_product_after_another(heads: bool) -> None:
    b, m, n, k = 3, 17, 20, 33
    pairs = [_operands(m + i, n, k, ml_dtypes.bfloat16) for i in range(b)]
    x, weight = np.stack([p[0][:m] for p in pairs]), np.stack([p[1] for p in pairs])
    want = np.stack([_matmul(*pair) for pair in zip(x, weight, strict=True)])
    if heads:
        x, want = np.ascontiguousarray(x.transpose(1, 0, 2)), want.transpose(1, 0, 2)
    row, product = (b, 1) if heads else (1, m)
    strides = (row * k, k, row * n, product * k, n * k, product * n)
    buffer = np.full(want.shape, 99, x.dtype)
    kernel = "kiln.backends.cuda.kernels.gemm:matmul_batched"
    *_, got = interpret(kernel, (2 * 2, b), x, weight, buffer, m, n, k, *strides, **BLOCKS)
    assert got.tobytes() == want.tobytes()
