"""The delta rule's decode step with a ring: its oracle against the recurrence, the plain step and numbers
worked by hand."""

from typing import Any, TypeAlias

import numpy as np
import pytest

from kiln.recipes.gdn import PACKED_DECODE, gates, log_decay, unit
from kiln.recipes.gdn_replay import replay_step
from kiln.tests.arrays import f32, i32
from kiln.tests.backends.gdn_replay import Sizes, advanced, expected, filled, operands, same, token
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]

RINGS = ("ring_d", "ring_k", "ring_g")
LN2 = float(np.float32(np.log(2)))


def _step(call: dict[str, Array], sizes: Sizes, **more: Any) -> tuple[Array, dict[str, Array]]:
    """(out, the call after it: what was written, and positions moved on)."""
    out, *written = expected(call, sizes, **more)
    after = {**call, **dict(zip(("state", *RINGS), written, strict=True))}
    return out, {**after, "write_pos": advanced(call["write_pos"], sizes.window, call.get("force_flush"))}


def _recurrence(tokens: list[dict[str, Array]], start: Array, call: dict[str, Array], sizes: Sizes) -> Any:
    """(outputs, states) token by token in float64, for one row: S = alpha S + beta (v - alpha S k) k^T."""
    s, state = sizes, start.reshape(sizes.value_heads, sizes.value, sizes.key).astype(np.float64)
    outs, states = [], []
    for t in tokens:
        q, k, v = np.split(t["mixed_qkv"][0].astype(np.float64), [s.heads * s.key, 2 * s.heads * s.key])
        q, k = (np.repeat(unit(x.reshape(s.heads, s.key)), s.value_heads // s.heads, axis=0) for x in (q, k))
        alpha = np.exp(log_decay(t["a"], call["a_log"], call["dt_bias"])[0].astype(np.float64))
        beta = gates(t["a"], t["b"], call["a_log"], call["dt_bias"])[1][0].astype(np.float64)
        state = state * alpha[:, None, None]
        d = beta[:, None] * (v.reshape(s.value_heads, s.value) - np.einsum("hvk,hk->hv", state, k))
        state = state + d[:, :, None] * k[:, None, :]
        outs.append(np.einsum("hvk,hk->hv", state, q * 0.25).reshape(-1))
        states.append(state.reshape(-1))
    return outs, states


WRITES = {1: 37, 2: 18, 4: 9, 8: 4, 16: 2}
"""Window -> how often 37 tokens write the state."""


@pytest.mark.parametrize(
    ("window", "writes"),
    [pytest.param(w, n, marks=literal(f"gdn_replay/1.{w}")) for w, n in WRITES.items()],
)
def test_a_ring_is_the_recurrence(window: int, writes: int) -> None:
    """37 tokens: outputs, the states as of their flushes, and how often they are written."""
    sizes = Sizes(1, 2, 4, 8, 6, window)
    call = {n: x.astype(np.float64) if n in (*RINGS, "state") else x for n, x in operands(sizes).items()}
    tokens = [token(sizes, np.float32, 10 + t) for t in range(37)]
    outs, states = _recurrence(tokens, call["state"][1], call, sizes)
    found = 0
    for t, (out, state) in enumerate(zip(outs, states, strict=True)):
        got, after = _step({**call, **tokens[t]}, sizes)
        assert np.abs(got[0] - out).max() <= 2e-15 * max(1, np.abs(out).max())
        if not same(after["state"], call["state"]):
            found += 1
            assert after["write_pos"].tolist() == [0]
            np.testing.assert_allclose(after["state"][1], state, rtol=0, atol=2e-15)
        call = after
    assert found == writes


@literal("gdn_replay/2.plain")
def test_a_window_of_one_is_the_plain_step() -> None:
    sizes = Sizes(4, 2, 4, 8, 6, 1)
    call = operands(sizes)
    out, after = _step(call, sizes)
    plain = {n: x for n, x in call.items() if n not in (*RINGS, "write_pos")}
    assert PACKED_DECODE.reference is not None
    wanted, state = PACKED_DECODE.reference(**plain, heads=2, scale=0.25, key_dim=8, value_dim=6)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(after["state"], state, rtol=1e-5, atol=2e-6)
    assert all(same(after[n], call[n]) for n in RINGS)


def _by_hand(**changes: Any) -> tuple[Array, ...]:
    """V = K = 1, q = k = 1, alpha = beta = 1/2, a window of 4, S0 = 1, v = 2."""
    one, nothing = np.zeros((1, 1), np.float32), np.full((2, 4), np.nan)
    call = {
        "mixed_qkv": f32([[1, 1, 2]]), "a": one, "b": one, "a_log": one[0], "dt_bias": one[0],
        "state": np.ones((2, 1)), "ring_d": nothing, "ring_k": nothing, "ring_g": nothing,
        "state_indices": i32([1]), "write_pos": i32([0]), "heads": 1, "scale": 1.0, "window": 4, "key_dim": 1,
        "value_dim": 1, "qk_l2norm": False,
    }  # fmt: skip
    return replay_step(**call | changes)


@literal("gdn_replay/3.hand")
def test_two_steps_by_hand() -> None:
    out, state, d, k, g = _by_hand()
    np.testing.assert_allclose(out, [[1.25]], rtol=1e-7)
    again = {"state": state, "ring_d": d, "ring_k": k, "ring_g": g, "write_pos": i32([1])}
    out, state, d, k, g = _by_hand(mixed_qkv=f32([[1, 1, 0]]), **again)
    np.testing.assert_allclose(out, [[0.3125]], rtol=1e-7)
    np.testing.assert_allclose(d[1, :2], [0.75, -0.3125], rtol=1e-7)
    assert (k[1, :2].tolist(), g[1, :2].tolist()) == ([1, 1], [-LN2, -LN2])
    assert state.tolist() == [[1], [1]]
    assert np.isnan(d[1, 2:]).all()


@literal("gdn_replay/4.forced")
def test_a_forced_step_writes_the_state_and_empties_the_ring() -> None:
    sizes = Sizes(4, 2, 4, 8, 6, 8)
    call = filled(sizes, i32([1, 1, 0, 1])) | {"force_flush": i32([0, 7, 1, 0])}
    _, after = _step(call, sizes)
    assert after["write_pos"].tolist() == [2, 0, 0, 2]
    changed = [s for s in range(6) if not same(after["state"][s], call["state"][s])]
    assert changed == [2]
    assert same(after["ring_d"][2], call["ring_d"][2])
    assert not same(after["ring_d"][1], call["ring_d"][1])
    unforced, _ = _step({**call, "force_flush": i32([0, 0, 0, 0])}, sizes)
    forced, _ = _step(call, sizes)
    np.testing.assert_allclose(forced, unforced, rtol=1e-5, atol=1e-6)


@literal("gdn_replay/5.apart")
def test_rows_stand_where_they_stand() -> None:
    """Rows at positions 0, 1, 2 … together are the rows alone."""
    sizes = Sizes(6, 2, 4, 8, 6, 4)
    call = filled(sizes, np.arange(6) % 4)
    out, after = _step(call, sizes)
    for n in range(6):
        only = np.where(np.arange(6) == n, call["state_indices"], -1).astype(np.int32)
        alone, then = _step({**call, "state_indices": only}, sizes)
        assert same(alone[n], out[n])
        slot = n + 1
        assert n == 2 or all(same(then[x][slot], after[x][slot]) for x in ("state", *RINGS))
    assert [same(after["state"][s], call["state"][s]) for s in range(8)] == [
        True, True, True, True, False, True, True, True,
    ]  # fmt: skip


@literal("gdn_replay/6.reuse")
def test_a_new_request_in_a_slot_reads_no_entry_of_the_last_one() -> None:
    sizes = Sizes(4, 2, 4, 8, 6, 4)
    call = filled(sizes, i32([3, 2, 0, 1])) | {"write_pos": i32([0, 0, 0, 0])}
    stale, _ = _step(call, sizes)
    poisoned, _ = _step({**call, **{n: np.full_like(call[n], np.nan) for n in RINGS}}, sizes)
    assert same(stale, poisoned)
    continued, _ = _step({**call, "write_pos": i32([3, 2, 0, 1])}, sizes)
    assert not same(continued, stale)


@literal("gdn_replay/7.padding")
def test_rows_without_a_slot_touch_nothing() -> None:
    sizes = Sizes(4, 2, 4, 8, 6, 4)
    call = operands(sizes) | {"state_indices": i32([0, -1, 3, 0])}
    out, after = _step(call, sizes)
    assert not out[[0, 1, 3]].any()
    assert out[2].all()
    for n in ("state", *RINGS):
        assert all(same(after[n][s], call[n][s]) for s in (0, 1, 2, 4, 5))


@literal("gdn_replay/8.heads")
def test_value_heads_of_a_group_append_one_key() -> None:
    sizes = Sizes(1, 2, 6, 8, 5, 4)
    call = operands(sizes)
    _, after = _step(call, sizes)
    keys = after["ring_k"][1].reshape(2, 4, 8)
    wanted = unit(call["mixed_qkv"][0, 16:32].astype(np.float64).reshape(2, 8))
    np.testing.assert_allclose(keys[:, 0], wanted, rtol=1e-6)
    assert np.isnan(keys[:, 1:]).all()
    assert not same(keys[0, 0], keys[1, 0])


def test_a_total_forgetting_in_the_ring_leaves_what_came_after() -> None:
    """A log decay of -inf: nothing before it counts, and nothing becomes NaN."""
    sizes = Sizes(1, 1, 1, 8, 6, 8)
    call = filled(sizes, i32([3]))
    call["ring_g"][1, 1] = -np.inf
    out, _ = _step(call, sizes)
    other, _ = _step({**call, "state": call["state"] * 2}, sizes)
    assert np.isfinite(out).all()
    assert same(out, other)
    later, _ = _step({**call, "ring_d": call["ring_d"] * 2}, sizes)
    assert not same(out, later)
