"""Scaled matrix products of 8-bit operands (KERNEL-GEMM-FP8): what they compute. No target is named in this
file.

x [M, K] and weight [N, K] hold codes (e4m3, or i8 in the integer op); scales are f32 and lie on the device,
so that no call can look at them: zero, negative, infinite and NaN scales follow IEEE arithmetic, and a NaN
stays in the rows and columns that its scale or code belongs to. An op per way of scaling keeps launches of
different ones apart by name; within `scaled_matmul_bt`, how many scales there are is part of the call's
layout.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kiln.ir.diagnostics import DeclarationError
from kiln.ir.dtypes import BF16, F8E4M3, F16, F32, I8, I32
from kiln.ir.spec import Contract, DTypeVar, Expr, Op, Ship, Tensor

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-GEMM-FP8"
U = DTypeVar("U", (BF16, F16, F32))
BLOCK = 128
"""Neighbours along K, and rows of weight, that share a block scale."""

ENVELOPE = Contract("envelope", rel_l2=2.0**-8, max_eps=16.0)
"""As for `matmul_bt`: a rounding to the output type, and what an f32 sum loses in any order. Kernels whose
tensor cores keep fewer bits of a running sum state a wider one of their own for f32 outputs."""

GROUPS_K: Expr = ["cdiv", ["dim", "K"], BLOCK]
GROUPS_N: Expr = ["cdiv", ["dim", "N"], BLOCK]
_MOST = 2**31 - 2**12
"""As for `matmul_bt`: blocks and steps are counted to their ends in 32 bits."""
_SIZES: tuple[tuple[list[Any], str], ...] = (
    (["le", ["dim", "M"], _MOST], "x must have at most 2**31 - 4096 rows: split the batch"),
    (["le", ["dim", "N"], _MOST], "weight must have at most 2**31 - 4096 rows: split the output features"),
    (["le", ["dim", "K"], _MOST], "the inner dimension must be at most 2**31 - 4096: split the sum"),
)
_ONE_OR_EACH: tuple[tuple[list[Any], str], ...] = (
    (
        ["or", ["eq", ["dim", "SM"], 1], ["eq", ["dim", "SM"], ["dim", "M"]]],
        "x_scale must hold one scale, or one for each row of x",
    ),
    (
        ["or", ["eq", ["dim", "SN"], 1], ["eq", ["dim", "SN"], ["dim", "N"]]],
        "weight_scale must hold one scale, or one for each row of weight",
    ),
)
_EXACT_SUM: tuple[tuple[list[Any], str], ...] = (
    (["lt", ["dim", "K"], 2**17], "K must be below 2**17: a longer sum of i8 products can leave 32 bits"),
)
_BOTH_AZP: tuple[tuple[list[Any], str], ...] = (
    (
        ["or", ["and", ["present", "azp"], ["present", "azp_adj"]],
         ["and", ["absent", "azp"], ["absent", "azp_adj"]]],
        "azp and azp_adj belong together: give both or neither",
    ),
)  # fmt: skip

X = Tensor("x", F8E4M3, ("M", "K"), doc="activations, e4m3 codes")
WEIGHT = Tensor("weight", F8E4M3, ("N", "K"), doc="e4m3 codes; a row is an output feature")
X_SCALE = Tensor("x_scale", F32, ("SM",), layout="dense", doc="one scale, or one for each row of x")
WEIGHT_SCALE = Tensor(
    "weight_scale", F32, ("SN",), layout="dense", doc="one scale, or one for each row of weight"
)
X_BLOCK_SCALE = Tensor(
    "x_scale",
    F32,
    ("M", GROUPS_K),
    layout="strided",
    doc="one scale for 128 neighbours; row- or column-major",
)
WEIGHT_BLOCK_SCALE = Tensor(
    "weight_scale", F32, (GROUPS_N, GROUPS_K), layout="strided", doc="one scale for 128 x 128 codes"
)
ALPHA = Tensor("alpha", F32, ("N",), layout="dense", doc="factor of each output feature")
BIAS = Tensor("bias", U, ("N",), layout="dense", optional=True, doc="added in f32 before the rounding")
OUT = Tensor("out", U, ("M", "N"), role="out", doc="may be a column slice of a wider buffer")


def _rounded(exact: Array, bias: Array | None) -> tuple[Array]:
    """f32 of a float64 result, bias added: what the output's type then rounds."""
    total = exact if bias is None else exact + bias.astype(np.float64)
    with np.errstate(over="ignore"):
        return (total.astype(np.float32),)


