"""Hopper's warp-specialized scaled products: their own Python functions over a model of Gluon, and what the
assembler makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda.kernels import gemm_fp8_ws, gemm_fp8_ws_sums
from kiln.recipes.gemm_fp8 import OPS
from kiln.tests.backends.cuda import gluon_model
from kiln.tests.backends.cuda.gluon_model import MBARRIER, Int, Pointer, functions, launch

Array: TypeAlias = np.ndarray[Any, Any]
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
SCALED, BLOCK = (
    next(op for op in OPS if op.name == name) for name in ("scaled_matmul_bt", "scaled_matmul_bt_block")
)
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"BUFFERS": 4},
    {"BLOCK_N": 128},
    {"BLOCK_M": 64},
    {"BLOCK_N": 64, "BUFFERS": 1},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BUFFERS": 1, "SPLIT": 2},
    {"BLOCK_N": 128, "SPLIT": 4},
)
PLAIN = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "BUFFERS": 2, "SPLIT": 1}


def laid_out(x: Array, weight: Array, bias: Array | None) -> tuple[dict[str, Any], Array]:
    """Operands in rows that are wider than K, and a column slice of a poisoned buffer."""
    (m, k), n = x.shape, weight.shape[0]
    ld = -(-k // 16) * 16 + 16
    wide = np.zeros((m + n, ld), E4M3)
    wide.view(np.uint8)[...] = 0x7F
    wide[:m, :k], wide[m:, :k] = x, weight
    width = -(-n // 8) * 8 + 16
    buffer = np.full((m + 1, width), 99, BF16)
    return {
        "x": Pointer(wide[:m].reshape(-1)), "weight": Pointer(wide[m:].reshape(-1)), "bias": Pointer(bias),
        "out": Pointer(buffer.reshape(-1), 8),
        "M": Int(m), "N": Int(n), "K": Int(k), "x_stride": ld, "weight_stride": ld, "out_stride": width,
        "STAGES": 3, "GROUP": 2, "x_scale_colstride": 0, "weight_scale_colstride": 0,
    }, buffer  # fmt: skip


def result(
    how: dict[str, Any], given: dict[str, Any], buffer: Array, kernels: dict[str, Any] | None
) -> Array:
    """What two programs store; nothing beside it, and zeros where arrivals were counted."""
    given |= {"parts": None, "counters": None, **PLAIN, **how}
    tiles = -(-given["M"] // given["BLOCK_M"]) * -(-given["N"] // given["BLOCK_N"])
    counters = np.zeros(2 * tiles, np.int32)
    if given["SPLIT"] > 1:
        parts = np.full(tiles * given["SPLIT"] * given["BLOCK_M"] * given["BLOCK_N"], np.nan, np.float32)
        given |= {"parts": Pointer(parts), "counters": Pointer(counters)}
    kernels = kernels or functions(gemm_fp8_ws, gemm_fp8_ws_sums)
    with np.errstate(invalid="ignore"):
        launch(kernels["scaled_matmul_bt"], 2, given)
    assert not counters.any()
    outside = np.ones(buffer.shape, bool)
    outside[:-1, 8 : 8 + given["N"]] = False
    assert (buffer[outside] == 99).all()
    return buffer[:-1, 8 : 8 + given["N"]].copy()


def product(
    how: dict[str, Any],
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    kernels: dict[str, Any] | None = None,
) -> Array:
    given, buffer = laid_out(x, weight, bias)
    given |= {
        "x_scale": None if x_scale is None else Pointer(x_scale), "weight_scale": Pointer(weight_scale),
        "x_scale_stride": 0 if x_scale is None else min(x_scale.size - 1, 1),
        "weight_scale_stride": min(weight_scale.size - 1, 1), "BLOCKS": False,
    }  # fmt: skip
    return result(how, given, buffer, kernels)


def block_product(
    how: dict[str, Any], x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None
) -> Array:
    given, buffer = laid_out(x, weight, bias)
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        given[name] = Pointer(scale.ravel(order="K"))
        given[f"{name}_stride"], given[f"{name}_colstride"] = (s // 4 for s in scale.strides)
    return result(how, {**given, "BLOCKS": True}, buffer, None)


def operands(m: int, n: int, k: int, each: bool = True, bias: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(m + n + k)
    return {
        "x": rng.standard_normal((m, k)).astype(E4M3), "weight": rng.standard_normal((n, k)).astype(E4M3),
        "x_scale": rng.random(m if each else 1).astype(np.float32),
        "weight_scale": rng.random(n if each else 1).astype(np.float32),
        "bias": rng.standard_normal(n).astype(BF16) if bias else None,
    }  # fmt: skip


def distance(got: Array, want: Array) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "each", "bias"),
    [(1, 8, 8, True, False), (200, 264, 1160, True, True), (130, 264, 530, False, True)],
)
def test_meets_the_contract(how: dict[str, Any], m: int, n: int, k: int, each: bool, bias: bool) -> None:
    call = operands(m, n, k, each, bias)
    assert SCALED.reference is not None
    (want,) = SCALED.reference(**call)
    assert distance(product(how, **call), want) <= SCALED.contract.rel_l2


def test_without_scales_of_rows() -> None:
    call = operands(70, 72, 200, bias=False)
    ones = {**call, "x_scale": np.ones(1, np.float32)}
    assert SCALED.reference is not None
    (want,) = SCALED.reference(**ones)
    assert distance(product(HOW[0], **{**call, "x_scale": None}), want) <= SCALED.contract.rel_l2
    (other,) = SCALED.reference(**call)
    assert distance(product(HOW[0], **{**call, "x_scale": None}), other) > SCALED.contract.rel_l2


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_nan_stays_in_its_row_and_column(how: dict[str, Any]) -> None:
    call = operands(140, 136, 300)
    clean = product(how, **call)
    call["x"].view(np.uint8)[129, 70] = call["weight"].view(np.uint8)[7, 299] = 0x7F
    got = product(how, **call).astype(np.float32)
    spoiled = np.zeros(got.shape, bool)
    spoiled[129] = spoiled[:, 7] = True
    assert np.array_equal(np.isnan(got), spoiled)
    assert np.array_equal(got[~spoiled], clean[~spoiled].astype(np.float32))


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_stage_that_is_never_given_back_is_noticed(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE", 0.3)
    kernels = functions(gemm_fp8_ws, gemm_fp8_ws_sums)
    kernels["mbarrier"] = SimpleNamespace(**{**vars(MBARRIER), "arrive": lambda bar: None})
    with pytest.raises(AssertionError, match="nobody ends"):
        product(how, **operands(130, 136, 1100), kernels=kernels)


def block_operands(m: int, n: int, k: int, major: str, bias: bool) -> dict[str, Any]:
    rng = np.random.default_rng(m + n + k)
    groups = -(-k // 128)
    scale = rng.random((m, groups)).astype(np.float32)
    return {
        **operands(m, n, k, bias=bias),
        "x_scale": scale if major == "rows" else np.asfortranarray(scale),
        "weight_scale": rng.random((-(-n // 128), groups)).astype(np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "major", "bias"),
    [(1, 8, 8, "rows", False), (200, 264, 1160, "columns", True), (130, 264, 530, "rows", True)],
)
def test_block_scales_meet_the_contract(
    how: dict[str, Any], m: int, n: int, k: int, major: str, bias: bool
) -> None:
    call = block_operands(m, n, k, major, bias)
    assert BLOCK.reference is not None
    (want,) = BLOCK.reference(**call)
    assert distance(block_product(how, **call), want) <= BLOCK.contract.rel_l2
    call["x_scale"][0, -1] *= 2
    (other,) = BLOCK.reference(**call)
    assert not np.array_equal(want[0], other[0])
