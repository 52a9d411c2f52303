"""Activation quantization to fp8 and NVFP4 (KERNEL-EW-NORM-QUANT): what each op means. No target is named
in this file.

Activations multiply by the f32 reciprocal of the scale (a KV cache divides: the codes differ on ties).
amax ignores NaN; NaN becomes 0x7f.
"""

from kiln.ir.dtypes import BF16, F16, F32, U8
from kiln.ir.language import (
    Value,
    absolute,
    from_e4m3,
    group,
    group_max,
    max_number,
    min_number,
    pack_e2m1,
    row_max,
    select,
    spread,
    to_e4m3,
    ungroup,
)  # fmt: skip
from kiln.ir.spec import ANY, Attr, DTypeVar, Expr, Op, Scalar, Ship, Tensor

FAMILY = "KERNEL-EW-NORM-QUANT"
T = DTypeVar("T", (BF16, F16, F32))
FP8_MAX = 448.0
TOKEN_FLOOR = 1.0 / (448.0 * 512.0)
GROUP_FLOOR = 1e-10
SIXTH = 0.16666667163372040
"""1/6 rounded to f32: the reciprocal of e2m1's largest value."""
SCALE = Scalar("scale", F32, minimum=0.0, positive=True, doc="per tensor; codes hold x / scale")
GLOBAL_SCALE_INV = Scalar(
    "global_scale_inv", F32, minimum=0.0, positive=True, doc="448 * 6 / amax of the calibration"
)
UPPER_BOUND = Scalar(
    "upper_bound",
    F32,
    default=3.4028234663852886e38,
    minimum=0.0,
    positive=True,
    doc="largest amax a scale is made for",
)
GROUP = Attr("group", (64, 128), 128, "neighbours that share a scale")
UE8M0 = Attr("ue8m0", (False, True), False, "round the scale up to a power of two")
PACKED: Expr = ["floordiv", ["dim", "N"], 2]
GROUPS16: Expr = ["floordiv", ["dim", "N"], 16]
GROUPS: Expr = ["floordiv", ["dim", "N"], ["attr", "group"]]
BY16 = (["divisible", ["dim", "N"], 16], "N must be a multiple of 16")
BY_GROUP = (["eq", ["mod", ["dim", "N"], ["attr", "group"]], 0], "N must be a multiple of the group")
EACH = (Ship({"T": BF16}), Ship({"T": F32}, rare=True))


def quantize_fp8(x: Value, scale: Value) -> Value:
    """e4m3 codes of x times the reciprocal of the scale."""
    return to_e4m3(x.to(F32) * (1.0 / scale))


QUANT_FP8_STATIC = Op(
    "quant_fp8_static",
    FAMILY,
    (Tensor("x", T, ("M", "N")), SCALE, Tensor("out", U8, ("M", "N"), "out")),
    body=quantize_fp8,
    ship=EACH,
    doc="one scale per tensor, given",
)


def _quant_fp8_token(x: Value, upper_bound: Value) -> tuple[Value, Value]:
    amax = row_max(absolute(x.to(F32)))
    scale = max_number(min_number(max_number(amax, 0.0), upper_bound) / FP8_MAX, TOKEN_FLOOR)
    return quantize_fp8(x, scale), scale


QUANT_FP8_TOKEN = Op(
    "quant_fp8_per_token",
    FAMILY,
    (
        Tensor("x", T, ("M", "N")),
        UPPER_BOUND,
        Tensor("out", U8, ("M", "N"), "out"),
        Tensor("scales", F32, ("M",), "out", "dense"),
    ),
    body=_quant_fp8_token,
    ship=(Ship({"T": BF16}, widths=(5120, 7168, ANY)), Ship({"T": F32}, rare=True)),
    doc="one scale per row: max(min(amax, upper_bound) / 448, 1 / (448 * 512))",
)


def _quant_fp8_group(x: Value, group: int, ue8m0: bool) -> tuple[Value, Value]:
    return quantize_groups(x, group, ue8m0)


def quantize_groups(x: Value, size: int, ue8m0: bool) -> tuple[Value, Value]:
    """Codes and one f32 scale per `size` neighbours: max(amax, 1e-10) / 448, optionally rounded up to a
    power of two on its bit pattern.
    """
    groups = group(x.to(F32), size)
    scale = max_number(group_max(absolute(groups)), GROUP_FLOOR) / FP8_MAX
    if ue8m0:
        scale = ((scale.bits() + 0x7FFFFF) & 0x7F800000).as_f32()
    return ungroup(to_e4m3(groups * spread(1.0 / scale, size))), scale


GROUP_SCALES = Tensor("scales", F32, ("M", GROUPS), "out", "strided", doc="row-major or column-major")
QUANT_FP8_GROUP = Op(
    "quant_fp8_per_group",
    FAMILY,
    (Tensor("x", T, ("M", "N")), Tensor("out", U8, ("M", "N"), "out"), GROUP_SCALES),
    attrs=(GROUP, UE8M0),
    constraints=(BY_GROUP,),
    body=_quant_fp8_group,
    ship=(
        Ship({"T": BF16}),
        Ship({"T": BF16}, {"group": 64}),
        Ship({"T": BF16}, {"ue8m0": True}),
        Ship({"T": F32}, rare=True),
    ),
    doc="one scale per 64 or 128 neighbours",
)


def quantize_fp4(x: Value, global_scale_inv: Value) -> tuple[Value, Value]:
    """Packed e2m1 pairs (low nibble first) and one e4m3 scale per 16 neighbours."""
    groups = group(x.to(F32), 16)
    amax = max_number(group_max(absolute(groups)), 0.0)
    scale = to_e4m3(global_scale_inv * (amax * SIXTH))
    step = from_e4m3(scale) * (1.0 / global_scale_inv)
    inverse = select(step > 0.0, 1.0 / step, 0.0)
    return pack_e2m1(ungroup(groups * spread(inverse, 16))), scale


def fp4_outputs(swizzled: bool) -> tuple[Tensor, Tensor]:
    """The two outputs of an NVFP4 quantization: packed codes, and scales (M, N/16) or padded 128x4 blocks."""
    if swizzled:
        shape: tuple[Expr | str, ...] = (["roundup", ["dim", "M"], 128], ["roundup", GROUPS16, 4])
        return Tensor("packed", U8, ("M", PACKED), "out"), Tensor("scales", U8, shape, "out", "nvfp4_128x4")
    return Tensor("packed", U8, ("M", PACKED), "out"), Tensor("scales", U8, ("M", GROUPS16), "out")


def suffix(swizzled: bool) -> str:
    """Ending of an op's name for the swizzled scale layout."""
    return "_swizzled" if swizzled else ""


def _fp4_op(swizzled: bool) -> Op:
    return Op(
        "scaled_fp4_quant" + suffix(swizzled),
        FAMILY,
        (Tensor("x", T, ("M", "N")), GLOBAL_SCALE_INV, *fp4_outputs(swizzled)),
        constraints=(BY16,),
        body=quantize_fp4,
        ship=EACH,
        doc="NVFP4: e2m1 pairs with one e4m3 scale per 16 and a global scale",
    )


SCALED_FP4_QUANT, SCALED_FP4_QUANT_SWIZZLED = (_fp4_op(s) for s in (False, True))

OPS: tuple[Op, ...] = (
    QUANT_FP8_STATIC,
    QUANT_FP8_TOKEN,
    QUANT_FP8_GROUP,
    SCALED_FP4_QUANT,
    SCALED_FP4_QUANT_SWIZZLED,
)