def _wide(codes: Array) -> Array:
    return codes.astype(np.float32).astype(np.float64)


def _scaled(
    *, x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None = None
) -> tuple[Array]:
    """(out [M, N] f32,): x_scale * (weight_scale * (x · weightᵀ)) + bias in float64."""
    total = _wide(weight_scale) * (_wide(x) @ _wide(weight).T)
    return _rounded(_wide(x_scale)[:, None] * total, bias)


def _alpha(*, x: Array, weight: Array, alpha: Array, bias: Array | None = None) -> tuple[Array]:
    """(out [M, N] f32,): alpha * (x · weightᵀ) + bias in float64."""
    return _rounded(_wide(alpha) * (_wide(x) @ _wide(weight).T), bias)


def _block(
    *, x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None = None
) -> tuple[Array]:
    """(out [M, N] f32,): the scaled sums of 128 products each, added in float64, + bias."""
    total = np.zeros((x.shape[0], weight.shape[0]))
    scale_n = np.repeat(_wide(weight_scale), BLOCK, axis=0)[: weight.shape[0]]
    for block, k in enumerate(range(0, x.shape[1], BLOCK)):
        part = _wide(x[:, k : k + BLOCK]) @ _wide(weight[:, k : k + BLOCK]).T
        total += part * (_wide(x_scale[:, block])[:, None] * scale_n[None, :, block])
    return _rounded(total, bias)


def _int8(
    *,
    x: Array,
    weight: Array,
    x_scale: Array,
    weight_scale: Array,
    azp: Array | None = None,
    azp_adj: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array]:
    """(out [M, N] f32,): x_scale * weight_scale * (x · weightᵀ - azp * azp_adj) + bias; integers exact."""
    total = x.astype(np.int64) @ weight.astype(np.int64).T
    if azp is not None and azp_adj is not None:
        total = total - azp.astype(np.int64)[:, None] * azp_adj.astype(np.int64)
    scaled = _wide(weight_scale) * total.astype(np.float64)
    return _rounded(_wide(x_scale)[:, None] * scaled, bias)


def fold(x: Array, weight: Array) -> Array:
    """The f32 fold over k, in order, of exact products, from +0."""
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    wide_x, wide_w = x.astype(np.float32), weight.astype(np.float32)
    for k in range(x.shape[1]):
        total += wide_x[:, k, None] * wide_w[None, :, k]
    return total


def finish(total: Array, bias: Array | None, dtype: Any) -> Array:
    """An f32 result, bias added in f32, rounded once."""
    return (total if bias is None else total + bias.astype(np.float32)).astype(dtype)


def scaled_in_order(
    x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None, dtype: Any
) -> Array:
    """The bits that exact realizations of `scaled_matmul_bt` give: t = weight_scale * fold, t = x_scale * t,
    t + bias, each rounded to f32, then one rounding."""
    return finish(x_scale[:, None] * (weight_scale * fold(x, weight)), bias, dtype)


def alpha_in_order(x: Array, weight: Array, alpha: Array, bias: Array | None, dtype: Any) -> Array:
    """The bits that exact realizations of `scaled_matmul_bt_alpha` give: alpha * fold, + bias."""
    return finish(alpha * fold(x, weight), bias, dtype)


def block_in_order(
    x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None, dtype: Any
) -> Array:
    """The bits that exact realizations of `scaled_matmul_bt_block` give: for each 128 of K in order, the fold
    from +0 times f32(x_scale * weight_scale), rounded, then added to the running f32 total."""
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    scale_n = np.repeat(weight_scale, BLOCK, axis=0)[: weight.shape[0]]
    for block, k in enumerate(range(0, x.shape[1], BLOCK)):
        part = fold(x[:, k : k + BLOCK], weight[:, k : k + BLOCK])
        total += part * (x_scale[:, block, None] * scale_n[None, :, block])
    return finish(total, bias, dtype)


def int8_in_order(
    x: Array,
    weight: Array,
    x_scale: Array,
    weight_scale: Array,
    azp: Array | None,
    azp_adj: Array | None,
    bias: Array | None,
    dtype: Any,
) -> Array:
    """The bits that exact realizations of `scaled_matmul_bt_int8` give: the integer total (32 bits, wrapping)
    rounded to f32, then as `scaled_in_order`."""
    total = x.astype(np.int64) @ weight.astype(np.int64).T
    if azp is not None and azp_adj is not None:
        total = total - azp.astype(np.int64)[:, None] * azp_adj.astype(np.int64)
    wrapped = total.astype(np.int32).astype(np.float32)
    return finish(x_scale[:, None] * (weight_scale * wrapped), bias, dtype)


