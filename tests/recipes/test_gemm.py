"""Matrix product declarations: the oracle and the sum in order against hand-worked numbers."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gemm import MATMUL, MATMUL_BT, matmul_bt_in_order


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_literals(dtype: Any) -> None:
    x = np.array([[1, 2]], dtype)
    weight = np.array([[1, 1], [2, -1], [4, 0.5]], dtype)
    assert MATMUL_BT.reference is not None
    (out,) = MATMUL_BT.reference(x=x, weight=weight)
    assert out.tolist() == [[3, 0, 5]]
    assert MATMUL.reference is not None
    assert MATMUL.reference(x=x, weight=weight.T)[0].tolist() == [[3, 0, 5]]
    assert matmul_bt_in_order(x, weight).tolist() == [[3, 0, 5]]


def test_the_oracle_sums_in_float64_and_the_fold_in_float32() -> None:
    x, ones = np.array([[1, 1e8, -1e8, 1]], np.float32), np.ones((1, 4), np.float32)
    assert MATMUL_BT.reference is not None
    assert MATMUL_BT.reference(x=x, weight=ones)[0].tolist() == [[2.0]]
    assert matmul_bt_in_order(x, ones).tolist() == [[1.0]]


def test_nothing_to_sum_gives_zeros() -> None:
    x, weight = np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32)
    assert MATMUL_BT.reference is not None
    assert MATMUL_BT.reference(x=x, weight=weight)[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert matmul_bt_in_order(x, weight).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_one_rounding_to_the_type_that_is_asked_for() -> None:
    x, weight = np.array([[1, 2**-8]], ml_dtypes.bfloat16), np.ones((1, 2), ml_dtypes.bfloat16)
    assert MATMUL_BT.reference is not None
    assert MATMUL_BT.reference(x=x, weight=weight)[0].tolist() == [[1 + 2**-8]]
    assert matmul_bt_in_order(x, weight, np.float32).tolist() == [[1 + 2**-8]]
    assert matmul_bt_in_order(x, weight).astype(np.float32).tolist() == [[1.0]]


def test_the_contract_is_an_envelope() -> None:
    assert MATMUL_BT.contract.kind == "envelope"
    assert 0 < MATMUL_BT.contract.rel_l2 <= 2**-8
