"""The Triton products of 8-bit codes in Triton's interpreter, on small blocks."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gemm_fp8 import OPS
from kiln.tests.backends.cuda.interpreter import View, interpret
from kiln.tools.interpreter import Address

Array: TypeAlias = np.ndarray[Any, Any]

KERNELS = "kiln.backends.cuda.kernels.gemm_fp8"
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
TILE: dict[str, Any] = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP": 2, "IMPRECISE": None}
SHAPES = [(1, 1, 1), (16, 16, 32), (17, 33, 31), (40, 50, 70)]


def _reference(op: str, **operands: Any) -> Array:
    (reference,) = (o.reference for o in OPS if o.name == op)
    assert reference is not None
    total: Array = reference(**operands)[0]
    return total


def _error(got: Array, want: Array) -> float:
    """Relative L2 distance."""
    exact = want.astype(np.float64)
    return float(np.linalg.norm(got.astype(np.float64) - exact) / max(float(np.linalg.norm(exact)), 1e-30))


def _into(m: int, n: int, dtype: Any, run: Any) -> Array:
    """What `run(out, row stride)` writes into a column slice of a poisoned buffer."""
    buffer = run(np.full((m + 1, n + 7), 99, dtype), n + 7)
    assert (buffer[m] == 99).all()
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, 3 + n :] == 99).all()
    written: Array = buffer[:m, 3 : 3 + n].copy()
    return written


def _scaled(
    x: Array,
    weight: Array,
    x_scale: Any,
    weight_scale: Any,
    bias: Any,
    dtype: Any = BF16,
    zero: tuple[Array, Array] | None = None,
) -> Array:
    (m, k), n = x.shape, len(weight)
    points: Any = zero or (None, None)
    if x.dtype == np.int8 and zero is None:
        points = (Address(0, "i32"), Address(0, "i32"))
    given = Address(0, {2: "bf16", 4: "fp32"}[np.dtype(dtype).itemsize]) if bias is None else bias
    steps = (0 if x_scale is None else min(len(x_scale) - 1, 1), min(len(weight_scale) - 1, 1))

    def run(out: Array, stride: int) -> Array:
        arrays: tuple[Any, ...] = (x, weight, x_scale, weight_scale, *points, given, View(out, 3))
        numbers = (m, n, k, k, k, stride, *steps)
        grid = (-(-m // 16) * -(-n // 16),)
        return interpret(f"{KERNELS}:scaled_matmul_bt", grid, *arrays, *numbers, **TILE)[-1]

    return _into(m, n, dtype, run)


def _block(operands: dict[str, Array], bias: Array | None, split: int = 0, block_m: int = 16) -> Array:
    """One program a tile, or the inner dimension split over `split` programs."""
    x, weight, x_scale, weight_scale = operands.values()
    (m, k), n = x.shape, len(weight)
    given = Address(0, "bf16") if bias is None else bias
    strides = (*(s // 4 for s in x_scale.strides), *(s // 4 for s in weight_scale.strides))
    tiles = -(-m // block_m) * -(-n // 32)
    sizes = {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 128}
    partials = np.full(max(tiles * split, 1) * block_m * 32, np.nan, np.float32)
    arrivals = np.zeros(tiles, np.int32)

    def run(out: Array, stride: int) -> Array:
        arrays: tuple[Any, ...] = (x, weight, x_scale, weight_scale, given, View(out, 3))
        numbers = (m, n, k, k, k, stride, *strides)
        if not split:
            kernel = f"{KERNELS}:scaled_matmul_bt_block"
            return interpret(kernel, (tiles,), *arrays, *numbers, **sizes, GROUP=2)[-1]
        kernel = f"{KERNELS}:scaled_matmul_bt_block_split"
        scratch = (partials, arrivals)
        *_, written, _, left = interpret(
            kernel, (tiles, split), *arrays, *scratch, *numbers, **sizes, SPLIT=split
        )
        assert not left.any()
        return written

    return _into(m, n, BF16, run)


def _codes(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(E4M3)


def _f32(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.random(shape) + 0.5).astype(np.float32)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_scaled_products_meet_the_contract(m: int, n: int, k: int, each: bool, decoded: bool) -> None:
    """As e4m3, and as bytes that the kernel decodes to f16."""
    rng = np.random.default_rng(m + n)
    x, weight = _codes(rng, m, k), _codes(rng, n, k)
    x_scale, weight_scale = _f32(rng, m if each else 1), _f32(rng, n if each else 1)
    scales = {"x_scale": x_scale, "weight_scale": weight_scale}
    bias = rng.standard_normal(n).astype(BF16) if each else None
    want = _reference("scaled_matmul_bt", x=x, weight=weight, **scales, bias=bias)
    read = (x.view(np.uint8), weight.view(np.uint8)) if decoded else (x, weight)
    got = _scaled(read[0], read[1], x_scale, weight_scale, bias)
    assert _error(got, want) <= 2.0**-8
    assert _error(got, want * 1.01) > 2.0**-8


def test_every_code_is_decoded_to_f16_exactly() -> None:
    codes, one = np.arange(256, dtype=np.uint8)[:, None], np.ones((1, 1), E4M3).view(np.uint8)
    scale = np.ones(1, np.float32)
    got = _scaled(codes, one, scale, scale, None, np.float32)
    np.testing.assert_array_equal(got, codes.view(E4M3).astype(np.float32))


def test_alpha_has_no_scale_of_x() -> None:
    rng = np.random.default_rng(2)
    x, weight, alpha = _codes(rng, 5, 40), _codes(rng, 20, 40), _f32(rng, 20)
    want = _reference("scaled_matmul_bt_alpha", x=x, weight=weight, alpha=alpha)
    assert _error(_scaled(x, weight, None, alpha, None), want) <= 2.0**-8


@pytest.mark.parametrize("zero_point", [False, True])
def test_i8_products_are_exact(zero_point: bool) -> None:
    rng = np.random.default_rng(4)
    x, weight = (rng.integers(-128, 128, (rows, 70)).astype(np.int8) for rows in (5, 20))
    ones, one = np.ones(5, np.float32), np.ones(1, np.float32)
    scales = {"x_scale": ones, "weight_scale": one}
    azp = rng.integers(-9, 9, 5).astype(np.int32)
    zero = (azp, weight.astype(np.int32).sum(axis=1, dtype=np.int32)) if zero_point else None
    names = dict(zip(("azp", "azp_adj"), zero or (None, None), strict=True))
    want = _reference("scaled_matmul_bt_int8", x=x, weight=weight, **scales, **names)
    assert np.array_equal(_scaled(x, weight, ones, one, None, np.float32, zero), want)


@pytest.mark.parametrize(("split", "block_m"), [(0, 16), (1, 16), (2, 16), (3, 16), (2, 64)])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 140, 300), (70, 33, 256), (1, 1, 20)])
def test_block_scaled_products_meet_the_contract(m: int, n: int, k: int, split: int, block_m: int) -> None:
    rng = np.random.default_rng(m + n)
    operands: dict[str, Array] = {"x": _codes(rng, m, k), "weight": _codes(rng, n, k)}
    operands |= {"x_scale": _f32(rng, m, -(-k // 128)), "weight_scale": _f32(rng, -(-n // 128), -(-k // 128))}
    bias = rng.standard_normal(n).astype(BF16) if split % 2 else None
    want = _reference("scaled_matmul_bt_block", **operands, bias=bias)
    assert _error(_block(operands, bias, split, block_m), want) <= 2.0**-8
    operands["x_scale"] = operands["x_scale"] * np.float32(1.01)
    assert _error(_block(operands, None, split, block_m), want) > 2.0**-8


@pytest.mark.parametrize("split", [0, 2])
def test_nothing_to_sum_gives_the_bias(split: int) -> None:
    pad, scale, bias = np.zeros((3, 1), E4M3), np.zeros((3, 1), np.float32), np.arange(3).astype(BF16)
    sizes = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128} | ({"SPLIT": split} if split else {"GROUP": 2})
    memory = (np.full(1024, np.nan, np.float32), np.zeros(1, np.int32)) if split else ()
    kernel = f"{KERNELS}:scaled_matmul_bt_block" + ("_split" if split else "")
    arrays = (pad, pad, scale, scale, bias, np.full((3, 3), 99, BF16), *memory)
    left = interpret(kernel, (1, max(split, 1)), *arrays, 3, 3, 0, 1, 1, 3, 1, 1, 1, 1, **sizes)
    assert left[5].astype(np.float32).tolist() == [[0, 1, 2]] * 3


def test_a_nan_stays_in_its_row() -> None:
    rng = np.random.default_rng(6)
    x, weight, scale = _codes(rng, 20, 8), _codes(rng, 9, 8), np.ones(1, np.float32)
    clean = _scaled(x, weight, scale, scale, None)
    x[17, 3] = np.nan
    got = _scaled(x, weight, scale, scale, None)
    assert np.isnan(got[17].astype(np.float32)).all()
    rest = [i for i in range(20) if i != 17]
    assert np.array_equal(got[rest], clean[rest])
