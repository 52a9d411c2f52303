"""Scaled products of 8-bit codes: hand-worked numbers, properties and refusals, on the oracle, on the sum in
order and on this CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.ir.diagnostics import DeclarationError
from kiln.recipes import gemm_fp8
from kiln.recipes.gemm_fp8 import OPS, merged_alpha
from kiln.runtime.errors import ContractError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.recipes.conftest import Engine
from kiln.tests.recipes.literals import literal
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]
Run: TypeAlias = Callable[..., Array]
"""(op, operands by name, output type) to out."""

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
WEIGHT = np.array([[1, 1], [2, -1], [4, 0.5]], E4M3)
X = np.array([[1, 2]], E4M3)
IN_ORDER: dict[str, Callable[..., Array]] = {
    "scaled_matmul_bt": gemm_fp8.scaled_in_order,
    "scaled_matmul_bt_alpha": gemm_fp8.alpha_in_order,
    "scaled_matmul_bt_block": gemm_fp8.block_in_order,
    "scaled_matmul_bt_int8": gemm_fp8.int8_in_order,
}


def f32(*values: Any) -> Array:
    """A vector of f32."""
    return np.array(values, np.float32)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """The ops of the family for the best ISA tier of this machine."""
    out: Path = tmp_path_factory.mktemp("scaled") / "tree"
    build_from(out, [cpu_target()], [op.name for op in OPS], [CpuBackend()])
    with load(out, "cpu") as library:
        yield library


def _oracle(op: str, operands: dict[str, Any], dtype: Any = np.float32) -> Array:
    reference = next(o.reference for o in OPS if o.name == op)
    assert reference is not None
    rounded: Array = reference(**operands)[0].astype(dtype)
    return rounded


def _in_order(op: str, operands: dict[str, Any], dtype: Any = np.float32) -> Array:
    names = [t.name for o in OPS if o.name == op for t in o.inputs]
    return IN_ORDER[op](*(operands.get(n) for n in names), dtype)


@pytest.fixture(params=["oracle", "in_order", "cpu"])
def run(request: pytest.FixtureRequest) -> Run:
    """Each way to multiply in turn."""
    if request.param != "cpu":
        return _oracle if request.param == "oracle" else _in_order
    library: Library = request.getfixturevalue("products")

    def call(op: str, operands: dict[str, Any], dtype: Any = np.float32) -> Array:
        """Into poisoned memory."""
        out = np.full((len(operands["x"]), len(operands["weight"])), 99, dtype)
        return np.asarray(library.op(op)(**operands, out=out))

    return call


def codes(rng: np.random.Generator, *shape: int) -> Array:
    """Normal e4m3 codes."""
    return rng.standard_normal(shape).astype(E4M3)


def block_operands(m: int, n: int, k: int, seed: int = 0) -> dict[str, Any]:
    """Operands of the block-scaled product."""
    rng = np.random.default_rng(seed)
    groups = -(-k // 128)
    scales = (rng.random((m, groups)) + 0.5, rng.random((-(-n // 128), groups)) + 0.5)
    x_scale, weight_scale = (s.astype(np.float32) for s in scales)
    return {
        "x": codes(rng, m, k), "weight": codes(rng, n, k), "x_scale": x_scale, "weight_scale": weight_scale,
    }  # fmt: skip


@literal("gemm_fp8/1.acc")
def test_scales_of_one(run: Run) -> None:
    scales = {"x_scale": f32(1), "weight_scale": f32(1)}
    assert run("scaled_matmul_bt", {"x": X, "weight": WEIGHT, **scales}).tolist() == [[3, 0, 5]]


@literal("gemm_fp8/1.alpha")
def test_a_factor_for_each_output_feature(run: Run) -> None:
    operands = {"x": X, "weight": WEIGHT, "alpha": f32(0.5, 0.25, 2)}
    assert run("scaled_matmul_bt_alpha", operands).tolist() == [[1.5, 0, 10]]
    assert run("scaled_matmul_bt_alpha", operands, BF16).astype(np.float32).tolist() == [[1.5, 0, 10]]


@literal("gemm_fp8/1.scalar")
def test_one_alpha_for_a_merged_weight_is_refused_and_another_result(run: Run, products: Library) -> None:
    with pytest.raises(ContractError, match="alpha"):
        products.op("scaled_matmul_bt_alpha")(x=X, weight=WEIGHT, alpha=f32(0.5), out=np.zeros((1, 3), BF16))
    one = {"x": X, "weight": WEIGHT, "x_scale": f32(1), "weight_scale": f32(0.5)}
    assert run("scaled_matmul_bt", one).tolist() != [[1.5, 0, 10]]


@pytest.mark.parametrize(
    ("x", "scale", "multiplied", "divided"),
    [
        pytest.param(22.5, 0.9, 26.0, 24.0, marks=literal("gemm_fp8/2.0.9")),
        pytest.param(10.849999, 0.7, 16.0, 15.0, marks=literal("gemm_fp8/2.0.7")),
        pytest.param(-21.699999, 0.7, -32.0, -30.0, marks=literal("gemm_fp8/2.0.7_negative")),
        pytest.param(0.00439453125, 0.3, 0.015625, 0.013671875, marks=literal("gemm_fp8/2.0.3")),
    ],
)
def test_static_quantization_multiplies_by_the_reciprocal(
    engine: Engine, x: float, scale: float, multiplied: float, divided: float
) -> None:
    dtype = BF16 if x < 1 and x > 0 else np.float32
    given = np.full((1, 16), x, dtype)
    (got,) = engine("quant_fp8_static", {"x": given, "scale": scale})
    assert got is not None
    assert got.view(E4M3).astype(np.float32).tolist() == [[multiplied] * 16]
    quotient = np.float32(given[0, 0]) / np.float32(scale)
    assert float(quotient.astype(E4M3)) == divided


@pytest.mark.parametrize(
    ("x", "value", "code"),
    [
        pytest.param(448.0, 448.0, 0x7E, marks=literal("gemm_fp8/3.largest")),
        pytest.param(464.0, 448.0, 0x7E, marks=literal("gemm_fp8/3.to_largest")),
        pytest.param(1e9, 448.0, 0x7E, marks=literal("gemm_fp8/3.clamped")),
        (-1e9, -448.0, 0xFE),
        pytest.param(np.nan, np.nan, 0x7F, marks=literal("gemm_fp8/3.nan")),
        pytest.param(17.0, 16.0, 0x58, marks=literal("gemm_fp8/3.17")),
        pytest.param(19.0, 20.0, 0x5A, marks=literal("gemm_fp8/3.19")),
        pytest.param(9.5, 10.0, 0x52, marks=literal("gemm_fp8/3.ties")),
        (10.5, 10.0, 0x52),
        pytest.param(2.0**-10, 0.0, 0x00, marks=literal("gemm_fp8/3.zero")),
        pytest.param(0.001, 2.0**-9, 0x01, marks=literal("gemm_fp8/3.least")),
    ],
)
def test_codes_of_quantization_and_what_the_product_makes_of_them(
    engine: Engine, run: Run, x: float, value: float, code: int
) -> None:
    (got,) = engine("quant_fp8_static", {"x": np.full((1, 16), x, np.float32), "scale": 1.0})
    assert got is not None
    assert got.tolist() == [[code] * 16]
    one = np.ones((1, 1), E4M3)
    operands = {"x": got[:, :1].view(E4M3), "weight": one, "x_scale": f32(1), "weight_scale": f32(1)}
    np.testing.assert_array_equal(run("scaled_matmul_bt", operands), [[value]])


@literal("gemm_fp8/4.zero_row")
def test_a_row_of_zeros_has_the_least_scale_and_gives_zeros(engine: Engine, run: Run) -> None:
    got, scales = engine("quant_fp8_per_token", {"x": np.zeros((1, 16), np.float32)})
    assert got is not None
    assert scales is not None
    assert not got.any()
    assert scales.tolist() == [float(np.float32(4.359654e-06))]
    weight = np.ones((2, 16), E4M3)
    operands = {"x": got.view(E4M3), "weight": weight, "x_scale": scales, "weight_scale": f32(1)}
    assert run("scaled_matmul_bt", operands).tolist() == [[0, 0]]


@literal("gemm_fp8/4.block")
def test_each_block_of_128_has_its_scales(run: Run) -> None:
    operands = {
        "x": np.ones((1, 256), E4M3), "weight": np.ones((1, 256), E4M3),
        "x_scale": np.array([[2, 0.5]], np.float32), "weight_scale": np.array([[3, 4]], np.float32),
    }  # fmt: skip
    assert run("scaled_matmul_bt_block", operands).tolist() == [[1024]]


@literal("gemm_fp8/5.azp")
def test_the_zero_point_is_taken_out(run: Run) -> None:
    operands = {
        "x": np.array([[3]], np.int8), "weight": np.array([[2]], np.int8), "x_scale": f32(1),
        "weight_scale": f32(1), "azp": np.array([1], np.int32), "azp_adj": np.array([2], np.int32),
    }  # fmt: skip
    assert run("scaled_matmul_bt_int8", operands).tolist() == [[4]]
    assert run("scaled_matmul_bt_int8", operands | {"azp": None, "azp_adj": None}).tolist() == [[6]]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_scales_are_for_all_or_for_each(run: Run, per_token: bool, per_channel: bool) -> None:
    x = np.array([[1, 2], [2, 4]], E4M3)
    x_scale = f32(2, 3) if per_token else f32(2)
    weight_scale = f32(1, 5, 0.5) if per_channel else f32(0.5)
    got = run(
        "scaled_matmul_bt", {"x": x, "weight": WEIGHT, "x_scale": x_scale, "weight_scale": weight_scale}
    )
    want = np.array([[3, 0, 5], [6, 0, 10]]) * x_scale[:, None] * weight_scale
    assert got.tolist() == want.tolist()


def test_the_bias_is_added_before_the_one_rounding(run: Run) -> None:
    operands = {"x": X, "weight": WEIGHT, "alpha": f32(2.0**-8, 0, 2.0**-8), "bias": np.ones(3, BF16)}
    got = run("scaled_matmul_bt_alpha", operands, BF16)
    assert got.astype(np.float32).tolist() == [[1.015625, 1.0, 1.015625]]


def test_the_order_of_the_scales_is_weight_then_x(products: Library) -> None:
    """The other order, and the product of both, round to other bits."""
    total, a, b = np.float32(3), np.float32(1.1), np.float32(1.9)
    assert len({a * (b * total), b * (a * total), (a * b) * total}) == 3
    operands = {"x": np.array([[1, 1]], E4M3), "weight": np.array([[1, total - 1]], E4M3)}
    operands |= {"x_scale": f32(a), "weight_scale": f32(b)}
    assert _in_order("scaled_matmul_bt", operands)[0, 0] == a * (b * total)
    out = np.zeros((1, 1), np.float32)
    assert np.asarray(products.op("scaled_matmul_bt")(**operands, out=out))[0, 0] == a * (b * total)


def test_nothing_to_sum_gives_zeros_or_the_bias(run: Run) -> None:
    nothing = {"x": np.zeros((2, 0), E4M3), "weight": np.zeros((3, 0), E4M3)}
    scales = {"x_scale": f32(1), "weight_scale": f32(1)}
    assert run("scaled_matmul_bt", nothing | scales).tolist() == [[0, 0, 0]] * 2
    blocks = {"x_scale": np.zeros((2, 0), np.float32), "weight_scale": np.zeros((1, 0), np.float32)}
    assert (
        run("scaled_matmul_bt_block", nothing | blocks | {"bias": f32(1, 2, 3)}).tolist() == [[1, 2, 3]] * 2
    )


@pytest.mark.parametrize(("m", "n"), [(0, 3), (2, 0)])
def test_no_rows_and_no_columns_write_nothing(run: Run, m: int, n: int) -> None:
    operands = {"x": np.ones((m, 4), E4M3), "weight": np.ones((n, 4), E4M3)}
    assert run("scaled_matmul_bt", operands | {"x_scale": f32(1), "weight_scale": f32(1)}).shape == (m, n)


@pytest.mark.parametrize(
    ("scale", "want"), [(0.0, [[0, 0, 0]]), (-2.0, [[-6, 0, -10]]), (np.inf, [[np.inf, np.nan, np.inf]])]
)
def test_scales_follow_ieee_arithmetic(run: Run, scale: float, want: list[list[float]]) -> None:
    operands = {"x": X, "weight": WEIGHT, "x_scale": f32(1), "weight_scale": f32(scale)}
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(run("scaled_matmul_bt", operands), want)


def test_a_nan_stays_where_its_scale_or_code_belongs(run: Run) -> None:
    operands = block_operands(3, 130, 200)
    clean = run("scaled_matmul_bt_block", operands)
    operands["x_scale"][1, 1] = np.nan
    operands["weight_scale"][1, 0] = np.nan
    operands["weight"][7, 5] = np.nan
    got = run("scaled_matmul_bt_block", operands)
    spoiled = np.zeros(got.shape, bool)
    spoiled[1], spoiled[:, 128:], spoiled[:, 7] = True, True, True
    assert np.array_equal(np.isnan(got), spoiled)
    assert np.array_equal(got[~spoiled], clean[~spoiled])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 256), (7, 576, 384), (5, 130, 388), (2, 1, 1)])
def test_tails_of_blocks_meet_the_gate(run: Run, m: int, n: int, k: int) -> None:
    """Mean error against f32 of the dequantized operands, relative to the mean: below 1e-3."""
    operands = block_operands(m, n, k)
    wide_x = operands["x"].astype(np.float32) * np.repeat(operands["x_scale"], 128, 1)[:, :k]
    scales = np.repeat(np.repeat(operands["weight_scale"], 128, 0)[:n], 128, 1)[:, :k]
    want = wide_x @ (operands["weight"].astype(np.float32) * scales).T
    got = run("scaled_matmul_bt_block", operands)
    assert np.abs(got - want).mean() <= 1e-3 * np.abs(want).mean()


def test_scales_may_be_column_major(run: Run) -> None:
    operands = block_operands(4, 3, 300)
    want = run("scaled_matmul_bt_block", operands)
    turned = operands | {"x_scale": np.asfortranarray(operands["x_scale"])}
    assert np.array_equal(run("scaled_matmul_bt_block", turned), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_the_cpu_gives_the_bits_of_the_sum_in_order(products: Library, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    operands = block_operands(5, 70, 300)
    operands["bias"] = rng.standard_normal(70).astype(dtype)
    out = np.full((5, 70), 99, dtype)
    for op in ("scaled_matmul_bt_block", "scaled_matmul_bt"):
        if op == "scaled_matmul_bt":
            operands |= {"x_scale": operands["x_scale"][:, 0].copy(), "weight_scale": f32(0.37)}
        got = np.asarray(products.op(op)(**operands, out=out))
        assert got.tobytes() == _in_order(op, operands, dtype).tobytes()


def test_activations_quantized_per_token_and_multiplied(engine: Engine, run: Run) -> None:
    """The chain of a quantized layer: 4 significant bits, so 3 % of the norm."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((5, 128)).astype(np.float32) * f32(0.01, 1, 1, 30, 500)[:, None]
    weight = rng.standard_normal((24, 128)).astype(np.float32)
    weight_scale = np.abs(weight).max(axis=1) / np.float32(448)
    quantized, x_scale = engine("quant_fp8_per_token", {"x": x})
    assert quantized is not None
    assert x_scale is not None
    operands = {
        "x": quantized.view(E4M3), "weight": (weight / weight_scale[:, None]).astype(E4M3),
        "x_scale": x_scale, "weight_scale": weight_scale,
    }  # fmt: skip
    got, want = run("scaled_matmul_bt", operands), x @ weight.T
    for row in range(5):
        off = np.linalg.norm(got[row] - want[row]) / np.linalg.norm(want[row])
        assert 1e-3 < off < 0.05


