"""A catalog of one's own: Triton kernels with their declarations, and an op and a recipe that Kiln
generates.
"""

from typing import Any

import numpy as np

from kiln.backends.cuda.declare import Launch, triton_op
from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import BF16, F32
from kiln.ir.language import Value, call, max_number, min_number
from kiln.ir.spec import DTypeVar, Op, Scalar, Ship, Tensor
from kiln.recipes.activation import UNARY

Array = np.ndarray[Any, Any]
T = DTypeVar("T", (BF16, F32))
X, OUT = Tensor("x", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out")
SILU = UNARY[0]
"""Kiln's own op: a recipe here calls it, so this catalog lists it."""


def leaky_relu_reference(*, x: Array, slope: float) -> tuple[Array]:
    """x above 0, slope * x below, rounded once."""
    wide = x.astype(np.float32)
    return (np.where(wide > 0, wide, wide * np.float32(slope)).astype(x.dtype),)


LEAKY_RELU = triton_op(
    "leaky_relu",
    "my_kernels.kernels:leaky_relu_kernel",
    (X, Scalar("slope", F32, default=0.01), OUT),
    family="MY-KERNELS",
    reference=leaky_relu_reference,
    grid=("M", ["cdiv", "N", "BLOCK"]),
    launches=(Launch({"BLOCK": 256}),),
    ship=(Ship({"T": BF16}), Ship({"T": F32})),
    arguments={"stride_xm": "x_stride", "stride_om": "out_stride", "n_cols": "N"},
)


def add_scaled_reference(*, x: Array, acc: Array, bias: Array | None, scale: float) -> tuple[Array]:
    """acc + scale * (x + bias)."""
    value = x.astype(np.float32) + (0 if bias is None else bias.astype(np.float32))
    return (acc + np.float32(scale) * value,)


ADD_SCALED = triton_op(
    "add_scaled",
    "my_kernels.kernels:add_scaled_kernel",
    (
        X,
        Tensor("acc", F32, ("M", "N"), "inout"),
        Tensor("bias", T, ("N",), optional=True),
        Scalar("scale", F32),
    ),
    family="MY-KERNELS",
    reference=add_scaled_reference,
    grid=("M", ["cdiv", "N", "BLOCK"]),
    launches=(Launch(),),
    ship=(Ship({"T": BF16}), Ship({"T": BF16}, absent=("bias",))),
    arguments={"HAS_BIAS": ["present", "bias"]},
)


def _clipped(x: Value, limit: Value) -> Value:
    return min_number(max_number(x.to(F32), -limit), limit)


CLIPPED = Op(
    "clipped",
    "MY-KERNELS",
    (X, Scalar("limit", F32, default=6.0, minimum=0.0, positive=True), OUT),
    body=_clipped,
    ship=(Ship({"T": BF16}),),
    doc="x limited to [-limit, limit]; NaN becomes -limit",
)


def _clipped_silu(x: Value, limit: Value) -> Value:
    return call(SILU, call(CLIPPED, x, limit)[0])[0]


CLIPPED_SILU = Op(
    "clipped_silu",
    "MY-KERNELS",
    CLIPPED.operands,
    body=_clipped_silu,
    ship=CLIPPED.ship,
    is_recipe=True,
    doc="silu of the clipped row",
)


def catalog() -> Catalog:
    """What `kiln build --catalog my_kernels` builds."""
    return Catalog(
        (LEAKY_RELU.op, ADD_SCALED.op, CLIPPED, SILU, CLIPPED_SILU),
        (*LEAKY_RELU.realizations, *ADD_SCALED.realizations),
    )
