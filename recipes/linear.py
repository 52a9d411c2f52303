"""Linear layers (KERNEL-GEMM-BF16): a matrix product and what follows it, each a declaration of a few lines.

The product's f32 sums go on unrounded, and there is one rounding, at the end. Where a kernel of the product
can inline what follows, it does; elsewhere that runs after it.
"""

from collections.abc import Iterator

from kiln.ir.dtypes import BF16, F16, F32
from kiln.ir.language import Value, call
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Ship, Tensor
from kiln.recipes.activation import ACTIVATIONS
from kiln.recipes.gemm import ENVELOPE, FAMILY, LIMITS, MATMUL_BT, WEIGHT, T, X

B = DTypeVar("B", (BF16, F16, F32))
ALPHA = Scalar("alpha", F32, 1.0, doc="factor of the product")
BIAS = Tensor("bias", B, ("N",), optional=True)
RESIDUAL = Tensor("residual", T, ("M", "N"), optional=True, doc="may be the memory of out")
OUT = Tensor("out", T, ("M", "N"), "out")
ACTIVATION = Attr("activation", ("none", *ACTIVATIONS), "none")


def _ships(variables: str, all_kernels: bool) -> Iterator[Ship]:
    """What is shipped; `variables` are the op's own. Without `all_kernels` the lesser ones stay composite."""
    types = dict.fromkeys(variables, BF16)
    for absent in ("residual", "bias"):
        yield Ship(types, absent=(absent,), unaligned=True)
    for activation in ("silu", "gelu_tanh"):
        yield Ship(types, {"activation": activation}, absent=("residual",), unaligned=True)
    yield Ship(types, rare=not all_kernels, unaligned=True)
    for dtype in (F16, F32):
        other = dict.fromkeys(variables, dtype)
        yield Ship(other, absent=("residual",), rare=not all_kernels, unaligned=True)


def _epilogue(
    total: Value, bias: Value | None, residual: Value | None, alpha: Value, activation: str
) -> Value:
    y = total * alpha
    y = y if bias is None else y + bias.to(F32)
    y = y if activation == "none" else ACTIVATIONS[activation](y)
    return y if residual is None else y + residual.to(F32)


LINEAR_EPILOGUE = Op(
    "linear_epilogue",
    FAMILY,
    (Tensor("total", F32, ("M", "N"), doc="sums of a matrix product"), BIAS, RESIDUAL, ALPHA, OUT),
    attrs=(ACTIVATION,),
    body=_epilogue,
    ship=tuple(_ships("TB", all_kernels=True)),
    doc="activation(alpha * total + bias) + residual in f32, rounded once",
)


def _linear(
    x: Value, weight: Value, bias: Value | None, residual: Value | None, alpha: Value, activation: str
) -> Value:
    total = call(MATMUL_BT, x, weight, dtypes={"U": F32})[0]
    out = {"T": x.dtype}
    return call(LINEAR_EPILOGUE, total, bias, residual, alpha=alpha, activation=activation, dtypes=out)[0]


LINEAR = Op(
    "linear",
    FAMILY,
    (X, WEIGHT, BIAS, RESIDUAL, ALPHA, OUT),
    attrs=(ACTIVATION,),
    constraints=LIMITS,
    contract=ENVELOPE,
    body=_linear,
    is_recipe=True,
    ship=tuple(_ships("TWB", all_kernels=False)),
    doc="activation(alpha * x · weightᵀ + bias) + residual: f32 sums, rounded once",
)

OPS: tuple[Op, ...] = (LINEAR_EPILOGUE, LINEAR)
