"""The vector headers against NumPy, on every ISA tier: conversions over all codes, the fused multiply-add at
its hard cases."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.c_emitter import translation_unit
from kiln.backends.cpu.toolchain import shared_object
from kiln.compiler.target import TARGETS
from kiln.ir.interpret import fma32, pair_sum
from kiln.tests.backends.cpu.entries import NATIVE, TIERS, same_bits
from kiln.tests.backends.cpu.guarded import Array

ENTRIES = """
void fma_all(const float *a, const float *b, const float *c, float *to, int64_t n);
void fma_all(const float *a, const float *b, const float *c, float *to, int64_t n)
{
  for (int64_t i = 0; i < n; i += 16) {
    const vf sum = vf_fma(f32_load(a + i, 16), f32_load(b + i, 16), f32_load(c + i, 16));
    f32_store(to + i, sum, 16);
  }
}
void to_f16(const float *a, uint16_t *to, int64_t n);
void to_f16(const float *a, uint16_t *to, int64_t n)
{
  for (int64_t i = 0; i < n; i += 16) f16_store(to + i, f32_load(a + i, 16), 16);
}
void from_f16(const uint16_t *a, float *to, int64_t n);
void from_f16(const uint16_t *a, float *to, int64_t n)
{
  for (int64_t i = 0; i < n; i += 16) f32_store(to + i, f16_load(a + i, 16), 16);
}
void to_bf16(const float *a, uint16_t *to, int64_t n);
void to_bf16(const float *a, uint16_t *to, int64_t n)
{
  for (int64_t i = 0; i < n; i += 16) bf16_store(to + i, vf_round_bf16(f32_load(a + i, 16)), 16);
}
void wide_bf16(const float *a, uint16_t *to, int64_t n);
void wide_bf16(const float *a, uint16_t *to, int64_t n)
{
  for (int64_t i = 0; i < n; i += 32) bf16_store2(to + i, wf_round_bf16(f32_load2(a + i, n - i)), n - i);
}
void copy_bf16(const uint16_t *a, uint16_t *to, int64_t n);
void copy_bf16(const uint16_t *a, uint16_t *to, int64_t n)
{
  for (int64_t i = 0; i < n; i += 32) bf16_store2(to + i, bf16_load2(a + i, n - i), n - i);
}
float sum(const float *a, int64_t n);
float sum(const float *a, int64_t n)
{
  vf level[KILN_LEVELS], rest = {0};
  int64_t i = 0;
  for (; n - i >= 16; i += 16) tree_push(level, (uint64_t)i / 16, f32_load(a + i, 16));
  if (i < n) rest = f32_load(a + i, n - i);
  return tree_root(level, (uint64_t)n / 16, rest, n % 16 != 0);
}
"""


@cache
def library(tier: str) -> ctypes.CDLL:
    source = translation_unit("the headers", [ENTRIES])
    target = TARGETS[NATIVE]
    data = shared_object(source, target, next(t for t in target.tiers if t.name == tier), "headers")
    handle, path = tempfile.mkstemp(suffix=".so")
    os.close(handle)
    Path(path).write_bytes(data)
    try:
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)


def call(tier: str, name: str, *arrays: Array) -> None:
    entry: Callable[..., None] = library(tier)[name]
    entry(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.c_int64(arrays[-1].size))


def patterns(count: int) -> Array:
    """Random bit patterns, and values around the edges of f16 and bf16."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    numbers = [
        65504,
        65519.996,
        65520,
        65536,
        6.1035e-05,
        6.0976e-05,
        5.96e-08,
        2.98e-08,
        2.9802322e-08,
        0,
        np.inf,
        np.nan,
    ]
    edges = np.array(numbers, np.float32)
    near = np.concatenate(
        [edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(0))]
    )
    ties = (np.arange(0x3F800000, 0x3F900000, 0x800, dtype=np.uint32)).view(np.float32)
    every = np.concatenate([bits.view(np.float32), near, -near, ties, ties * np.float32(2.0**-20)])
    return every[: every.size // 32 * 32].copy()


@pytest.mark.parametrize("tier", TIERS)
def test_conversions_round_as_numpy_does(tier: str) -> None:
    x = patterns(1 << 18)
    with np.errstate(all="ignore"):
        for name, dtype in (
            ("to_f16", np.float16),
            ("to_bf16", ml_dtypes.bfloat16),
            ("wide_bf16", ml_dtypes.bfloat16),
        ):
            out = np.zeros(x.size, dtype)
            call(tier, name, x, out)
            assert same_bits(out, x.astype(dtype)), name


@pytest.mark.parametrize("tier", TIERS)
def test_every_f16_code_widens(tier: str) -> None:
    codes = np.arange(65536, dtype=np.uint16).view(np.float16)
    out = np.zeros(codes.size, np.float32)
    call(tier, "from_f16", codes, out)
    assert same_bits(out, codes.astype(np.float32))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 95])
