"""Normalizations: hand-worked literals, special values, and what every order and rounding must satisfy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kiln.ir.dtypes import BF16, F32
from kiln.ir.interpret import pair_sum, run
from kiln.recipes.norm import LAYER_NORM, RMS_NORM, RMS_NORM_GATED
from kiln.tests.recipes.conftest import Engine
from kiln.tests.recipes.literals import literal
from kiln.tests.support.numbers import BF16 as bf16_type
from kiln.tests.support.numbers import Array, bf16, bits32, codes, f32, lcg_row, single


def _rms(engine: Engine, x: Array, weight: Array | None, eps: float = 1e-6, **attrs: Any) -> Array:
    dtype = F32 if x.dtype == np.float32 else BF16
    arrays = {"x": x, "eps": eps} | ({} if weight is None else {"weight": weight})
    (out,) = engine("rms_norm", arrays, dtypes={"O": dtype}, **attrs)
    assert out is not None
    return out


@literal("act/1.f32", "act/1.eps")
def test_rms_norm_in_f32(engine: Engine) -> None:
    got = _rms(engine, f32(3, 4), single([1, 2]), eps=0.0)
    assert bits32(got) == bits32([0.84852815, 2.2627418])
    assert bits32(_rms(engine, f32(3, 4), single([1, 2]))) == bits32([0.8485281, 2.2627416])


@literal("act/1.bf16")
def test_rms_norm_in_bf16(engine: Engine) -> None:
    assert codes(_rms(engine, bf16(3, 4), bf16(1, 2)[0], eps=0.0)) == "3f59 4011"


@literal("act/1.gemma")
def test_gemma_adds_one_to_the_weight_in_f32(engine: Engine) -> None:
    assert codes(_rms(engine, bf16(3, 4), bf16(0, 1)[0], eps=0.0, gemma=True)) == "3f59 4011"
    # 1 + 2**-9 is no bf16: adding in bf16 would lose the weight.
    small = _rms(engine, bf16(1, 1, 1, 1.0078125), bf16(*[2.0**-9] * 4)[0], eps=0.0, gemma=True)
    plain = _rms(engine, bf16(1, 1, 1, 1.0078125), bf16(*[0.0] * 4)[0], eps=0.0, gemma=True)
    assert codes(small) != codes(plain)


@literal("act/3.one_rounding")
def test_the_weight_is_multiplied_before_the_only_rounding(engine: Engine) -> None:
    got = _rms(engine, bf16(3, 7, 6, 1), bf16(1, 2.125, 1.375, 0.125)[0], eps=0.0)
    assert codes(got) == "3f1e 4043 3fd9 3cd2"


@literal("act/3.early_rounding")
def test_rounding_before_the_weight_would_differ() -> None:
    x, weight = bf16(3, 7, 6, 1).astype(np.float32), single([1, 2.125, 1.375, 0.125])
    inverse = np.float32(1) / np.sqrt(np.float32((x * x).sum() / 4))
    early = ((x * inverse).astype(bf16_type).astype(np.float32) * weight).astype(bf16_type)
    assert codes(early).split()[1] == "4044"


@pytest.mark.parametrize(
    ("values", "want"),
    [
        pytest.param([3, 4], 25, marks=literal("act/1.sum")),
        pytest.param([256, 0.75, -1, 1], 65538.56, marks=literal("act/2.sum")),
        pytest.param([1.25, -1, 2, 4.5], 26.8125, marks=literal("fusion/1.sum")),
    ],
)
def test_sums_of_squares(values: list[float], want: float) -> None:
    assert bits32(pair_sum(single(values) ** 2)) == bits32([want])


@literal("act/1.inverse")
def test_the_inverse_is_a_rounded_root_then_a_rounded_quotient(engine: Engine) -> None:
    (inverse,) = single([0.28284273])
    assert np.float32(1) / np.sqrt(np.float32(25) / np.float32(2)) == inverse
    got = _rms(engine, f32(3, 4), single([1, 1]), eps=0.0)
    assert bits32(got) == bits32(single([3, 4]) * inverse)


@pytest.mark.parametrize(
    ("seed", "width", "inverse"),
    [
        pytest.param(165, 2048, "3f114be0", marks=literal("act/4.2048.norm")),
        pytest.param(1, 1000, "3f12bcc0", marks=literal("act/4.1000.norm")),
        pytest.param(5, 5120, "3f13bfbe", marks=literal("act/4.5120.norm")),
    ],
)
def test_sums_have_the_order_of_pairs(engine: Engine, seed: int, width: int, inverse: str) -> None:
    x = lcg_row(seed, width).astype(np.float32)
    factor = np.array([int(inverse, 16)], np.uint32).view(np.float32)[0]
    assert (_rms(engine, x, np.ones(width, np.float32)) == x * factor).all()


@literal("act/2.residual", "act/2.bf16")
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_the_residual_is_rounded_before_it_is_squared(engine: Engine, eps: float) -> None:
    arrays = {
        "x": bf16(1, 0.5, -2, 4),
        "residual": bf16(256, 0.25, 1, -3),
        "weight": bf16(1, 1, 1, 1)[0],
        "eps": eps,
    }
    out, residual = engine("fused_add_rms_norm_std", arrays)
    assert residual is not None
    assert residual.astype(np.float32).tolist() == [[256, 0.75, -1, 1]]
    assert codes(out) == "4000 3bc0 bc00 3c00"


@literal("act/2.unrounded")
def test_squaring_the_unrounded_sum_would_differ() -> None:
    v = single([257, 0.75, -1, 1])
    inverse = np.float32(1) / np.sqrt(np.float32((v * v).sum() / 4))
    assert codes((v * inverse).astype(bf16_type)) == "4000 3bbf bbff 3bff"


def test_rms_norm_without_a_weight(engine: Engine) -> None:
    assert codes(_rms(engine, bf16(3, 4), None, eps=0.0)) == codes(
        _rms(engine, bf16(3, 4), bf16(1, 1)[0], eps=0.0)
    )


@literal("act/5.layer_norm")
def test_layer_norm(engine: Engine) -> None:
    (out,) = engine("layer_norm", {"x": f32(1, 2, 3, 4), "eps": 1e-5}, dtypes={"O": F32})
    assert bits32(out) == bits32([-1.3416355, -0.44721183, 0.44721183, 1.3416355])


def test_layer_norm_with_weight_and_bias(engine: Engine) -> None:
    arrays = {"x": f32(1, 2, 3, 4), "weight": single([2, 2, 2, 2]), "bias": single([1, 1, 1, 1]), "eps": 1e-5}
    (out,) = engine("layer_norm", arrays, dtypes={"O": F32})
    assert bits32(out) == bits32(
        single([-1.3416355, -0.44721183, 0.44721183, 1.3416355]) * np.float32(2) + np.float32(1)
    )


@literal("act/7.silu")
def test_gated_norm(engine: Engine) -> None:
    arrays = {"x": f32(3, 4), "weight": single([1, 2]), "gate": f32(0, 1), "eps": 0.0}
    (out,) = engine("rms_norm_gated", arrays, dtypes={"O": F32})
    assert bits32(out) == bits32([0, 1.6541969])


@literal("act/7.sigmoid")
def test_gated_norm_by_sigmoid() -> None:
    arrays = {"x": f32(3, 4), "weight": single([1, 2]), "gate": f32(0, 1), "eps": 0.0}
    (out,) = run(RMS_NORM_GATED, arrays, attrs={"activation": "sigmoid"}, dtypes={"O": F32})
    assert bits32(out) == bits32([0.42426407, 1.6541969])


@literal("bf16_out/1.silu", "bf16_out/1.sigmoid")
def test_a_gate_of_zero_halves_by_sigmoid_and_silences_by_silu() -> None:
    arrays = {"x": f32(3, 4), "weight": single([1, 1]), "gate": f32(0, 0), "eps": 0.0}
    (silu,) = run(RMS_NORM_GATED, arrays, dtypes={"O": F32})
    (sigmoid,) = run(RMS_NORM_GATED, arrays, attrs={"activation": "sigmoid"}, dtypes={"O": F32})
    assert silu is not None
    assert sigmoid is not None
    assert silu.tolist() == [[0, 0]]
    np.testing.assert_allclose(sigmoid, [[0.424264069, 0.565685425]], rtol=1e-7)


GATED: dict[str, Any] = {
    "x": f32(1, 2, 3, 4), "gate": f32(1, 1, 2, 2), "weight": single([1] * 4), "eps": 1e-5,
}  # fmt: skip


@literal("bf16_out/2.before")
def test_the_norm_comes_before_the_gate(engine: Engine) -> None:
    (got,) = engine("rms_norm_gated", GATED, dtypes={"O": F32})
    assert got is not None
    np.testing.assert_allclose(got[0], [0.266944672, 0.533889343, 1.929728426, 2.572971235], rtol=3e-7)


@literal("bf16_out/2.after")
def test_a_gate_before_the_norm_would_differ() -> None:
    x, z = (np.float64(GATED[n]) for n in ("x", "gate"))
    gated = x * z / (1 + np.exp(-z))
    after = gated / np.sqrt((gated * gated).mean() + 1e-5)
    np.testing.assert_allclose(after[0], [0.163212177, 0.326424353, 1.179851896, 1.573135861], rtol=1e-8)


def test_l2_norm_divides_by_the_sum(engine: Engine) -> None:
    (out,) = engine("l2_norm", {"x": f32(3, 4), "eps": 0.0})
    assert bits32(out) == bits32([0.6, 0.8])
    (out,) = engine("l2_norm", {"x": f32(3, 4), "eps": 75.0})
    assert bits32(out) == bits32([0.3, 0.4])


def test_softmax(engine: Engine) -> None:
    (out,) = engine("softmax", {"x": f32(1, 1, -200, 1, 1)})
    assert bits32(out) == bits32([0.25, 0.25, 0, 0.25, 0.25])
    (out,) = engine("softmax", {"x": f32(np.log(3), 0.0)})
    assert out is not None
    assert np.allclose(out, [[0.75, 0.25]], rtol=3e-7)


INF, NAN = np.inf, np.nan


@literal("act/n.special_rows")
def test_rows_with_special_values(engine: Engine) -> None:
    """NaN makes the row NaN; an infinity makes finite entries 0 and itself NaN; a row of zeros stays 0."""
    x = single([[1, NAN, 2], [1, INF, -2], [0, 0, 0], [1, 2, 3]])
    got = _rms(engine, x, np.ones(3, np.float32))
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, 1])
    assert got[1, [0, 2]].tolist() == [0, 0]
    assert got[2].tolist() == [0, 0, 0]
    assert np.isfinite(got[3]).all()


@literal("act/n.zero_row")
def test_the_inverse_of_a_row_of_zeros() -> None:
    assert bits32(np.float32(1) / np.sqrt(np.float32(1e-6))) == bits32([999.99994])


def test_softmax_of_special_rows(engine: Engine) -> None:
    x = single([[0, NAN], [-INF, -INF], [-INF, 0], [INF, 0]])
    (out,) = engine("softmax", {"x": x})
    assert out is not None
    assert np.isnan(out[0]).all()
    assert np.isnan(out[1]).all()
    assert out[2].tolist() == [0, 1]
    assert np.isnan(out[3, 0])


# -- properties
# ------------------------------------------------------------------------------------------------------


def _random(rows: int, width: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(dtype)


@pytest.mark.parametrize("width", [1, 7, 127, 128, 129, 768, 769, 2048, 5120])
def test_without_eps_a_power_of_two_changes_nothing(engine: Engine, width: int) -> None:
    x, weight = _random(3, width), _random(1, width, seed=1)[0]
    base = _rms(engine, x, weight, eps=0.0)
    for exponent in (-20, 3, 30):
        assert bits32(_rms(engine, x * np.float32(2.0**exponent), weight, eps=0.0)) == bits32(base)


@pytest.mark.parametrize("width", [7, 129, 2048])
def test_rows_do_not_depend_on_their_neighbours(engine: Engine, width: int) -> None:
    x, weight = _random(83, width, bf16_type), np.ones(width, bf16_type)
    whole = _rms(engine, x, weight)
    assert codes(_rms(engine, x[41:42], weight)) == codes(whole[41:42])
    assert codes(_rms(engine, x[7:50], weight)) == codes(whole[7:50])
    assert codes(_rms(engine, x, weight)) == codes(whole)


@pytest.mark.parametrize("width", [5, pytest.param(128, marks=literal("bf16_out/6.strided")), 130])
def test_strided_operands_give_the_same_bits(engine: Engine, width: int) -> None:
    merged = _random(6, 3 * width + 1, bf16_type)
    x, gate = merged[:, :width], merged[:, width + 1 : 2 * width + 1]
    weight = _random(1, width, bf16_type, seed=2)[0]
    arrays = {"x": x, "gate": gate, "weight": weight}
    (strided,) = engine("rms_norm_gated", arrays, dtypes={"O": BF16})
    arrays |= {"x": np.ascontiguousarray(x), "gate": np.ascontiguousarray(gate)}
    (contiguous,) = engine("rms_norm_gated", arrays, dtypes={"O": BF16})
    assert codes(strided) == codes(contiguous)


@pytest.mark.parametrize("width", [8, 768, 769, 5120, 5125])
def test_close_to_float64(width: int) -> None:
    x, weight = _random(4, width), _random(1, width, seed=3)[0]
    for op in (RMS_NORM, LAYER_NORM):
        arrays = {"x": x, "weight": weight} | ({"bias": weight} if op is LAYER_NORM else {})
        (exact,), (ideal,) = (run(op, arrays, dtypes={"O": F32}, ideal=i) for i in (False, True))
        assert exact is not None
        assert ideal is not None
        assert np.linalg.norm(exact - ideal) <= 2e-7 * np.linalg.norm(ideal)


def test_leading_dimensions_are_rows(engine: Engine) -> None:
    x, weight = _random(6, 16, bf16_type), np.ones(16, bf16_type)
    flat = _rms(engine, x, weight)
    assert codes(_rms(engine, x.reshape(2, 3, 16), weight)) == codes(flat)