def test_a_merged_projection_is_its_shards_side_by_side(run: Run) -> None:
    rng = np.random.default_rng(9)
    x, shards, scales = codes(rng, 3, 40), [codes(rng, n, 40) for n in (4, 2, 3)], [0.5, 0.3, 1.7]
    alpha = merged_alpha([0.25] * 3, scales, [4, 2, 3])
    got = run("scaled_matmul_bt_alpha", {"x": x, "weight": np.concatenate(shards), "alpha": alpha})
    factors = [np.float32(0.25) * np.float32(s) for s in scales]
    parts = [
        run("scaled_matmul_bt_alpha", {"x": x, "weight": w, "alpha": np.full(len(w), f, np.float32)})
        for w, f in zip(shards, factors, strict=True)
    ]
    assert np.array_equal(got, np.concatenate(parts, axis=1))


@pytest.mark.parametrize(
    ("inputs", "weights", "shards", "message"),
    [
        ([0.5, 0.25], [1, 1], [2, 2], "merged QKV requires one shared input_scale, found 0.5, 0.25"),
        ([0.5], [1, 1], [2, 2], "1 input scales, 2 weight scales, 2 shards"),
        ([], [], [], "one at least"),
    ],
)
def test_what_cannot_be_merged(inputs: Any, weights: Any, shards: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        merged_alpha(inputs, weights, shards)
    assert merged_alpha([0.5, 0.5], [1, 3], [1, 2]).tolist() == [0.5, 1.5, 1.5]


GOOD = {"x": X, "weight": WEIGHT, "x_scale": f32(1), "weight_scale": f32(1), "bias": np.ones(3, np.float32)}
BLOCKS = block_operands(2, 130, 200)
INTEGERS = {
    "x": np.ones((2, 3), np.int8), "weight": np.ones((4, 3), np.int8),
    "x_scale": f32(1), "weight_scale": f32(1),
    "azp": np.ones(1, np.int32), "azp_adj": np.full(4, 3, np.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "good", "bad", "message"),
    [
        ("scaled_matmul_bt", GOOD, {"x": np.ones(2, BF16)}, "x is bf16, expected f8e4m3"),
        ("scaled_matmul_bt", GOOD, {"weight": np.ones((3, 3), E4M3)}, "K"),
        ("scaled_matmul_bt", GOOD, {"x": np.ones((4, 1), E4M3).T[:, ::2]}, "elements of a row of x"),
        ("scaled_matmul_bt", GOOD, {"weight": np.asfortranarray(WEIGHT)}, "elements of a row of weight"),
        ("scaled_matmul_bt", GOOD, {"x_scale": f32(1, 1)}, "x_scale must hold one scale"),
        ("scaled_matmul_bt", GOOD, {"weight_scale": f32(1, 1)}, "weight_scale must hold one scale"),
        ("scaled_matmul_bt", GOOD, {"x_scale": np.ones(1)}, "x_scale is f64, expected f32"),
        ("scaled_matmul_bt", GOOD, {"bias": np.ones(2, np.float32)}, "bias"),
        ("scaled_matmul_bt", GOOD, {"bias": np.ones(3, BF16)}, "make them the same type"),
        ("scaled_matmul_bt", GOOD, {"bias": np.ones(6, np.float32)[::2]}, "bias"),
        ("scaled_matmul_bt_block", BLOCKS, {"x_scale": np.ones((2, 1), np.float32)}, "axis 1 of x_scale"),
        ("scaled_matmul_bt_block", BLOCKS, {"weight_scale": np.ones((1, 2), np.float32)}, "of weight_scale"),
        ("scaled_matmul_bt_int8", INTEGERS, {"azp": None}, "azp and azp_adj belong together"),
        ("scaled_matmul_bt_int8", INTEGERS, {"azp_adj": np.ones(3, np.int32)}, "azp_adj"),
    ],
)  # fmt: skip
def test_refusals(products: Library, op: str, good: Any, bad: Any, message: str) -> None:
    out = np.zeros((len(good["x"]), len(good["weight"])), np.float32)
    products.op(op)(**good, out=out)
    with pytest.raises(ContractError, match=message):
        products.op(op)(**(good | bad), out=out)


def test_a_sum_that_could_leave_32_bits_is_refused(products: Library) -> None:
    wide = INTEGERS | {"x": np.zeros((1, 2**17), np.int8), "weight": np.zeros((4, 2**17), np.int8)}
    with pytest.raises(ContractError, match="can leave 32 bits"):
        products.op("scaled_matmul_bt_int8")(**wide, out=np.zeros((1, 4), np.float32))


def test_an_output_over_an_input_is_refused(products: Library) -> None:
    memory = np.zeros(64, np.float32)
    inside = {"x": memory.view(E4M3)[:2].reshape(1, 2)}
    with pytest.raises(ContractError, match="overlap"):
        products.op("scaled_matmul_bt")(**(GOOD | inside), out=memory[:3].reshape(1, 3))


def test_the_output_type_is_asked_for(products: Library) -> None:
    without = {n: v for n, v in GOOD.items() if n != "bias"}
    with pytest.raises(ContractError, match="no operand fixes the type of out"):
        products.op("scaled_matmul_bt")(**without)
    assert np.asarray(products.op("scaled_matmul_bt")(**GOOD)).dtype == np.float32