def merged_alpha(
    input_scales: Sequence[float], weight_scales: Sequence[float], shards: Sequence[int]
) -> Array:
    """alpha [N] f32 of a merged projection: each shard's rows get f32(input_scale * weight_scale).

    Args:
        input_scales: the static activation scale of each shard; they must be one number.
        weight_scales: the per-tensor scale of each shard.
        shards: rows of weight of each shard, in order.

    Raises:
        DeclarationError: shards quantized for different activations, or lists of different lengths.
    """
    if not len(input_scales) == len(weight_scales) == len(shards) or not shards:
        found = f"{len(input_scales)} input scales, {len(weight_scales)} weight scales, {len(shards)} shards"
        raise DeclarationError(f"merged projection: {found}; expected as many of each, and one at least")
    if len({np.float32(s) for s in input_scales}) != 1:
        given = ", ".join(f"{s:g}" for s in input_scales)
        raise DeclarationError(f"merged QKV requires one shared input_scale, found {given}")
    alphas = np.float32(input_scales[0]) * np.asarray(weight_scales, np.float32)
    return np.repeat(alphas, shards)


def _ships() -> tuple[Ship, ...]:
    return tuple(Ship({"U": u}, absent=a) for u in U.choices for a in ((), ("bias",)))


SCALED_MATMUL_BT = Op(
    name="scaled_matmul_bt",
    family=FAMILY,
    operands=(X, WEIGHT, X_SCALE, WEIGHT_SCALE, BIAS, OUT),
    constraints=(*_SIZES, *_ONE_OR_EACH),
    contract=ENVELOPE,
    ship=_ships(),
    doc="x_scale * (weight_scale * (x · weightᵀ)) + bias, summed and scaled in f32, rounded once: per "
    "tensor, per token x per channel, or mixed. K = 0 gives zeros times the scales, and the bias.",
    reference=_scaled,
)
SCALED_MATMUL_BT_ALPHA = Op(
    name="scaled_matmul_bt_alpha",
    family=FAMILY,
    operands=(X, WEIGHT, ALPHA, BIAS, OUT),
    constraints=_SIZES,
    contract=ENVELOPE,
    ship=_ships(),
    doc="alpha * (x · weightᵀ) + bias: a factor for each output feature, such as input_scale * weight_scale "
    "of the shard that it belongs to in a merged projection. One number for all is refused: alpha has N.",
    reference=_alpha,
)
SCALED_MATMUL_BT_BLOCK = Op(
    name="scaled_matmul_bt_block",
    family=FAMILY,
    operands=(X, WEIGHT, X_BLOCK_SCALE, WEIGHT_BLOCK_SCALE, BIAS, OUT),
    constraints=_SIZES,
    contract=ENVELOPE,
    ship=_ships(),
    doc="Sums of 128 products, each times x_scale * weight_scale in f32, added in f32; + bias, rounded once. "
    "N and K need not be multiples of 128: the last block is short.",
    reference=_block,
)
SCALED_MATMUL_BT_INT8 = Op(
    name="scaled_matmul_bt_int8",
    family=FAMILY,
    operands=(
        Tensor("x", I8, ("M", "K"), doc="activations"),
        Tensor("weight", I8, ("N", "K"), doc="a row is an output feature"),
        X_SCALE,
        WEIGHT_SCALE,
        Tensor("azp", I32, ("SM",), layout="dense", optional=True, doc="zero point of x, as x_scale"),
        Tensor("azp_adj", I32, ("N",), layout="dense", optional=True, doc="sum of each row of weight"),
        BIAS,
        OUT,
    ),
    constraints=(*_SIZES, *_ONE_OR_EACH, *_EXACT_SUM, *_BOTH_AZP),
    contract=ENVELOPE,
    ship=tuple(
        Ship({"U": u}, absent=(*z, *b))
        for u in U.choices
        for z in ((), ("azp", "azp_adj"))
        for b in ((), ("bias",))
    ),
    doc="x_scale * (weight_scale * (x · weightᵀ - azp * azp_adj)) + bias; the integer part is exact.",
    reference=_int8,
)

OPS: tuple[Op, ...] = (
    SCALED_MATMUL_BT,
    SCALED_MATMUL_BT_ALPHA,
    SCALED_MATMUL_BT_BLOCK,
    SCALED_MATMUL_BT_INT8,
)
