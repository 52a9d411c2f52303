"""The fusion catalog (KERNEL-FUSION-FRAMEWORK): recipes, each declared once as a composition of ops.

A recipe names what is fused, never a kernel. Its composite plan, its fused kernels for every target and its
oracle come from this text; the roundings between the ops (a bf16 intermediate) are part of the result on
every tier.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kiln.ir.dtypes import BF16, F16, F32, I32, I64, U8, DType
from kiln.ir.language import Value, call
from kiln.ir.spec import ANY, Attr, DTypeVar, Expr, Op, Scalar, Ship, Step, Tensor
from kiln.recipes import activation as act
from kiln.recipes import norm, quant, rope

FAMILY = "KERNEL-FUSION-FRAMEWORK"
T = DTypeVar("T", (BF16, F16, F32))
R = DTypeVar("R", (BF16, F16, F32))
W = DTypeVar("W", (BF16, F16, F32))
U = DTypeVar("U", (BF16, F16, F32))
X = Tensor("x", T, ("M", "N"))
WEIGHT = Tensor("weight", W, ("N",))
RESIDUAL = Tensor("residual", R, ("M", "N"), "inout")
OPTIONAL_RESIDUAL = Tensor("residual", R, ("M", "N"), "inout", optional=True)
FP8_OUT = Tensor("out", U8, ("M", "N"), "out")
TOKEN_SCALES = Tensor("scales", F32, ("M",), "out", "dense")
BF16_NORM = {"T": BF16, "R": BF16, "W": BF16}
NORM_SHIP = (Ship(BF16_NORM, widths=(*norm.HIDDEN, ANY)),)
GEMMA_WIDTHS = (2048, 5120)
"""Hidden sizes of the models that scale by 1 + weight."""
PLAIN_WIDTHS = (4096, 7168)
"""Hidden sizes of those that scale by the weight itself."""
ALONE_WIDTHS = (4096,)
"""Hidden sizes served without a residual: a model's first norm."""


def recipe(name: str, operands: tuple[Any, ...], body: Callable[..., Any], **fields: Any) -> Op:
    """A declared recipe."""
    return Op(name, FAMILY, operands, body=body, is_recipe=True, **fields)


def _normed(
    x: Value, weight: Value, residual: Value | None, eps: Value, gemma: bool, out: DType
) -> tuple[Value, Value | None]:
    """The residual add (where there is a residual) and the norm."""
    stream = x if residual is None else call(act.ADD, x, residual)[0]
    return call(norm.RMS_NORM, stream, weight, eps=eps, gemma=gemma, dtypes={"O": out})[
        0
    ], None if residual is None else stream


def _fused_add_rms_norm(gemma: bool) -> Callable[..., Any]:
    def body(x: Value, weight: Value, residual: Value, eps: Value) -> tuple[Value, Value]:
        stream = call(act.ADD, x, residual)[0]
        return call(norm.RMS_NORM, stream, weight, eps=eps, gemma=gemma, dtypes={"O": x.dtype})[0], stream

    return body


def _add_rms_norm(name: str, gemma: bool, ship: tuple[Ship, ...]) -> Op:
    operands = (X, WEIGHT, RESIDUAL, norm.EPS, Tensor("out", T, ("M", "N"), "out"))
    kind = "gemma (1 + weight)" if gemma else "plain weight"
    doc = f"residual += x; out = rms_norm(residual), {kind}"
    return recipe(name, operands, _fused_add_rms_norm(gemma), returns=("out", "residual"), ship=ship, doc=doc)


FUSED_ADD_RMS_NORM = _add_rms_norm(
    "fused_add_rms_norm", True, (Ship(BF16_NORM, widths=(*GEMMA_WIDTHS, ANY)),)
)
FUSED_ADD_RMS_NORM_STD = _add_rms_norm(
    "fused_add_rms_norm_std",
    False,
    (*NORM_SHIP, Ship({"T": BF16, "R": F32, "W": BF16}), Ship({"T": F32, "R": F32, "W": F32}, rare=True)),
)


def _rms_norm_quant_fp8(
    x: Value, weight: Value, residual: Value | None, eps: Value, scale: Value, gemma: bool
) -> tuple[Value, Value | None, Value]:
    normed, stream = _normed(x, weight, residual, eps, gemma, BF16)
    return call(quant.QUANT_FP8_STATIC, normed, scale=scale)[0], stream, normed


