"""Bit patterns and pseudo-random rows that literals are written in."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def codes(array: Any) -> str:
    """Every element's bits in hex, with blanks between: `3f59 4011`."""
    flat = np.ascontiguousarray(array)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.itemsize]
    return " ".join(f"{int(v):0{2 * flat.itemsize}x}" for v in flat.view(unsigned).ravel())


def bits32(array: Any) -> list[str]:
    """The f32 patterns, one by one."""
    return codes(np.asarray(array, np.float32)).split()


def bf16(*values: float) -> Array:
    """One row of bf16."""
    return np.array([values], BF16)


def f32(*values: float) -> Array:
    """One row of f32."""
    return np.array([values], np.float32)


def single(values: Any) -> Array:
    """An f32 array."""
    return np.array(values, np.float32)


def lcg_row(seed: int, width: int) -> Array:
    """One bf16 row from s = 1664525 s + 1013904223 (mod 2**32): ((s >> 8) / 2**24) * 6 - 3."""
    state, values = seed, np.empty(width)
    for i in range(width):
        state = (state * 1664525 + 1013904223) % 2**32
        values[i] = ((state >> 8) / 2.0**24) * 6 - 3
    return values.astype(BF16).reshape(1, width)
