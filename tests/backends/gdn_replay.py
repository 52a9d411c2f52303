"""Calls of the gated delta rule's decode step with a ring, for tests of its oracle and of its kernels."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kiln.recipes.gdn_replay import replay_step

Array: TypeAlias = np.ndarray[Any, Any]

WRITTEN = ("state", "ring_d", "ring_k", "ring_g")


@dataclass(frozen=True)
class Sizes:
    """Rows, key heads, value heads, K, V, window."""

    rows: int
    heads: int
    value_heads: int
    key: int
    value: int
    window: int

    def scalars(self) -> dict[str, int]:
        """The call's, but for scale."""
        return {
            "heads": self.heads, "window": self.window, "key_dim": self.key, "value_dim": self.value,
        }  # fmt: skip


def operands(sizes: Sizes, io: Any = np.float32, ring: Any = np.float32, seed: int = 0) -> dict[str, Array]:
    """Random operands with rings of NaN; row n has slot n + 1, but the third has none."""
    s, rng = sizes, np.random.default_rng([seed, sizes.rows, sizes.value_heads])
    slots, values = s.rows + 2, s.value_heads * s.value
    indices = np.arange(1, s.rows + 1, dtype=np.int32)
    indices[2:3] = -1
    return {
        **token(sizes, io, seed),
        "a_log": rng.standard_normal(s.value_heads).astype(np.float32),
        "dt_bias": rng.standard_normal(s.value_heads).astype(np.float32),
        "state": rng.standard_normal((slots, values * s.key)).astype(np.float32),
        "ring_d": np.full((slots, s.window * values), np.nan, ring),
        "ring_k": np.full((slots, s.window * s.heads * s.key), np.nan, ring),
        "ring_g": np.full((slots, s.window * s.value_heads), np.nan, np.float32),
        "state_indices": indices,
        "write_pos": np.zeros(s.rows, np.int32),
    }


def token(sizes: Sizes, io: Any, seed: int) -> dict[str, Array]:
    """One token of every row, its operands parts of wider buffers."""
    s, rng = sizes, np.random.default_rng([seed, 1])
    width = 2 * s.heads * s.key + s.value_heads * s.value
    gates = rng.standard_normal((s.rows, 2 * s.value_heads)).astype(io)
    return {
        "mixed_qkv": rng.standard_normal((s.rows, width + 8)).astype(io)[:, :width],
        "a": gates[:, s.value_heads :],
        "b": gates[:, : s.value_heads],
    }


def advanced(write_pos: Array, window: int, force_flush: Array | None = None) -> Array:
    """What the caller does after a step."""
    flushed = write_pos == window - 1
    if force_flush is not None:
        flushed = flushed | (force_flush != 0)
    return np.where(flushed, 0, write_pos + 1).astype(np.int32)


def expected(call: dict[str, Array], sizes: Sizes, scale: float = 0.25, **more: Any) -> tuple[Array, ...]:
    """(out f64, state, ring_d, ring_k, ring_g) of the oracle."""
    given: dict[str, Any] = {**call, **sizes.scalars(), "scale": scale, **more}
    return replay_step(**given)


def filled(sizes: Sizes, positions: Array, **types: Any) -> dict[str, Array]:
    """A call whose row n has a ring of positions[n] steps of its own; what lies beyond is NaN."""
    call = operands(sizes, **types)
    for at in range(int(positions.max(initial=0))):
        indices = np.where(at < positions, call["state_indices"], -1).astype(np.int32)
        past = {**call, **token(sizes, call["mixed_qkv"].dtype, 100 + at), "state_indices": indices}
        past["write_pos"] = np.full(sizes.rows, at, np.int32)
        call.update(zip(WRITTEN, expected(past, sizes)[1:], strict=True))
    return {**call, "write_pos": positions.astype(np.int32)}


def same(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bits."""
    return a.tobytes() == b.tobytes()
