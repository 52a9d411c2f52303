"""Rotary position embedding (KERNEL-ROPE-QKNORM): what it means. No target is named in this file.

Products are rounded separately, then added once: no fused multiply-add. cos and sin come from a cache;
nothing computes an angle.
"""

from typing import Any

from kiln.ir.dtypes import BF16, F16, F32, I32, I64
from kiln.ir.language import (
    Value,
    columns,
    divide,
    halves,
    permute,
    row_number,
    select,
    take_columns,
    take_element,
)
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Ship, Tensor
from kiln.recipes.norm import EPS, inverse_rms, scaled

FAMILY = "KERNEL-ROPE-QKNORM"
T = DTypeVar("T", (BF16, F16, F32))
W = DTypeVar("W", (BF16, F16, F32))
C = DTypeVar("C", (F32, BF16, F16))
I = DTypeVar("I", (I32, I64))  # noqa: E741  the index type
ROTARY = Attr(
    "rotary_dim",
    (2, 4, 8, 16, 32, 64, 80, 96, 128, 192, 256),
    128,
    "leading columns of a head that are rotated",
)
NEOX = Attr("neox", (True, False), True, "pairs (i, i + rotary_dim / 2); False: pairs (2i, 2i + 1)")
GEMMA = Attr("gemma", (False, True), False, "scale by 1 + weight")
WHOLE_PAIRS: Any = (
    ["ge", ["dim", "N"], ["attr", "rotary_dim"]],
    "rotary_dim must not exceed the head dimension",
)
HEADS = Scalar("heads", I32, minimum=1, doc="rows of one token: row r belongs to token r / heads")
TOKENS: Any = ["cdiv", ["dim", "M"], ["dim", "HEADS"]]
POSITIONS = Tensor("positions", I, (TOKENS,), layout="dense", doc="position of each token, inside the cache")
CACHE = Tensor(
    "cos_sin", C, ("P", ["attr", "rotary_dim"]), doc="row p: cos of the rotary_dim / 2 angles, then sin"
)


def rotated(x: Value, cos_sin: Value, row: Value, rotary_dim: int, neox: bool) -> Value:
    """Rotate the pairs of an f32 row by the angles of row `row` of the cache; columns from rotary_dim on
    stay.
    """
    column, half = columns(x), rotary_dim // 2
    if neox:
        first = column < half
        pair = select(first, column, column - half)
        partner = select(first, column + half, column - half)
    else:
        odd = column & 1
        first, pair, partner = odd < 1, column >> 1, column + 1 - (odd << 1)
    inside = column < rotary_dim
    pair, partner = select(inside, pair, 0), select(inside, partner, column)
    cos = take_columns(cos_sin, row, pair).to(F32)
    sin = take_columns(cos_sin, row, pair + half).to(F32)
    other = permute(x, partner) * sin
    return select(inside, x * cos + select(first, -other, other), x)


def token_of(x: Value, heads: Value) -> Value:
    """The token that this row is a head of."""
    return divide(row_number(x), heads)


def _rope(x: Value, positions: Value, cos_sin: Value, heads: Value, rotary_dim: int, neox: bool) -> Value:
    position = take_element(positions, token_of(x, heads)).to(I32)
    return rotated(x.to(F32), cos_sin, position, rotary_dim, neox)


ROPE = Op(
    "rope",
    FAMILY,
    (Tensor("x", T, ("M", "N")), POSITIONS, CACHE, HEADS, Tensor("out", T, ("M", "N"), "out")),
    attrs=(ROTARY, NEOX),
    constraints=(
        (["ge", ["dim", "N"], ["attr", "rotary_dim"]], "rotary_dim must not exceed the head dimension"),
    ),
    body=_rope,
    ship=(
        Ship({"T": BF16, "C": F32, "I": I64}, widths=(128,)),
        Ship({"T": BF16, "C": F32, "I": I64}, {"rotary_dim": 64}, widths=(256,)),
    ),
    doc="rotate the first rotary_dim columns of each head by its token's position",
)


def _norm_rope_f32(
    x: Value, weight: Value, cos_sin: Value, eps: Value, heads: Value, rotary_dim: int, gemma: bool
) -> Value:
    v = x.to(F32)
    normed = scaled(v * inverse_rms(v, eps), weight, gemma)
    return rotated(normed, cos_sin, token_of(x, heads), rotary_dim, neox=True)


ROW_PER_TOKEN: Any = (
    ["ge", ["dim", "STEPS"], ["cdiv", ["dim", "M"], ["arg", "heads"]]],
    "cos_sin must have a row for every token",
)
STEP_CACHE = Tensor("cos_sin", C, ("STEPS", ["attr", "rotary_dim"]), doc="one row per token: cos, then sin")
NORM_ROPE = Op(
    "head_norm_rope",
    FAMILY,
    (
        Tensor("x", T, ("M", "N")),
        Tensor("weight", W, ("N",)),
        STEP_CACHE,
        EPS,
        HEADS,
        Tensor("out", T, ("M", "N"), "out"),
    ),
    attrs=(ROTARY, GEMMA),
    constraints=(WHOLE_PAIRS, ROW_PER_TOKEN),
    body=_norm_rope_f32,
    ship=(Ship({"T": BF16, "W": F32, "C": F32}, {"rotary_dim": 64, "gemma": True}, widths=(256,)),),
    doc="norm of each head, rotated in f32 and rounded once (cos and sin of the step, one row per token)",
)


def _norm_rope_gate(
    x: Value, weight: Value, cos_sin: Value, eps: Value, heads: Value, rotary_dim: int, gemma: bool
) -> tuple[Value, Value]:
    query, gate = halves(x)
    return _norm_rope_f32(query, weight, cos_sin, eps, heads, rotary_dim, gemma), gate


NORM_ROPE_GATE = Op(
    "head_norm_rope_gate",
    FAMILY,
    (
        Tensor("x", T, ("M", ["mul", 2, ["dim", "N"]])), Tensor("weight", W, ("N",)), STEP_CACHE, EPS, HEADS,
        Tensor("out", T, ("M", "N"), "out"), Tensor("gate", T, ("M", "N"), "out"),
    ),
    attrs=(ROTARY, GEMMA),
    constraints=(WHOLE_PAIRS, ROW_PER_TOKEN),
    body=_norm_rope_gate,
    ship=(Ship({"T": BF16, "W": F32, "C": F32}, {"rotary_dim": 64, "gemma": True}, widths=(256,)),),
    doc="head_norm_rope of the first half of each [q | gate] head, the gate copied bit for bit",
)  # fmt: skip

OPS: tuple[Op, ...] = (ROPE, NORM_ROPE, NORM_ROPE_GATE)
