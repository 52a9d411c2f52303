"""The gated delta rule's decode step: the oracle against hand-worked numbers and the recurrence itself."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gdn import PACKED_DECODE, gates, softplus
from kiln.tests.arrays import f32
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]

ONE_HEAD_PAIR = np.array([[3, 4, 0, 5, 1, 2, -1, 3]], np.float32)
STATES = np.array([[0, 0, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 0, 1, 1, 0]], np.float32)


def _step(mixed_qkv: Array, state: Array, **changes: Any) -> tuple[Array, Array]:
    """One step of H = 1, HV = 2, K = V = 2 with gates of zeros: alpha = beta = 1/2."""
    zeros = np.zeros((len(mixed_qkv), 2), mixed_qkv.dtype)
    call = {
        "a": zeros, "b": zeros, "a_log": np.zeros(2, np.float32), "dt_bias": np.zeros(2, np.float32),
        "heads": 1,
        "scale": 1.0, "key_dim": 2, "value_dim": 2, "state_indices": np.array([1], np.int32),
        "qk_l2norm": False,
    }  # fmt: skip
    assert PACKED_DECODE.reference is not None
    out, pool = PACKED_DECODE.reference(mixed_qkv=mixed_qkv, state=state, **call | changes)
    return out, pool


@literal("gdn/1.step")
def test_a_step_by_hand() -> None:
    out, pool = _step(ONE_HEAD_PAIR, STATES)
    assert out.tolist() == [[-34.5, -67.5, -33.0, 31.5]]
    assert pool[1].tolist() == [0.5, -9, 1.5, -18, 0, -8.25, 0.5, 7.5]


@literal("gdn/2.norm")
def test_a_step_with_l2_norm() -> None:
    out, pool = _step(ONE_HEAD_PAIR, STATES, qk_l2norm=True, scale=2**-0.5)
    np.testing.assert_allclose(out[0], [0.77781745, 1.76776693, -0.14142134, 1.06066013], rtol=2e-7)
    np.testing.assert_allclose(
        pool[1], [0.5, 1.00000001, 1.5, 2.00000002, 0, -0.24999998, 0.5, 1.49999997], atol=1e-7
    )


@literal("gdn/3.beta")
def test_beta_is_rounded_to_the_type_of_b() -> None:
    b = np.array([[0.7]], ml_dtypes.bfloat16)
    zeros = np.zeros((1, 1), np.float32)
    _, beta = gates(zeros, b, zeros[0], zeros[0])
    assert beta[0, 0] == np.float32(0.66796875)
    _, unrounded = gates(zeros, np.array([[0.7]], np.float32), zeros[0], zeros[0])
    assert abs(float(unrounded[0, 0]) - 0.66818777) < 1e-7


@literal("gdn/4.threshold")
def test_softplus_is_the_identity_above_its_threshold() -> None:
    assert softplus(f32([20.0, 20.5])).tolist() == [20.0, 20.5]
    assert softplus(f32([-18.0])).tolist() == [0.0]


@literal("gdn/5.padding")
def test_rows_without_a_slot_are_zeros_and_touch_nothing() -> None:
    rng = np.random.default_rng(5)
    qkv = rng.standard_normal((3, 8)).astype(np.float32)
    state = rng.standard_normal((4, 8)).astype(np.float32)
    out, pool = _step(qkv, state, state_indices=np.array([3, 0, -1], np.int32))
    assert out[1:].tolist() == [[0.0] * 4] * 2
    assert pool[:3].tobytes() == state[:3].tobytes()
    assert pool[3].tobytes() != state[3].tobytes()


def test_the_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(6)
    qkv = rng.standard_normal((2, 8)).astype(np.float32)
    state = rng.standard_normal((3, 8)).astype(np.float32)
    out, pool = _step(qkv, state, state_indices=np.array([1, 2], np.int32))
    turned, same = _step(qkv[::-1], state, state_indices=np.array([2, 1], np.int32))
    assert turned[::-1].tobytes() == out.tobytes()
    assert same.tobytes() == pool.tobytes()


@literal("gdn/6.heads")
def test_value_heads_share_key_heads_in_order() -> None:
    """HV = 4, H = 2: the keys pick different columns, so that a head read from the wrong one shows."""
    qkv = f32([[1, 0, 0, 1] + [1, 0, 0, 1] + [1] * 8])
    gate = np.zeros((1, 4), np.float32)
    state = np.zeros((2, 16), np.float32)
    _, pool = _step(qkv, state, a=gate, b=gate, a_log=gate[0], dt_bias=gate[0], heads=2)
    assert pool[1].reshape(4, 2, 2)[:, 0].tolist() == [[0.5, 0], [0.5, 0], [0, 0.5], [0, 0.5]]


def test_steps_are_the_recurrence() -> None:
    """Several steps against the sum over tokens written out: S_T = sum of d_t k_t^T, decayed since."""
    rng = np.random.default_rng(7)
    state = np.zeros((2, 8), np.float64)
    keys, deltas = [], []
    for _ in range(6):
        qkv = rng.standard_normal((1, 8))
        before = state[1].reshape(2, 2, 2)
        v, k = qkv[0, 4:].reshape(2, 2), qkv[0, 2:4]
        deltas.append(0.5 * (v - 0.5 * before @ k))
        keys.append(k)
        _, state = _step(qkv, state)
    wanted = sum(
        0.5 ** (5 - t) * d[:, :, None] * k for t, (d, k) in enumerate(zip(deltas, keys, strict=True))
    )
    np.testing.assert_allclose(state[1].reshape(2, 2, 2), wanted, atol=1e-6)


def test_a_wrong_head_map_is_seen() -> None:
    qkv = f32([[1, 0, 0, 1] + [0, 1, 1, 0] + [1] * 8])
    gate = np.zeros((1, 4), np.float32)
    _, pool = _step(
        qkv, np.zeros((2, 16), np.float32), a=gate, b=gate, a_log=gate[0], dt_bias=gate[0], heads=2
    )
    assert pool[1].reshape(4, 2, 2)[:, 0].tolist() != [[0.5, 0], [0.5, 0], [0, 0.5], [0, 0.5]]


@pytest.mark.parametrize(("a", "kept"), [(50.0, True), (200.0, False)])
def test_a_long_forgetting_ends_in_zeros(a: float, kept: bool) -> None:
    _, pool = _step(ONE_HEAD_PAIR, STATES, a=np.full((1, 2), a), b=np.full((1, 2), -200.0, np.float32))
    assert pool[1].any() == kept