RMS_NORM_QUANT_FP8 = recipe(
    "rms_norm_quant_fp8",
    (
        X,
        WEIGHT,
        OPTIONAL_RESIDUAL,
        norm.EPS,
        quant.SCALE,
        FP8_OUT,
        Tensor("normed", BF16, ("M", "N"), "out", optional=True),
    ),
    _rms_norm_quant_fp8,
    attrs=(Attr("gemma", (False, True), True),),
    returns=("out", "residual", "normed"),
    ship=(
        Ship(BF16_NORM, widths=(5120,), absent=("normed",)),
        Ship(BF16_NORM, {"gemma": False}, widths=PLAIN_WIDTHS, absent=("normed",)),
        Ship(BF16_NORM, {"gemma": False}, widths=ALONE_WIDTHS, absent=("normed", "residual")),
        Ship(BF16_NORM, rare=True),
    ),
    doc="(residual += x;) static fp8 of the bf16 norm",
)


def _rms_norm_gated_quant_fp8(
    x: Value, gate: Value, weight: Value, eps: Value, scale: Value, activation: str
) -> Value:
    normed = call(norm.RMS_NORM_GATED, x, gate, weight, eps=eps, activation=activation, dtypes={"O": BF16})[0]
    return call(quant.QUANT_FP8_STATIC, normed, scale=scale)[0]


RMS_NORM_GATED_QUANT_FP8 = recipe(
    "rms_norm_gated_quant_fp8",
    (X, Tensor("gate", T, ("M", "N")), WEIGHT, norm.EPS, quant.SCALE, FP8_OUT),
    _rms_norm_gated_quant_fp8,
    attrs=(Attr("activation", ("silu", "sigmoid"), "silu"),),
    ship=(
        Ship({"T": BF16, "W": BF16}, widths=(128,)),
        Ship({"T": BF16, "W": BF16}, {"activation": "sigmoid"}, rare=True),
    ),
    doc="static fp8 of the bf16 gated norm",
)


def _silu_mul_quant_fp8(gate: Value, up: Value, scale: Value) -> Value:
    return call(quant.QUANT_FP8_STATIC, call(act.SILU_MUL, gate, up, dtypes={"O": BF16})[0], scale=scale)[0]


SILU_MUL_QUANT_FP8 = recipe(
    "silu_mul_quant_fp8",
    (Tensor("gate", T, ("M", "N")), Tensor("up", T, ("M", "N")), quant.SCALE, FP8_OUT),
    _silu_mul_quant_fp8,
    ship=(Ship({"T": BF16}),),
    doc="static fp8 of the bf16 silu(gate) * up",
)


def _silu_mul_quant_fp8_group(gate: Value, up: Value, group: int, ue8m0: bool) -> tuple[Value, Value]:
    mid = call(act.SILU_MUL, gate, up, dtypes={"O": BF16})[0]
    codes, scales = call(quant.QUANT_FP8_GROUP, mid, group=group, ue8m0=ue8m0)
    return codes, scales


SILU_MUL_QUANT_FP8_GROUP = recipe(
    "silu_mul_quant_fp8_per_group",
    (Tensor("gate", T, ("M", "N")), Tensor("up", T, ("M", "N")), FP8_OUT, quant.GROUP_SCALES),
    _silu_mul_quant_fp8_group,
    attrs=(quant.GROUP, quant.UE8M0),
    constraints=(quant.BY_GROUP,),
    ship=(Ship({"T": BF16}),),
    doc="fp8 per group of the bf16 silu(gate) * up",
)


def _rms_norm_quant_fp8_token(
    x: Value, weight: Value, residual: Value | None, eps: Value, upper_bound: Value, gemma: bool
) -> tuple[Value, Value, Value | None]:
    normed, stream = _normed(x, weight, residual, eps, gemma, BF16)
    codes, scales = call(quant.QUANT_FP8_TOKEN, normed, upper_bound=upper_bound)
    return codes, scales, stream


RMS_NORM_QUANT_FP8_TOKEN = recipe(
    "rms_norm_quant_fp8_per_token",
    (X, WEIGHT, OPTIONAL_RESIDUAL, norm.EPS, quant.UPPER_BOUND, FP8_OUT, TOKEN_SCALES),
    _rms_norm_quant_fp8_token,
    attrs=(norm.GEMMA,),
    returns=("out", "scales", "residual"),
    ship=(
        Ship(BF16_NORM, widths=norm.HIDDEN[1:]),
        Ship(BF16_NORM, absent=("residual",), rare=True),
    ),
    doc="(residual += x;) fp8 per token of the bf16 norm",
)


def _rms_norm_quant_fp8_group(
    x: Value, weight: Value, residual: Value | None, eps: Value, gemma: bool, group: int, ue8m0: bool
) -> tuple[Value, Value, Value | None]:
    normed, stream = _normed(x, weight, residual, eps, gemma, BF16)
    codes, scales = call(quant.QUANT_FP8_GROUP, normed, group=group, ue8m0=ue8m0)
    return codes, scales, stream


