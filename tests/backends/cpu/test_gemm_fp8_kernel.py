"""The C products of 8-bit codes: the bits of the sum in order, on every tier that runs here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.variants.gemm_fp8 import COLS, PRIMITIVES, ROWS, TYPE_CODES
from kiln.ir.dtypes import DTYPES
from kiln.recipes import gemm_fp8
from kiln.tests.backends.cpu.native import Native, runnable_tiers

Array: TypeAlias = np.ndarray[Any, Any]

E4M3 = ml_dtypes.float8_e4m3fn
SHAPES = ((1, 1, 1), (3, 33, 31), (9, 130, 300), (ROWS + 2, 63, 257))
"""Ragged in every way: tails of registers, of panels, of blocks of scales and of tiles."""


@pytest.fixture(scope="module", params=runnable_tiers())
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Native]:
    folder = tmp_path_factory.mktemp("gemm_fp8")
    return {p.op: Native(p, request.param, folder) for p in PRIMITIVES}


def _codes(rng: np.random.Generator, rows: int, k: int, integer: bool) -> Array:
    if integer:
        return rng.integers(-128, 128, (rows, k)).astype(np.int8)
    return np.asarray(rng.standard_normal((rows, k))).astype(E4M3)


class Call:
    """Operands of one call, what the kernel is told of them, and the bits it must give."""

    def __init__(self, op: str, shape: tuple[int, int, int], out: str, full: bool, seed: int) -> None:
        """`full` gives every optional operand, and a scale for each row."""
        rng = np.random.default_rng(seed)
        m, n, k = shape
        self.op, self.shape, self.dtype = op, shape, DTYPES[out].numpy
        integer = op.endswith("int8")
        x, weight = (_codes(rng, rows, k, integer) for rows in (m, n))
        bias = rng.standard_normal(n).astype(self.dtype) if full else None
        groups, rows = -(-k // 128), -(-n // 128)
        scales: dict[str, Array | None] = {}
        steps = {"x_scale_stride": int(full), "weight_scale_stride": int(full)}
        if op.endswith("alpha"):
            scales, steps = {"alpha": rng.random(n).astype(np.float32)}, {"weight_scale_stride": 1}
        elif op.endswith("block"):
            sides = {"x_scale": (m, groups), "weight_scale": (rows, groups)}
            scales = {name: rng.random(side).astype(np.float32) for name, side in sides.items()}
            steps = {f"{name}_{s}": v for name in sides for s, v in (("stride", groups), ("colstride", 1))}
        else:
            sizes = {"x_scale": m if full else 1, "weight_scale": n if full else 1}
            scales = {name: rng.random(size).astype(np.float32) for name, size in sizes.items()}
        if integer:
            sums = weight.astype(np.int32).sum(axis=1, dtype=np.int32)
            scales["azp"] = rng.integers(-9, 9, m).astype(np.int32) if full else None
            scales["azp_adj"] = sums if full else None
        self.operands: dict[str, Array | None] = {"x": x, "weight": weight, **scales, "bias": bias}
        code = TYPE_CODES[DTYPES[out]]
        self.numbers = {"M": m, "N": n, "K": k, "x_stride": k, "weight_stride": k, **steps, "out_type": code}

    @property
    def want(self) -> Array:
        """The bits of the sum in order."""
        fold: Any = {
            "scaled_matmul_bt": gemm_fp8.scaled_in_order,
            "scaled_matmul_bt_alpha": gemm_fp8.alpha_in_order,
            "scaled_matmul_bt_block": gemm_fp8.block_in_order,
            "scaled_matmul_bt_int8": gemm_fp8.int8_in_order,
        }[self.op]
        with np.errstate(over="ignore"):
            bits: Array = fold(*self.operands.values(), self.dtype)
        return bits

    def run(self, kernel: Native, split: int = 1) -> Array:
        """In `split` pieces into a column slice of a poisoned buffer."""
        m, n, _ = self.shape
        buffer = np.full((m + 1, n + 7), 99, self.dtype)
        out = buffer[:m, 3 : 3 + n]
        tiles = -(-m // ROWS) * -(-n // COLS)
        for begin, end in pairwise(np.linspace(0, tiles, split + 1).astype(int)):
            kernel({**self.operands, "out": out}, {**self.numbers, "out_stride": n + 7}, int(begin), int(end))
        assert (buffer[m] == 99).all()
        assert (buffer[:, :3] == 99).all()
        assert (buffer[:, 3 + n :] == 99).all()
        return out.copy()


@pytest.mark.parametrize("out", [d.name for d in TYPE_CODES])
@pytest.mark.parametrize("op", list(dict.fromkeys(p.op for p in PRIMITIVES)))
def test_gives_the_bits_of_the_sum_in_order(kernels: dict[str, Native], op: str, out: str) -> None:
    for seed, shape in enumerate(SHAPES):
        for full in (False, True):
            call = Call(op, shape, out, full, seed)
            assert call.run(kernels[op]).tobytes() == call.want.tobytes(), (shape, full)
            assert call.run(kernels[op], split=3).tobytes() == call.want.tobytes(), (shape, full)


def test_every_code_is_widened_exactly(kernels: dict[str, Native]) -> None:
    call = Call("scaled_matmul_bt", (256, 1, 1), "f32", False, 0)
    codes = np.arange(256, dtype=np.uint8).view(E4M3)[:, None]
    one = np.ones(1, np.float32)
    call.operands |= {"x": codes, "weight": np.ones((1, 1), E4M3), "x_scale": one, "weight_scale": one}
    np.testing.assert_array_equal(call.run(kernels["scaled_matmul_bt"]), codes.astype(np.float32))
    turned = Call("scaled_matmul_bt", (1, 256, 1), "f32", False, 0)
    turned.operands |= {"x": np.ones((1, 1), E4M3), "weight": codes, "x_scale": one, "weight_scale": one}
    np.testing.assert_array_equal(turned.run(kernels["scaled_matmul_bt"]), codes.T.astype(np.float32))


def test_the_order_of_a_sum_shows(kernels: dict[str, Native]) -> None:
    """448 * 448 swallows 2**-9 * 2**-9 before it is taken away again, and not after."""
    call = Call("scaled_matmul_bt", (1, 2, 3), "f32", False, 0)
    one = np.ones(1, np.float32)
    x = np.array([[2**-9, 448, 448]], E4M3)
    weight = np.array([[2**-9, 448, -448], [448, -448, 2**-9]], E4M3)
    call.operands |= {"x": x, "weight": weight, "x_scale": one, "weight_scale": one}
    assert call.run(kernels["scaled_matmul_bt"])[0, 0] == 0.0
    assert call.run(kernels["scaled_matmul_bt"]).tobytes() == call.want.tobytes()


def test_a_sum_of_i8_products_is_exact(kernels: dict[str, Native]) -> None:
    k = 2**17 - 1
    call = Call("scaled_matmul_bt_int8", (1, 1, k), "f32", False, 0)
    one = np.ones(1, np.float32)
    least = np.full((1, k), -128, np.int8)
    call.operands |= {"x": least, "weight": least, "x_scale": one, "weight_scale": one}
    assert call.run(kernels["scaled_matmul_bt_int8"])[0, 0] == np.float32(128 * 128 * k)
