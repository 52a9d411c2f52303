"""Matrix products with weights repacked at load (KERNEL-GEMM-CPU-TILED). No target is named in this file."""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import I32
from kiln.ir.spec import Contract, Op, Scalar, Ship, Tensor
from kiln.recipes.gemm import ENVELOPE, LIMITS, OUT, SHIP, W, X

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-GEMM-CPU-TILED"
LANES = 16
"""Columns of a panel: output features that lie side by side."""
PANELS: list[Any] = ["cdiv", ["dim", "N"], LANES]
PACKED_DOC = "panels of 16 output features: [panel, k, feature], zeros for features beyond N"


def pack(weight: Array) -> Array:
    """[ceil(N / 16), K, 16] panels of weight [N, K]."""
    n, k = weight.shape
    panels = -(-n // LANES)
    padded = np.zeros((panels * LANES, k), weight.dtype)
    padded[:n] = weight
    return np.ascontiguousarray(padded.reshape(panels, LANES, k).transpose(0, 2, 1))


def unpack(packed: Array, n: int) -> Array:
    """weight [n, K] of its panels."""
    panels, k, lanes = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 2, 1).reshape(panels * lanes, k)[:n])


def _matmul_pack(*, weight: Array) -> tuple[Array]:
    return (pack(weight),)


def _matmul_packed(*, x: Array, weight: Array, n: int) -> tuple[Array]:
    exact = x.astype(np.float64) @ unpack(weight, n).astype(np.float64).T
    with np.errstate(over="ignore"):
        return (exact.astype(np.float32),)


MATMUL_PACK = Op(
    name="matmul_pack",
    family=FAMILY,
    operands=(
        Tensor("weight", W, ("N", "K"), doc="the checkpoint's layout: a row is an output feature"),
        Tensor("packed", W, (PANELS, "K", LANES), role="out", layout="dense", doc=PACKED_DOC),
    ),
    rows="N",
    width="K",
    contract=Contract("exact"),
    ship=tuple(Ship({"W": w}) for w in W.choices),
    doc="Repack weight [N, K] once, at load, for matmul_packed: what is read in a product then lies in order.",
    reference=_matmul_pack,
)

MATMUL_PACKED = Op(
    name="matmul_packed",
    family=FAMILY,
    operands=(
        X,
        Tensor("weight", W, (PANELS, "K", LANES), layout="dense", doc=PACKED_DOC),
        Scalar("n", I32, minimum=0, doc="output features: N of the weight that was packed"),
        OUT,
    ),
    constraints=LIMITS,
    contract=ENVELOPE,
    ship=SHIP,
    doc="matmul_bt with weight repacked by matmul_pack: the same sums in the same order.",
    reference=_matmul_packed,
)

OPS: tuple[Op, ...] = (MATMUL_PACK, MATMUL_PACKED)
