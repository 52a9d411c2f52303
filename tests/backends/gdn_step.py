"""Calls of the gated delta rule's decode step, for tests of its kernels."""

from typing import Any, TypeAlias

import numpy as np

from kiln.recipes.gdn import PACKED_DECODE

Array: TypeAlias = np.ndarray[Any, Any]


def operands(
    rows: int, heads: int, value_heads: int, key: int, value: int, io: Any, state: Any
) -> dict[str, Array]:
    """Random operands; rows name slots from the last down, the third row none."""
    rng = np.random.default_rng(rows * 100 + value_heads)
    width = 2 * heads * key + value_heads * value

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape)

    indices = np.arange(rows, 0, -1, dtype=np.int32)
    indices[2:3] = -1
    return {
        "mixed_qkv": normal(rows, width + 8).astype(io)[:, :width],
        "a": normal(rows, 2 * value_heads).astype(io)[:, value_heads:],
        "b": normal(rows, 2 * value_heads).astype(io)[:, :value_heads],
        "a_log": normal(value_heads).astype(np.float32),
        "dt_bias": normal(value_heads).astype(np.float32),
        "state": normal(rows + 2, value_heads * value * key).astype(state),
        "state_indices": indices,
    }


def expected(call: dict[str, Array], heads: int, key: int, value: int, scale: float) -> tuple[Array, Array]:
    """(out f32, state) of the oracle."""
    assert PACKED_DECODE.reference is not None
    out, state = PACKED_DECODE.reference(**call, heads=heads, scale=scale, key_dim=key, value_dim=value)
    return out, state


def distance(found: Array, wanted: Array) -> float:
    """Relative L2 distance."""
    exact = wanted.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))