def test_wide_rows_end_anywhere(tier: str, size: int) -> None:
    x = np.arange(1, size + 1, dtype=np.uint16)
    out = np.full(size + 8, 0xFFFF, np.uint16)
    call(tier, "copy_bf16", x, out[:size])
    assert out.tolist() == [*x.tolist(), *[0xFFFF] * 8]


def hard_products(count: int) -> tuple[Array, Array, Array]:
    """Sums that lie on f32 ties in f64, subnormal results, cancellation, overflow, and random patterns."""
    rng = np.random.default_rng(5)
    a, b, c = (
        rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32).copy()
        for _ in range(3)
    )
    third = count // 6
    scale = np.exp2(rng.integers(-20, 20, third)).astype(np.float32)
    a[:third] = np.float32(1) + rng.integers(0, 2**12, third).astype(np.float32) * np.float32(2.0**-12)
    b[:third] = np.float32(1) + rng.integers(0, 2**12, third).astype(np.float32) * np.float32(2.0**-12)
    c[:third] = rng.integers(-3, 4, third).astype(np.float32) * np.float32(2.0**-60)
    a[third : 2 * third] = scale * np.float32(1 + 2.0**-12)
    b[third : 2 * third] = np.float32(1 + 2.0**-12)
    c[third : 2 * third] = -scale
    a[2 * third : 3 * third] = rng.standard_normal(third).astype(np.float32) * np.float32(2.0**-70)
    b[2 * third : 3 * third] = rng.standard_normal(third).astype(np.float32) * np.float32(2.0**-72)
    c[2 * third : 3 * third] = rng.integers(-9, 9, third).astype(np.float32) * np.float32(2.0**-149)
    return a, b, c


@pytest.mark.parametrize("tier", TIERS)
def test_the_fused_multiply_add_rounds_once(tier: str) -> None:
    a, b, c = hard_products(3 << 16)
    out = np.zeros(a.size, np.float32)
    call(tier, "fma_all", a, b, c, out)
    with np.errstate(all="ignore"):
        assert same_bits(out, fma32(a, b, c))
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
        assert not same_bits(out, twice), "none of the cases is hard"


@pytest.mark.parametrize("tier", TIERS)
def test_the_sum_has_the_canonical_order(tier: str) -> None:
    entry = library(tier).sum
    entry.restype = ctypes.c_float
    rng = np.random.default_rng(9)
    for n in (1, 2, 3, 15, 16, 17, 33, 255, 256, 257, 1000, 4096, 5120, 70001):
        x = rng.standard_normal(n).astype(np.float32)
        found = np.float32(entry(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(n)))
        assert found.tobytes() == np.float32(pair_sum(x)).tobytes(), n
    zeros = np.full(48, -0.0, np.float32)
    assert not np.signbit(entry(ctypes.c_void_p(zeros.ctypes.data), ctypes.c_int64(48)))


def test_the_sum_of_the_sheet() -> None:
    """Order literal of KERNEL-EW-NORM-ACT: LCG seed 165, 2048 values, sum of squares 0x45c6ad9c."""
    state, values = 165, []
    for _ in range(2048):
        state = (state * 1664525 + 1013904223) % 2**32
        values.append(((state >> 8) / 2**24) * 6 - 3)
    x = np.array(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    squares = x * x
    for tier in TIERS:
        entry = library(tier).sum
        entry.restype = ctypes.c_float
        found = np.float32(entry(ctypes.c_void_p(squares.ctypes.data), ctypes.c_int64(2048)))
        assert found.view(np.uint32) == 0x45C6AD9C
