"""Dense matrix products (KERNEL-GEMM-BF16): what they compute. No target is named in this file."""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F16, F32
from kiln.ir.spec import Contract, DTypeVar, Op, Ship, Tensor

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-GEMM-BF16"
T = DTypeVar("T", (BF16, F16, F32))
W = DTypeVar("W", (BF16, F16, F32))
U = DTypeVar("U", (BF16, F16, F32))
MAX_K = 16384
"""The longest sum that the envelope is stated for."""

ENVELOPE = Contract("envelope", rel_l2=2.0**-8, max_eps=16.0)
"""Relative L2: one rounding to bf16 is 2**-8 at worst, accumulation in f32 far below. Worst element,
relative to the largest output: half an epsilon for the store, and what an f32 sum of up to MAX_K terms of
one sign loses in any order.
"""


def _product(x: Array, weight: Array) -> tuple[Array]:
    """(x [M, K] times weight [K, N]) in float64, as f32: the output's own type rounds it."""
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    with np.errstate(over="ignore"):
        return (exact.astype(np.float32),)


def _matmul_bt(*, x: Array, weight: Array) -> tuple[Array]:
    return _product(x, weight.T)


def _matmul(*, x: Array, weight: Array) -> tuple[Array]:
    return _product(x, weight)


def matmul_bt_in_order(x: Array, weight: Array, out: Any = None) -> Array:
    """The f32 fold over k of rounded products, from +0, rounded once to the type `out` (default: x's): the
    bits that exact realizations give."""
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    wide_x, wide_w = x.astype(np.float32), weight.astype(np.float32)
    for k in range(x.shape[1]):
        total += wide_x[:, k, None] * wide_w[None, :, k]
    return total.astype(x.dtype if out is None else out)


X = Tensor("x", T, ("M", "K"), doc="activations")
WEIGHT = Tensor("weight", W, ("N", "K"), doc="the checkpoint's layout: a row is an output feature")
OUT = Tensor("out", U, ("M", "N"), "out", doc="or columns of a wider buffer; of x's type by default")
MOST = 2**31 - 2**12
"""Of rows, output features and the inner dimension: kernels count in 32 bits up to the end of a block or a
step, which may lie beyond by its length; the longest has 1024 elements."""
LIMITS: tuple[tuple[list[Any], str], ...] = (
    (["le", ["dim", "M"], MOST], "x must have at most 2**31 - 4096 rows: split the batch"),
    (["le", ["dim", "N"], MOST], "weight must have at most 2**31 - 4096 output features: split them"),
    (["le", ["dim", "K"], MOST], "the inner dimension must be at most 2**31 - 4096: split the sum"),
)
SHIP = (
    *(Ship({"T": t, "W": t, "U": u}) for t, u in ((BF16, BF16), (BF16, F32), (F16, F16), (F32, F32))),
    Ship({"T": F16, "W": F16, "U": F32}, rare=True),
)

MATMUL_BT = Op(
    name="matmul_bt",
    family=FAMILY,
    operands=(X, WEIGHT, OUT),
    constraints=LIMITS,
    contract=ENVELOPE,
    ship=SHIP,
    doc="x [M, K] times weight [N, K] transposed, summed in f32 and rounded once; K = 0 gives zeros.",
    reference=_matmul_bt,
)

MATMUL = Op(
    name="matmul",
    family=FAMILY,
    operands=(X, Tensor("weight", W, ("K", "N"), doc="a column is an output feature"), OUT),
    constraints=LIMITS,
    contract=ENVELOPE,
    ship=SHIP,
    doc="x [M, K] times weight [K, N], summed in f32 and rounded once; K = 0 gives zeros.",
    reference=_matmul,
)

OPS: tuple[Op, ...] = (MATMUL_BT, MATMUL)