RMS_NORM_QUANT_FP8_GROUP = recipe(
    "rms_norm_quant_fp8_per_group",
    (X, WEIGHT, OPTIONAL_RESIDUAL, norm.EPS, FP8_OUT, quant.GROUP_SCALES),
    _rms_norm_quant_fp8_group,
    attrs=(norm.GEMMA, quant.GROUP, quant.UE8M0),
    constraints=(quant.BY_GROUP,),
    returns=("out", "scales", "residual"),
    ship=(
        Ship(BF16_NORM, widths=PLAIN_WIDTHS),
        Ship(BF16_NORM, absent=("residual",), rare=True),
    ),
    doc="(residual += x;) fp8 per group of the bf16 norm",
)


def _fp4_recipes(swizzled: bool) -> tuple[Op, ...]:
    quantize = quant.SCALED_FP4_QUANT_SWIZZLED if swizzled else quant.SCALED_FP4_QUANT
    outputs = (*quant.fp4_outputs(swizzled),)
    end = quant.suffix(swizzled)

    def silu_mul(gate: Value, up: Value, global_scale_inv: Value) -> tuple[Value, ...]:
        return tuple(
            call(
                quantize,
                call(act.SILU_MUL, gate, up, dtypes={"O": BF16})[0],
                global_scale_inv=global_scale_inv,
            )
        )

    def sigmoid_gate(x: Value, gate: Value, global_scale_inv: Value) -> tuple[Value, ...]:
        return tuple(
            call(
                quantize,
                call(act.SIGMOID_GATE, x, gate, dtypes={"O": BF16})[0],
                global_scale_inv=global_scale_inv,
            )
        )

    def add_norm(
        x: Value, weight: Value, residual: Value | None, eps: Value, global_scale_inv: Value, gemma: bool
    ) -> tuple[Value | None, ...]:
        normed, stream = _normed(x, weight, residual, eps, gemma, BF16)
        return (*call(quantize, normed, global_scale_inv=global_scale_inv), stream)

    tensors = (Tensor("gate", T, ("M", "N")), Tensor("up", T, ("M", "N")))
    gated = (X, Tensor("gate", U, ("M", "N"), doc="f32 stays unrounded"))
    fields = {"constraints": (quant.BY16,)}
    return (
        recipe(
            f"silu_mul_fp4_quant{end}",
            (*tensors, quant.GLOBAL_SCALE_INV, *outputs),
            silu_mul,
            ship=(Ship({"T": BF16}),),
            doc="NVFP4 of the bf16 silu(gate) * up",
            **fields,
        ),
        recipe(
            f"sigmoid_gate_fp4_quant{end}",
            (*gated, quant.GLOBAL_SCALE_INV, *outputs),
            sigmoid_gate,
            ship=(Ship({"T": BF16, "U": F32}),),
            doc="NVFP4 of the bf16 x * sigmoid(gate)",
            **fields,
        ),
        recipe(
            f"rms_norm_fp4_quant{end}",
            (X, WEIGHT, OPTIONAL_RESIDUAL, norm.EPS, quant.GLOBAL_SCALE_INV, *outputs),
            add_norm,
            attrs=(norm.GEMMA,),
            returns=("packed", "scales", "residual"),
            ship=(Ship(BF16_NORM, widths=(4096, 5120)), Ship(BF16_NORM, absent=("residual",), rare=True)),
            doc="(residual += x;) NVFP4 of the bf16 norm",
            **fields,
        ),
    )


FP4_RECIPES = (*_fp4_recipes(swizzled=False), *_fp4_recipes(swizzled=True))


def _rms_norm_rope(
    x: Value,
    weight: Value,
    positions: Value,
    cos_sin: Value,
    eps: Value,
    heads: Value,
    rotary_dim: int,
    neox: bool,
    gemma: bool,
) -> Value:
    normed = call(norm.RMS_NORM, x, weight, eps=eps, gemma=gemma, dtypes={"O": x.dtype})[0]
    return call(rope.ROPE, normed, positions, cos_sin, heads=heads, rotary_dim=rotary_dim, neox=neox)[0]


RMS_NORM_ROPE = recipe(
    "rms_norm_rope",
    (X, WEIGHT, rope.POSITIONS, rope.CACHE, norm.EPS, rope.HEADS, Tensor("out", T, ("M", "N"), "out")),
    _rms_norm_rope,
    attrs=(rope.ROTARY, rope.NEOX, norm.GEMMA),
    constraints=rope.ROPE.constraints,
    ship=(
        Ship({"T": BF16, "W": BF16, "C": F32, "I": I64}, widths=(128,)),
        Ship({"T": BF16, "W": BF16, "C": F32, "I": I64}, {"rotary_dim": 64, "gemma": True}, widths=(256,)),
    ),
    doc="rope of the norm of each head; the norm is rounded to x's type between the two",
)


