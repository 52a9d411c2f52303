"""fp8 and NVFP4 quantization: hand-worked codes, special values, scales, layouts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kiln.ir.dtypes import BF16
from kiln.ir.interpret import run
from kiln.recipes.quant import SCALED_FP4_QUANT
from kiln.runtime.load import Library
from kiln.tests.recipes.conftest import Engine
from kiln.tests.recipes.literals import literal
from kiln.tests.support.numbers import BF16 as bf16_type
from kiln.tests.support.numbers import Array, bf16, bits32, codes, f32

INF, NAN = np.inf, np.nan
E4M3 = ml_dtypes.float8_e4m3fn


def _static(engine: Engine, x: Array, scale: float = 1.0) -> str:
    (out,) = engine("quant_fp8_static", {"x": x, "scale": scale})
    return codes(out)


@literal("quant/1.codes")
def test_fp8_codes(engine: Engine) -> None:
    x = f32(1, 2, 0.5, 448, 449, -1e9, 0.001, 2.0**-10, -0.0, NAN, 1.0625, 1.1875, 432, INF, -INF, 2.0**-9)
    assert _static(engine, x) == "38 40 30 7e 7e fe 01 00 80 7f 38 3a 7e 7e fe 01"


@literal("quant/2.multiply", "quant/2.divide")
def test_activations_multiply_by_the_reciprocal(engine: Engine) -> None:
    scale = float(np.array([0x4533C3C3], np.uint32).view(np.float32)[0])
    assert _static(engine, bf16(47.75), scale) == "08"
    assert codes((np.float32(47.75) / np.float32(scale)).astype(E4M3)) == "09"


@pytest.mark.parametrize("dtype", [np.float32, bf16_type])
def test_every_fp8_value_is_its_own_code(engine: Engine, dtype: Any) -> None:
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    kept = ~np.isnan(every)
    assert _static(engine, every[kept].astype(dtype).reshape(1, -1)) == codes(
        np.arange(256, dtype=np.uint8)[kept]
    )


@literal("quant/n.floor")
def test_scales_per_token(engine: Engine) -> None:
    x = f32(1, -448, 3, 0, 0, 0, NAN, 2, -1).reshape(3, 3)
    out, scales = engine("quant_fp8_per_token", {"x": x})
    assert bits32(scales) == bits32([1, 1 / (448 * 512), 2 / 448])
    assert codes(out) == "38 fe 44 00 00 00 7f 7e f6"
    _, bounded = engine("quant_fp8_per_token", {"x": x, "upper_bound": 44.8})
    assert bits32(bounded)[0] == bits32([np.float32(44.8) / np.float32(448)])[0]


@pytest.mark.parametrize("size", [64, 128])
def test_scales_per_group(engine: Engine, size: int) -> None:
    x = np.zeros((2, 2 * size), bf16_type)
    x[0, 5], x[0, size + 1], x[1, 0] = 448, -3, NAN
    out, scales = engine("quant_fp8_per_group", {"x": x}, group=size)
    assert out is not None
    assert bits32(scales) == bits32(
        [1, np.float32(3) / np.float32(448), *[np.float32(1e-10) / np.float32(448)] * 2]
    )
    assert (out[0, 5], out[0, size + 1], out[1, 0]) == (0x7E, 0xFE, 0x7F)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448, 1.0),
        (449, 2.0),
        (447, 1.0),
        (224, 0.5),
        (3, 2.0**-7),
        (np.nextafter(np.float32(448), np.float32(449)), 2.0),
    ],
)
def test_power_of_two_scales_round_up_on_the_bits(amax: float, scale: float) -> None:
    from kiln.recipes.quant import QUANT_FP8_GROUP

    x = np.zeros((1, 128), np.float32)
    x[0, 3] = amax
    _, scales = run(QUANT_FP8_GROUP, {"x": x}, attrs={"ue8m0": True})
    assert bits32(scales) == bits32([scale])


def test_power_of_two_scales(engine: Engine) -> None:
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(bf16_type)
    _, plain = engine("quant_fp8_per_group", {"x": x})
    _, rounded = engine("quant_fp8_per_group", {"x": x}, ue8m0=True)
    assert plain is not None
    assert rounded is not None
    assert (np.log2(rounded) % 1 == 0).all()
    assert ((plain <= rounded) & (rounded < 2 * plain)).all()


# -- NVFP4
# -----------------------------------------------------------------------------------------------------------


def _fp4(engine: Engine, x: Array, gsi: float = 1.0) -> tuple[str, str]:
    packed, scales = engine("scaled_fp4_quant", {"x": x, "global_scale_inv": gsi})
    return codes(packed), codes(scales)


LADDER = f32(0, 0.25, 0.26, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 6, -0.1, -0.25, -0.5, -6)


@literal("quant/5.hardware")
def test_fp4_codes(engine: Engine) -> None:
    assert _fp4(engine, LADDER) == ("00 11 22 44 66 77 88 f9", "38")


@literal("quant/5.unsigned_zero")
def test_both_rules_for_the_sign_of_zero_mean_the_same_numbers(engine: Engine) -> None:
    """The hardware keeps the sign of what rounds to zero (0x8); an encoder that drops it would write 0x0."""
    kept = bytes.fromhex(_fp4(engine, LADDER)[0].replace(" ", ""))
    dropped = bytes.fromhex("001122446677 00 f9")
    assert kept != dropped
    assert _nibbles(kept) == _nibbles(dropped)


def _nibbles(packed: bytes) -> list[float]:
    halves = np.array([n for b in packed for n in (b & 15, b >> 4)], np.uint8)
    values: list[float] = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32).tolist()
    return values


@pytest.mark.parametrize(
    ("x", "gsi", "packed", "scale"),
    [
        pytest.param([3.0] * 16, 2.0, " ".join(["77"] * 8), "38", marks=literal("quant/6.threes")),
        pytest.param(
            [100.0, *[1.0] * 15],
            448.0,
            "27 22 22 22 22 22 22 22",
            "7e",
            marks=literal("quant/6.saturated"),
        ),
        pytest.param([1e-3] * 16, 1.0, " ".join(["00"] * 8), "00", marks=literal("quant/n.underflow")),
        ([0.0] * 16, 7.0, " ".join(["00"] * 8), "00"),
        ([NAN] * 16, 1.0, " ".join(["77"] * 8), "00"),
        pytest.param([NAN, *[6.0] * 15], 1.0, " ".join(["77"] * 8), "38", marks=literal("quant/n.nan")),
        pytest.param(
            [INF, *[6.0] * 15], 1.0, "07 00 00 00 00 00 00 00", "7e", marks=literal("quant/n.infinity")
        ),
        ([-INF, *[-6.0] * 15], 1.0, "8f 88 88 88 88 88 88 88", "7e"),
    ],
)
def test_fp4_groups(engine: Engine, x: list[float], gsi: float, packed: str, scale: str) -> None:
    assert _fp4(engine, f32(*x), gsi) == (packed, scale)


def _random(rows: int, width: int) -> Array:
    rng = np.random.default_rng([rows, width])
    return (rng.standard_normal((rows, width)) * np.exp2(rng.integers(-6, 6, (rows, width)))).astype(
        bf16_type
    )


def test_dequantized_values_are_within_half_a_step(engine: Engine) -> None:
    x, gsi = _random(5, 64), 16.0
    packed, scales = engine("scaled_fp4_quant", {"x": x, "global_scale_inv": gsi})
    assert packed is not None
    assert scales is not None
    step = scales.view(E4M3).astype(np.float64) / gsi
    values = np.array(_nibbles(packed.tobytes())).reshape(5, 4, 16)
    inside = np.abs(x.astype(np.float64)).reshape(5, 4, 16) <= 6 * step[..., None]
    # Between 4 and 6 the step is 2, so half of it is 1.
    bound = (
        np.where(np.abs(values) >= 4, 1.0, np.where(np.abs(values) >= 2, 0.5, 0.25))
        * step[..., None]
        * 1.0001
    )
    error = np.abs(values * step[..., None] - x.astype(np.float64).reshape(5, 4, 16))
    assert (error <= bound)[inside].all()
    assert inside.mean() > 0.9


def _offset(m: int, k: int, columns: int) -> int:
    return (((m // 128) * (columns // 4) + k // 4) * 32 + m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4


@literal("quant/7.offsets")
@pytest.mark.parametrize(
    ("m", "k", "want"), [(0, 0, 0), (1, 4, 528), (32, 0, 4), (33, 5, 533), (127, 7, 1023), (128, 0, 1024)]
)
def test_offsets_of_swizzled_scales(m: int, k: int, want: int) -> None:
    assert _offset(m, k, 8) == want


@literal("quant/7.bijective")
def test_offsets_are_a_permutation() -> None:
    assert sorted(_offset(m, k, 8) for m in range(256) for k in range(8)) == list(range(2048))


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 48), (33, 64), (130, 80), (256, 128)])
def test_swizzled_scales_are_the_linear_ones(library: Library, rows: int, width: int) -> None:
    x = _random(rows, width)
    packed, linear = library.op("scaled_fp4_quant")(x, 3.0)
    again, swizzled = library.op("scaled_fp4_quant_swizzled")(x, 3.0)
    assert codes(packed) == codes(again)
    columns = -(-(width // 16) // 4) * 4
    flat, linear = np.asarray(swizzled).reshape(-1), np.asarray(linear)
    assert flat.size == -(-rows // 128) * 128 * columns
    places = {_offset(m, k, columns): int(linear[m, k]) for m in range(rows) for k in range(width // 16)}
    assert [places.get(i, 0) for i in range(flat.size)] == flat.tolist()
    assert sorted(flat.tolist())[-linear.size :] == sorted(linear.reshape(-1).tolist())


def test_an_f32_input_is_not_rounded_first(engine: Engine) -> None:
    x = f32(*[6.0, 1.2501, 1.2499] + [0.0] * 13)
    assert _fp4(engine, x)[0].split()[:2] == ["37", "02"]
    assert _fp4(engine, x.astype(bf16_type))[0].split()[:2] == ["27", "02"]


def test_upstream_approximate_reciprocals_stay_within_one_code() -> None:
    """The envelope against kernels that use approximate reciprocals: one code of the scale, one step of a
    nibble.
    """
    x = _random(64, 256)
    packed, scales = run(SCALED_FP4_QUANT, {"x": x, "global_scale_inv": 16.0})
    ideal_packed, ideal_scales = run(SCALED_FP4_QUANT, {"x": x, "global_scale_inv": 16.0}, ideal=True)
    assert packed is not None
    assert ideal_packed is not None
    assert scales is not None
    assert ideal_scales is not None
    assert np.abs(scales.astype(int) - ideal_scales.astype(int)).max() <= 1
    assert np.mean(packed != ideal_packed) <= 0.01


def test_a_bf16_input_and_its_f32_values_give_the_same_codes(engine: Engine) -> None:
    x = _random(3, 64)
    assert _fp4(engine, x, 5.0) == _fp4(engine, x.astype(np.float32), 5.0)
    assert _static(engine, x, 0.3) == _static(engine, x.astype(np.float32), 0.3)


@literal("quant/4.bf16", "quant/4.fp8")
def test_norm_then_static_fp8(engine: Engine) -> None:
    arrays = {"x": bf16(3, 4), "weight": bf16(1, 2)[0], "eps": 0.0}
    (normed,) = engine("rms_norm", arrays, dtypes={"O": BF16})
    assert normed is not None
    assert normed.astype(np.float32).tolist() == [[0.84765625, 2.265625]]
    assert _static(engine, normed, 0.01) == "6b 76"
    out, residual, *_ = engine("rms_norm_quant_fp8", {**arrays, "scale": 0.01}, gemma=False)
    assert (codes(out), residual) == ("6b 76", None)
