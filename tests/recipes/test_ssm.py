"""Causal convolutions and the split after them: the oracles against hand-worked numbers and each other."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.ssm import FORWARD, POST_CONV, UPDATE
from kiln.tests.arrays import f32, i32
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]

TAPS = f32([[1, 10, 100, 1000]])
TOKENS = np.arange(1, 6, dtype=np.float32)[:, None]


def forward(x: Array, state: Array, lengths: list[int], **changes: Any) -> tuple[Array, Array]:
    """Sequences in slots 1, 2 … that have initial states, without silu."""
    call = {
        "weight": TAPS, "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32), "silu": False,
        "state_indices": np.arange(1, len(lengths) + 1, dtype=np.int32),
        "has_initial_state": np.ones(len(lengths), np.int32),
    }  # fmt: skip
    assert FORWARD.reference is not None
    out, left = FORWARD.reference(x=x, conv_state=state, **call | changes)
    return out, left


@literal("ssm/1.state")
def test_taps_run_from_the_oldest_input() -> None:
    out, left = forward(TOKENS, f32([[0, 0, 0], [-3, -2, -1]]), [5])
    assert out[:, 0].tolist() == [877, 2088, 3209, 4321, 5432]
    assert left[1].tolist() == [3, 4, 5]


@literal("ssm/1.zeros")
def test_a_sequence_without_a_state_begins_after_zeros() -> None:
    garbage = f32([[0, 0, 0], [-3, np.nan, -1]])
    out, _ = forward(TOKENS, garbage, [5], has_initial_state=i32([0]))
    assert out[:, 0].tolist() == [1000, 2100, 3210, 4321, 5432]


@literal("ssm/1.split")
def test_a_sequence_in_two_pieces() -> None:
    state = f32([[0, 0, 0], [-3, -2, -1]])
    first, middle = forward(TOKENS[:2], state, [2])
    assert middle[1].tolist() == [-1, 1, 2]
    second, left = forward(TOKENS[2:], middle, [3])
    assert np.concatenate([first, second])[:, 0].tolist() == [877, 2088, 3209, 4321, 5432]
    assert left[1].tolist() == [3, 4, 5]


@literal("ssm/1.silu")
def test_silu() -> None:
    one = f32([[1, 0, 0, 0]])
    state = f32([[0, 0, 0], [1, -2, 0]])
    out, _ = forward(TOKENS[:3], state, [3], weight=one, silu=True)
    np.testing.assert_allclose(out[:, 0], [0.7310585786, -0.2384058440, 0], rtol=1e-6)


@literal("ssm/1.products")
def test_products_are_f32() -> None:
    taps = np.array([[1.921875, 1.6875, 1.6953125, 1.8046875]], ml_dtypes.bfloat16)
    x = np.array([[1.2421875], [1.34375], [1.203125], [1.046875]], ml_dtypes.bfloat16)
    out, _ = forward(x, np.zeros((2, 3), ml_dtypes.bfloat16), [4], weight=taps)
    assert abs(float(out[3, 0]) - 8.583862) < 1e-6
    assert float(out[3, 0].astype(ml_dtypes.bfloat16)) == 8.5625


def test_a_forward_is_its_updates() -> None:
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((7, 5)).astype(np.float32), rng.standard_normal((5, 4)).astype(np.float32)
    state, bias = rng.standard_normal((3, 15)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    out, left = forward(x, state, [7], weight=weight, bias=bias, silu=True)
    assert UPDATE.reference is not None
    steps = []
    for t in range(7):
        step, state = UPDATE.reference(
            x=x[t : t + 1], weight=weight, conv_state=state, state_indices=i32([1]), bias=bias
        )
        steps.append(step)
    assert np.concatenate(steps).tobytes() == out.tobytes()
    assert state.tobytes() == left.tobytes()


def test_ragged_sequences_are_apart() -> None:
    rng = np.random.default_rng(4)
    lengths = [1, 8, 9, 0, 64]
    x, state = rng.standard_normal((sum(lengths), 1)), rng.standard_normal((6, 3))
    out, left = forward(x, state, lengths)
    at = 0
    for n, length in enumerate(lengths):
        alone, kept = forward(x[at : at + length], state[[0, n + 1]], [length])
        assert out[at : at + length].tobytes() == alone.tobytes()
        assert left[n + 1].tobytes() == kept[1].tobytes()
        at += length


@pytest.mark.parametrize("slot", [0, -1])
def test_a_sequence_without_a_slot_is_zeros(slot: int) -> None:
    state = f32([[7, 7, 7], [-3, -2, -1]])
    out, left = forward(TOKENS, state, [5], state_indices=i32([slot]))
    assert not out.any()
    assert left.tobytes() == state.tobytes()


def split(qkv: Array, a: Array, b: Array, **sizes: int) -> tuple[Array, ...]:
    """The split with a_log and dt_bias of zeros."""
    assert POST_CONV.reference is not None
    zeros = np.zeros(a.shape[1], np.float32)
    return tuple(POST_CONV.reference(mixed_qkv=qkv, a=a, b=b, a_log=zeros, dt_bias=zeros, **sizes))


@literal("ssm/3.norm", "ssm/3.gates")
def test_the_split_by_hand() -> None:
    bits = np.array([0x7FC12345], np.uint32).view(np.float32)
    qkv = np.concatenate([f32([3, 4, 3, 4]), bits, f32([1])])[None]
    zero = np.zeros((1, 1), np.float32)
    q, k, v, g, beta = split(qkv, zero, zero, heads=1, key_dim=2, value_dim=2)
    np.testing.assert_allclose(q[0], [0.599999988, 0.799999984], rtol=1e-7)
    assert k.tobytes() == q.tobytes()
    assert v.tobytes() == qkv[:, 4:].tobytes()
    np.testing.assert_allclose(g[0, 0], -0.6931472, rtol=1e-6)
    assert beta[0, 0] == 0.5


def test_strength_is_not_rounded_to_the_type_of_b() -> None:
    b = np.array([[0.7]], ml_dtypes.bfloat16)
    *_, beta = split(
        np.zeros((1, 6), ml_dtypes.bfloat16), np.zeros_like(b), b, heads=1, key_dim=2, value_dim=2
    )
    assert abs(float(beta[0, 0]) - 0.66801453) < 1e-7