def _head_operands(name: str, out: str) -> tuple[Tensor, Tensor, Scalar]:
    """A [tokens * heads, D] operand, what is written of it, and its heads per token."""
    rows = f"{name.upper()}_ROWS"
    scalar = Scalar(f"{name}_heads", I32, minimum=1)
    return Tensor(name, T, (rows, "N")), Tensor(out, T, (rows, "N"), "out"), scalar


_Q, _Q_OUT, _Q_HEADS = _head_operands("q", "q_out")
_K, _K_OUT, _K_HEADS = _head_operands("k", "k_out")
_TOKENS: Expr = ["cdiv", ["dim", "Q_ROWS"], ["dim", "Q_HEADS"]]


def _pipeline_step(
    op: Op, name: str, source: str, extra: Mapping[str, str], attrs: Mapping[str, Any]
) -> Step:
    bind = {"x": source, "weight": f"{name}_norm", "cos_sin": "cos_sin", "out": f"{name}_out", **extra}
    return Step(op, bind, {"eps": "eps", "heads": f"{name}_heads"}, attrs)


SAME_TOKENS: Any = (
    ["eq", ["cdiv", ["dim", "Q_ROWS"], ["arg", "q_heads"]], ["cdiv", ["dim", "K_ROWS"], ["arg", "k_heads"]]],
    "q and k must have the same number of tokens",
)
_QK_SHIPS = ({"rotary_dim": 128}, {"rotary_dim": 64, "gemma": True})


def _qk_norm_rope(attrs: Mapping[str, Any]) -> tuple[Step, ...]:
    return tuple(_pipeline_step(RMS_NORM_ROPE, n, n, {"positions": "positions"}, attrs) for n in ("q", "k"))


NORMS = (Tensor("q_norm", W, ("N",)), Tensor("k_norm", W, ("N",)))
ATTN_QK_NORM_ROPE = Op(
    "attn_qk_norm_rope",
    FAMILY,
    (
        _Q, NORMS[0], _K, NORMS[1], Tensor("cos_sin", F32, ("P", ["attr", "rotary_dim"])),
        Tensor("positions", I64, (_TOKENS,), layout="dense"),
        norm.EPS, _Q_HEADS, _K_HEADS, _Q_OUT, _K_OUT,
    ),
    rows="Q_ROWS",
    attrs=(rope.ROTARY, norm.GEMMA),
    constraints=(rope.WHOLE_PAIRS, SAME_TOKENS),
    is_recipe=True,
    steps=_qk_norm_rope,
    ship=tuple(Ship({"T": BF16, "W": BF16}, a) for a in _QK_SHIPS),
    doc="norm and rope of the heads of q and of k, rounded between the two",
)  # fmt: skip


def _qk_norm_rope_gate(attrs: Mapping[str, Any]) -> tuple[Step, ...]:
    query = _pipeline_step(rope.NORM_ROPE_GATE, "q", "qgate", {"gate": "gate_out"}, attrs)
    return query, _pipeline_step(rope.NORM_ROPE, "k", "k", {}, attrs)


ATTN_QK_NORM_ROPE_GATE = Op(
    "attn_qk_norm_rope_gate",
    FAMILY,
    (
        Tensor("qgate", T, ("Q_ROWS", ["mul", 2, ["dim", "N"]]), doc="[q | gate] of each head"), _K, *NORMS,
        Tensor("cos_sin", F32, (_TOKENS, ["attr", "rotary_dim"]), doc="of the step, one row per token"),
        norm.EPS, _Q_HEADS, _K_HEADS, _Q_OUT, _K_OUT, Tensor("gate_out", T, ("Q_ROWS", "N"), "out"),
    ),
    rows="Q_ROWS",
    attrs=(rope.ROTARY, norm.GEMMA),
    constraints=(rope.WHOLE_PAIRS, SAME_TOKENS),
    is_recipe=True,
    steps=_qk_norm_rope_gate,
    ship=(Ship({"T": BF16, "W": F32}, {"rotary_dim": 64, "gemma": True}),),
    doc="norm and rope of q and k in f32, rounded once; the gate is copied",
)  # fmt: skip

OPS: tuple[Op, ...] = (
    FUSED_ADD_RMS_NORM, FUSED_ADD_RMS_NORM_STD, RMS_NORM_QUANT_FP8, RMS_NORM_GATED_QUANT_FP8,
    SILU_MUL_QUANT_FP8, SILU_MUL_QUANT_FP8_GROUP,
    RMS_NORM_QUANT_FP8_TOKEN, RMS_NORM_QUANT_FP8_GROUP, *FP4_RECIPES, RMS_NORM_ROPE, ATTN_QK_NORM_ROPE,
    ATTN_QK_NORM_ROPE_GATE,
)  # fmt: skip
