"""Batches of independent matrix products with a weight each (KERNEL-GEMM-BF16); a weight that all share is
`matmul_bt` with leading dims. No target is named in this file."""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F16, F32
from kiln.ir.spec import Op, Ship, Tensor
from kiln.recipes.gemm import ENVELOPE, FAMILY, LIMITS, T, U, W

Array: TypeAlias = np.ndarray[Any, Any]

WEIGHT = Tensor("weight", W, ("B", "N", "K"), doc="a weight for each product")
SIZES: tuple[tuple[list[Any], str], ...] = (
    *LIMITS,
    (["gt", ["dim", "B"], 0], "a batch must have at least one product"),
    (["lt", ["dim", "B"], 2**16], "a batch must have fewer than 2**16 products: split it"),
)
SHIP = tuple(Ship(dict.fromkeys("TWU", dtype), rare=dtype is not BF16) for dtype in (BF16, F16, F32))


def _batched(*, x: Array, weight: Array) -> tuple[Array]:
    exact = x.astype(np.float64) @ weight.astype(np.float64).transpose(0, 2, 1)
    with np.errstate(over="ignore"):
        return (exact.astype(np.float32),)


def _heads(*, x: Array, weight: Array) -> tuple[Array]:
    (out,) = _batched(x=x.transpose(1, 0, 2), weight=weight)
    return (np.ascontiguousarray(out.transpose(1, 0, 2)),)


MATMUL_BT_BATCHED = Op(
    name="matmul_bt_batched",
    family=FAMILY,
    operands=(
        Tensor("x", T, ("B", "M", "K"), doc="one stride walks products and their rows"),
        WEIGHT,
        Tensor("out", U, ("B", "M", "N"), "out"),
    ),
    constraints=SIZES,
    contract=ENVELOPE,
    ship=SHIP,
    doc="out[b] = x[b] [M, K] times weight[b] [N, K] transposed, summed in f32 and rounded once.",
    reference=_batched,
)

MATMUL_BT_HEADS = Op(
    name="matmul_bt_heads",
    family=FAMILY,
    operands=(
        Tensor(
            "x", T, ("M", "B", "K"), doc="rows of heads, as projections leave them: nothing is transposed"
        ),
        WEIGHT,
        Tensor("out", U, ("M", "B", "N"), "out"),
    ),
    constraints=SIZES,
    contract=ENVELOPE,
    ship=SHIP,
    doc="out[:, h] = x[:, h] [M, K] times weight[h] [N, K] transposed, summed in f32 and rounded once.",
    reference=_heads,
)

OPS: tuple[Op, ...] = (MATMUL_BT_BATCHED, MATMUL_BT_HEADS)
