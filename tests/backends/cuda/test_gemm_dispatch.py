"""Which kernel a matrix product takes by default: by shape, type and alignment alone, on a device that is not
there. What was measured, or is expected, to be faster comes before that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kiln.backends.cuda.backend import CudaBackend
from kiln.runtime.arrays import View, described
from kiln.runtime.errors import ContractError
from kiln.runtime.load import Library, load
from kiln.tests.support.committed import build_from

TARGET = "sm_86"


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Every product of a target, on a device that is pretended."""
    out: Path = tmp_path_factory.mktemp("products") / "tree"
    build_from(out, [TARGET], ["linear", "matmul"], [CudaBackend()])
    with load(out, TARGET) as library:
        yield library


def _view(shape: tuple[int, ...], dtype: str, stride: int | None = None, address: int = 0) -> View:
    made = described(shape, dtype, 0)
    strides = made.strides if stride is None else (*made.strides[:-2], stride, 1)
    return made._replace(strides=strides, ptr=address)


def _chosen(
    library: Library, op: str, m: int, n: int, k: int, out: str = "bf16", kind: str = "bf16", **more: Any
) -> str | None:
    weight = (k, n) if op == "matmul" else (n, k)
    call = {"x": _view((m, k), kind), "weight": _view(weight, kind), "out": _view((m, n), out)}
    verdicts = library.explain(op, **{**call, **more}).verdicts
    legal = (v.variant for v in verdicts if v.why is None and not v.variant.endswith((".shapes", ".rows")))
    return next(legal, None)


@pytest.mark.parametrize(
    ("m", "n", "k", "out", "want"),
    [
        (1, 4096, 4096, "bf16", "bf16_m16"),
        (16, 4096, 4096, "bf16", "bf16_m16"),
        (17, 4096, 4096, "bf16", "bf16_m64"),
        (65, 4096, 4096, "bf16", "bf16_any"),
        (65, 50257, 4096, "bf16", "bf16_any_unaligned"),
        (65, 4096, 4095, "bf16", "bf16_any_unaligned"),
        (1, 256, 7168, "f32", "bf16_f32_m16"),
        (500, 256, 7168, "f32", "bf16_f32_any"),
        (500, 257, 7168, "f32", "bf16_f32_any_unaligned"),
        (3, 64, 0, "bf16", "bf16_any_unaligned"),
    ],
)
def test_bf16(products: Library, m: int, n: int, k: int, out: str, want: str) -> None:
    assert _chosen(products, "matmul_bt", m, n, k, out) == want


@pytest.mark.parametrize(
    ("kind", "out", "want"),
    [
        ("f16", "f16", "f16_any"),
        ("f32", "f32", "f32_any"),
        ("f16", "f32", "f16_f32_any"),
        ("f32", "bf16", None),
    ],
)
def test_other_types(products: Library, kind: str, out: str, want: str | None) -> None:
    assert _chosen(products, "matmul_bt", 3, 64, 64, out, kind) == want


def test_the_out_type_is_xs_unless_it_is_given(products: Library) -> None:
    found = products.explain("matmul_bt", x=_view((4, 64), "bf16"), weight=_view((32, 64), "bf16")).chosen
    assert found is not None
    assert found.variant.startswith("bf16_splitk_")


def test_two_types_have_no_kernel(products: Library) -> None:
    found = products.explain("matmul_bt", x=_view((4, 64), "bf16"), weight=_view((32, 64), "f16"))
    assert found.chosen is None
    assert "weight" in (found.verdicts[0].why or "")
    assert "f16" in (found.verdicts[0].why or "")


@pytest.mark.parametrize(
    "operand", [{"x": _view((4, 64), "bf16", 68)}, {"weight": _view((32, 64), "bf16", address=8)}]
)
def test_odd_strides_and_addresses_take_the_slow_kernel(products: Library, operand: dict[str, Any]) -> None:
    assert _chosen(products, "matmul_bt", 4, 32, 64) == "bf16_m16"
    assert _chosen(products, "matmul_bt", 4, 32, 64, **operand) == "bf16_any_unaligned"


@pytest.mark.parametrize(("n", "want"), [(64, "bf16_any"), (65, "bf16_any_unaligned")])
def test_weights_by_columns(products: Library, n: int, want: str) -> None:
    assert _chosen(products, "matmul", 4, n, 64) == want


BIAS: dict[str, Any] = {"bias": _view((64,), "bf16"), "alpha": 1.0}


@pytest.mark.parametrize(
    ("m", "activation", "want"),
    [
        (1, "none", "bf16_no_residual_bf16_f32_m16"),
        (64, "none", "bf16_no_residual_bf16_f32_m64"),
        (65, "none", "bf16_no_residual_bf16_f32_any"),
        (64, "silu", "bf16_activationsilu_no_residual_bf16_f32_m64"),
        (65, "silu", "composite.bf16_activationsilu_no_residual"),
        (65, "gelu_tanh", "composite.bf16_activationgelu_tanh_no_residual"),
        (1, "relu", None),
    ],
)
def test_layers(products: Library, m: int, activation: str, want: str | None) -> None:
    assert _chosen(products, "linear", m, 64, 128, activation=activation, **BIAS) == want


def test_layers_of_odd_sizes_run_the_product_and_then_the_rest(products: Library) -> None:
    bias = {**BIAS, "bias": _view((63,), "bf16")}
    assert _chosen(products, "linear", 4, 63, 128, **bias) == "composite.bf16_no_residual"


def test_a_shifted_bias_too(products: Library) -> None:
    bias = {**BIAS, "bias": _view((64,), "bf16", address=2)}
    assert _chosen(products, "linear", 4, 64, 128, **bias) == "composite.bf16_no_residual"


def test_sums_that_disagree_are_refused(products: Library) -> None:
    with pytest.raises(ContractError, match="linear: weight has K=96 but x gave K=128"):
        _chosen(products, "linear", 4, 64, 128, weight=_view((64, 96), "bf16"), **BIAS)
