"""The Triton matrix product in Triton's interpreter, on small blocks."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gemm import MATMUL_BT
from kiln.tests.backends.cuda.interpreter import View, interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNEL = "kiln.backends.cuda.kernels.gemm:matmul_bt"
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP": 2}


def _matmul_bt(x: Array, weight: Array, **blocks: int) -> Array:
    """Run into a column slice of a poisoned buffer."""
    sizes = BLOCKS | blocks
    (m, k), n = x.shape, weight.shape[0]
    buffer = np.full((m + 1, n + 7), 99, x.dtype)
    programs = -(-m // sizes["BLOCK_M"]) * -(-n // sizes["BLOCK_N"])
    numbers = (m, n, k, k, k, n + 7)
    *_, buffer = interpret(KERNEL, (programs,), x, weight, View(buffer, 3), *numbers, **sizes)
    assert (buffer[m] == 99).all()
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, 3 + n :] == 99).all()
    return buffer[:m, 3 : 3 + n].copy()


def _operands(m: int, n: int, k: int, dtype: Any) -> tuple[Array, Array]:
    rng = np.random.default_rng(m + n + k)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)


def _error(got: Array, want: Array) -> float:
    """Relative L2 distance."""
    exact = want.astype(np.float64)
    return float(np.linalg.norm(got.astype(np.float64) - exact) / max(float(np.linalg.norm(exact)), 1e-30))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 16, 16), (17, 33, 31), (40, 50, 70)])
def test_meets_the_contract(dtype: Any, m: int, n: int, k: int) -> None:
    x, weight = _operands(m, n, k, dtype)
    assert MATMUL_BT.reference is not None
    (want,) = MATMUL_BT.reference(x=x, weight=weight)
    bound = 1e-6 if dtype is np.float32 else MATMUL_BT.contract.rel_l2
    assert _error(_matmul_bt(x, weight), want) <= bound


def test_a_swapped_operand_does_not_meet_it() -> None:
    x, weight = _operands(16, 16, 16, np.float32)
    assert MATMUL_BT.reference is not None
    (want,) = MATMUL_BT.reference(x=weight, weight=x)
    assert _error(_matmul_bt(x, weight), want) > MATMUL_BT.contract.rel_l2


def test_nothing_to_sum_gives_zeros() -> None:
    x, weight = np.zeros((3, 0), np.float32), np.zeros((5, 0), np.float32)
    pad = np.zeros(1, np.float32)
    buffer = np.full((3, 5), 99, np.float32)
    *_, out = interpret(KERNEL, (1,), pad, pad, buffer, 3, 5, x.shape[1], 1, weight.shape[1] + 1, 5, **BLOCKS)
    assert out.tolist() == [[0.0] * 5] * 3


def test_a_nan_stays_in_its_row() -> None:
    x, weight = _operands(20, 9, 8, np.float32)
    clean = _matmul_bt(x, weight)
    x[17, 3] = np.nan
    got = _matmul_bt(x, weight)
    assert np.isnan(got[17]).all()
    rest = [i for i in range(20) if i != 17]
    assert np.array_equal(got[rest], clean[rest])


def test_merged_weights_give_the_same_bits_as_separate_ones() -> None:
    x, weight = _operands(5, 40, 48, np.float32)
    merged = _matmul_bt(x, weight)
    for begin, end in ((0, 13), (13, 40)):
        assert np.array_equal(merged[:, begin:end], _matmul_bt(x, weight[begin:end].copy()))


def test_every_block_is_computed_once_whatever_the_group() -> None:
    x, weight = _operands(70, 50, 16, np.float32)
    assert np.array_equal(_matmul_bt(x, weight, GROUP=1), _matmul_bt(x, weight, GROUP=3))
