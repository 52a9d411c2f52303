"""Normalizations (KERNEL-EW-NORM-ACT): what each means. No target is named in this file.

All arithmetic is f32 with one rounding on store; sums have the pair-tree order, `1/sqrt` is a correctly
rounded square root and division.
"""

from kiln.ir.dtypes import BF16, F16, F32
from kiln.ir.language import Value, exp, row_max, row_sum, sqrt, width_of
from kiln.ir.spec import ANY, Attr, DTypeVar, Op, Scalar, Ship, Tensor
from kiln.recipes.activation import gate_activation

FAMILY = "KERNEL-EW-NORM-ACT"
T = DTypeVar("T", (BF16, F16, F32))
W = DTypeVar("W", (BF16, F16, F32))
O = DTypeVar("O", (BF16, F16, F32))  # noqa: E741  the sheet's name for the output type
GEMMA = Attr("gemma", (False, True), False, "scale by 1 + weight instead of weight")
EPS = Scalar("eps", F32, default=1e-6, minimum=0.0, doc="added to the mean square")
HIDDEN = (2048, 4096, 5120, 7168)
"""Hidden sizes of the models the sheet names: 2048 (35B-A3B), 4096 (Llama-3.1-8B, Qwen3-8B), 5120 (27B),
7168 (DeepSeek-V3).
"""


def inverse_rms(x: Value, eps: Value) -> Value:
    """1 / sqrt(mean(x**2) + eps) over the row, f32."""
    return 1.0 / sqrt(row_sum(x * x) / width_of(x) + eps)


def scaled(x: Value, weight: Value | None, gemma: bool) -> Value:
    """x times the weight (1 + weight for gemma, in f32); x itself without one."""
    if weight is None:
        return x
    w = weight.to(F32)
    return x * (w + 1.0 if gemma else w)


def _rms_norm(x: Value, weight: Value | None, eps: Value, gemma: bool) -> Value:
    v = x.to(F32)
    return scaled(v * inverse_rms(v, eps), weight, gemma)


RMS_NORM = Op(
    name="rms_norm",
    family=FAMILY,
    operands=(
        Tensor("x", T, ("M", "N")),
        Tensor("weight", W, ("N",), optional=True),
        EPS,
        Tensor("out", O, ("M", "N"), "out"),
    ),
    attrs=(GEMMA,),
    body=_rms_norm,
    ship=(
        Ship({"T": BF16, "W": BF16, "O": BF16}, widths=(128, *HIDDEN, ANY), unaligned=True),
        Ship({"T": BF16, "W": BF16, "O": BF16}, {"gemma": True}, widths=(256, 2048, 5120)),
        Ship({"T": F32, "W": F32, "O": F32}),
        Ship({"T": BF16, "O": BF16}, absent=("weight",), rare=True),
        Ship({"T": F32, "W": BF16, "O": BF16}),
        Ship({"T": BF16, "W": F32, "O": BF16}, rare=True),
        Ship({"T": F16, "W": F16, "O": F16}, rare=True),
        Ship({"T": F32, "W": F32, "O": F32}, {"gemma": True}, rare=True),
    ),
    doc="y = x / sqrt(mean(x**2) + eps) * weight over the last axis",
)


def _layer_norm(x: Value, weight: Value | None, bias: Value | None, eps: Value) -> Value:
    v = x.to(F32)
    n = width_of(v)
    centred = v - row_sum(v) / n
    y = centred * (1.0 / sqrt(row_sum(centred * centred) / n + eps))
    y = scaled(y, weight, gemma=False)
    return y if bias is None else y + bias.to(F32)


LAYER_NORM = Op(
    name="layer_norm",
    family=FAMILY,
    operands=(
        Tensor("x", T, ("M", "N")),
        Tensor("weight", W, ("N",), optional=True),
        Tensor("bias", W, ("N",), optional=True),
        Scalar("eps", F32, default=1e-5, minimum=0.0),
        Tensor("out", O, ("M", "N"), "out"),
    ),
    body=_layer_norm,
    ship=(
        Ship({"T": BF16, "W": BF16, "O": BF16}),
        Ship({"T": F32, "W": F32, "O": F32}, rare=True),
        Ship({"T": F32, "O": F32}, absent=("weight", "bias"), rare=True),
    ),
    doc="two-pass, biased variance: y = (x - mean) / sqrt(var + eps) * weight + bias",
)


def _rms_norm_gated(x: Value, gate: Value, weight: Value, eps: Value, activation: str) -> Value:
    v = x.to(F32)
    return v * inverse_rms(v, eps) * weight.to(F32) * gate_activation(gate.to(F32), activation)


RMS_NORM_GATED = Op(
    name="rms_norm_gated",
    family=FAMILY,
    operands=(
        Tensor("x", T, ("M", "N")),
        Tensor("gate", T, ("M", "N"), doc="same shape; may be a view of a merged projection"),
        Tensor("weight", W, ("N",)),
        EPS,
        Tensor("out", O, ("M", "N"), "out"),
    ),
    attrs=(Attr("activation", ("silu", "sigmoid"), "silu"),),
    body=_rms_norm_gated,
    ship=(
        Ship({"T": BF16, "W": BF16, "O": BF16}, widths=(128,), latency=True),
        Ship({"T": BF16, "W": BF16, "O": BF16}, {"activation": "sigmoid"}, widths=(128,)),
        Ship({"T": F32, "W": F32, "O": BF16}, rare=True),
        Ship({"T": F32, "W": F32, "O": F32}, rare=True),
        Ship({"T": F32, "W": F32, "O": F32}, {"activation": "sigmoid"}, rare=True),
    ),
    doc="norm before gate: y = x / sqrt(mean(x**2) + eps) * weight * activation(gate)",
)


def _l2_norm(x: Value, eps: Value) -> Value:
    v = x.to(F32)
    return v / sqrt(row_sum(v * v) + eps)


L2_NORM = Op(
    name="l2_norm",
    family=FAMILY,
    operands=(Tensor("x", T, ("M", "N")), EPS, Tensor("out", T, ("M", "N"), "out")),
    body=_l2_norm,
    ship=(Ship({"T": BF16}, widths=(128,)), Ship({"T": F32}, rare=True)),
    doc="y = x / sqrt(sum(x**2) + eps): the sum, not the mean",
)


def _softmax(x: Value) -> Value:
    v = x.to(F32)
    e = exp(v - row_max(v))
    return e / row_sum(e)


SOFTMAX = Op(
    name="softmax",
    family=FAMILY,
    operands=(Tensor("x", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out")),
    body=_softmax,
    ship=(Ship({"T": F32}), Ship({"T": BF16}, rare=True)),
    doc="exp(x - max) / sum over the last axis; NaN in, or no finite element: the row is NaN",
)

OPS: tuple[Op, ...] = (RMS_NORM, LAYER_NORM, RMS_NORM_GATED, L2_NORM, SOFTMAX)
