"""Batches of matrix products on this CPU: the bits of one product after another, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.recipes.gemm import matmul_bt_in_order
from kiln.recipes.gemm_batched import MATMUL_BT_BATCHED, MATMUL_BT_HEADS
from kiln.runtime.errors import ContractError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]

BF16 = ml_dtypes.bfloat16
SIZES = [(1, 1, 1, 1), (3, 5, 33, 70), (2, 65, 63, 31), (5, 1, 16, 0)]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Both ops for the best ISA tier of this machine."""
    out: Path = tmp_path_factory.mktemp("batches") / "tree"
    build_from(out, [cpu_target()], [MATMUL_BT_BATCHED.name, MATMUL_BT_HEADS.name], [CpuBackend()])
    with load(out, "cpu") as library:
        yield library


def _operands(b: int, m: int, n: int, k: int, dtype: Any) -> tuple[Array, Array, Array]:
    """x and weight product by product, and the bits that they give."""
    rng = np.random.default_rng([b, m, n, k])
    x, weight = rng.standard_normal((b, m, k)).astype(dtype), rng.standard_normal((b, n, k)).astype(dtype)
    return x, weight, np.stack([matmul_bt_in_order(*pair) for pair in zip(x, weight, strict=True)])


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize(("b", "m", "n", "k"), SIZES)
def test_bits_are_those_of_one_product_after_another(
    batches: Library, b: int, m: int, n: int, k: int, dtype: Any
) -> None:
    x, weight, want = _operands(b, m, n, k, dtype)
    got = batches.op("matmul_bt_batched")(x, weight, out=np.full((b, m, n), 99, dtype))
    assert got.tobytes() == want.tobytes()
    turned = np.ascontiguousarray(x.transpose(1, 0, 2))
    heads = batches.op("matmul_bt_heads")(turned, weight, out=np.full((m, b, n), 99, dtype))
    assert heads.tobytes() == want.transpose(1, 0, 2).tobytes()


def test_references_are_near() -> None:
    x, weight, want = _operands(3, 5, 33, 70, np.float32)
    assert MATMUL_BT_BATCHED.reference is not None
    assert MATMUL_BT_HEADS.reference is not None
    (exact,) = MATMUL_BT_BATCHED.reference(x=x, weight=weight)
    (heads,) = MATMUL_BT_HEADS.reference(x=x.transpose(1, 0, 2), weight=weight)
    assert np.allclose(exact, want, rtol=1e-5, atol=1e-5)
    assert heads.tobytes() == np.ascontiguousarray(exact.transpose(1, 0, 2)).tobytes()


def test_columns_of_wider_buffers(batches: Library) -> None:
    x, weight, want = _operands(3, 5, 24, 40, BF16)
    wide, buffer = np.full((3, 5, 47), 7, BF16), np.full((3, 5, 31), 99, BF16)
    wide[..., 3:43] = x
    batches.op("matmul_bt_batched")(wide[..., 3:43], weight, out=buffer[..., 5:29])
    assert buffer[..., 5:29].tobytes() == want.tobytes()
    assert (buffer[..., :5] == 99).all()
    assert (buffer[..., 29:] == 99).all()


def test_no_rows_write_nothing(batches: Library) -> None:
    got = batches.op("matmul_bt_batched")(np.ones((3, 0, 4), BF16), np.ones((3, 2, 4), BF16))
    assert got.shape == (3, 0, 2)


X, WEIGHT = np.ones((3, 4, 8), BF16), np.ones((3, 6, 8), BF16)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda f: f(X, WEIGHT[:2]), "matmul_bt_batched: weight has B=2 but x gave B=3"),
        (lambda f: f(X, WEIGHT[..., :7].copy()), "matmul_bt_batched: weight has K=7 but x gave K=8"),
        (lambda f: f(X[:0], WEIGHT[:0]), "a batch must have at least one product"),
        (lambda f: f(np.ones((6, 4, 8), BF16)[::2], WEIGHT), "cannot be walked with one stride"),
        (lambda f: f(X[0], WEIGHT), "x has shape (4, 8), expected [B, M, K]"),
        (
            lambda f: f(WEIGHT, WEIGHT.copy(), out=WEIGHT[..., :6]),
            "out, which is written, overlaps that of x",
        ),
    ],
)
def test_refusals(batches: Library, call: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(ContractError) as caught:
        call(batches.op("matmul_bt_batched"))
    assert told in str(caught.value)
