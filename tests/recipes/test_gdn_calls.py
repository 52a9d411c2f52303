"""The delta rule's decode step through the runtime: where operands lie, which slots it touches, what types of
state keep, that it goes on where prefill ends, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.recipes.gdn import PACKED_DECODE
from kiln.recipes.gdn_chunk import CHUNKED
from kiln.recipes.ssm import POST_CONV
from kiln.runtime.errors import ContractError, KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.arrays import i32
from kiln.tests.backends.gdn_step import distance, expected, operands
from kiln.tests.recipes.literals import literal
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]
Call: TypeAlias = dict[str, Any]

BF16 = ml_dtypes.bfloat16
HEADS, VALUE_HEADS, KEY, VALUE, ROWS = 2, 4, 16, 8, 4
SIZES = {"heads": HEADS, "key_dim": KEY, "value_dim": VALUE}
NEVER = -1e4
"""A gate: exp of it is 0, and so is softplus, whose decay is then 1."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    out: Path = tmp_path_factory.mktemp("step") / "tree"
    build_from(out, [cpu_target()], [PACKED_DECODE.name, CHUNKED.name, POST_CONV.name], [CpuBackend()])
    with load(out, "cpu") as made:
        yield made


def _given(io: Any = np.float32, state: Any = np.float32) -> Call:
    return operands(ROWS, HEADS, VALUE_HEADS, KEY, VALUE, io, state)


def _step(library: Library, call: Call, **more: Any) -> tuple[Array, Array]:
    """(out, state) of a step on a copy of the state."""
    held = {**call, "state": call["state"].copy()}
    out, state = library.op(PACKED_DECODE.name)(**held, **{"scale": 0.25, **SIZES, **more})
    return np.asarray(out), np.asarray(state)


@literal("gdn/1.op", "gdn/2.op")
def test_a_step_by_hand(library: Library) -> None:
    """H = 1, HV = 2, K = V = 2, gates of zeros: alpha = beta = 1/2. Without norms, then with."""
    zeros = np.zeros((1, 2), np.float32)
    call = {
        "mixed_qkv": np.array([[3, 4, 0, 5, 1, 2, -1, 3]], np.float32), "a": zeros, "b": zeros,
        "a_log": zeros[0], "dt_bias": zeros[0], "state_indices": i32([1]),
        "state": np.array([[0] * 8, [1, 2, 3, 4, 0, 1, 1, 0]], np.float32),
    }  # fmt: skip
    sizes = {"heads": 1, "key_dim": 2, "value_dim": 2}
    out, state = _step(library, call, **sizes, scale=1.0, qk_l2norm=False)
    assert out.tolist() == [[-34.5, -67.5, -33.0, 31.5]]
    assert state[1].tolist() == [0.5, -9, 1.5, -18, 0, -8.25, 0.5, 7.5]
    out, state = _step(library, call, **sizes, scale=2**-0.5)
    np.testing.assert_allclose(out[0], [0.77781745, 1.76776693, -0.14142134, 1.06066013], rtol=1e-6)
    wanted = [0.5, 1.00000001, 1.5, 2.00000002, 0, -0.24999998, 0.5, 1.49999997]
    np.testing.assert_allclose(state[1], wanted, atol=1e-6)


@pytest.mark.parametrize("io", [np.float32, np.float16, BF16])
def test_views_are_as_good_as_copies(library: Library, io: Any) -> None:
    """The packed row in a wider buffer, a and b as halves of one tensor, slots apart: byte for byte."""
    call = _given(io)
    assert not call["mixed_qkv"].flags.c_contiguous
    assert not call["a"].flags.c_contiguous
    pool = np.full((len(call["state"]), call["state"].shape[1] + 48), np.nan, np.float32)
    pool[:, 16:-32] = call["state"]
    out = np.empty((ROWS, VALUE_HEADS * VALUE), io)
    library.op(PACKED_DECODE.name)(**{**call, "state": pool[:, 16:-32]}, scale=0.25, **SIZES, out=(out, None))
    plain, state = _step(library, {n: np.ascontiguousarray(x) for n, x in call.items()})
    assert out.tobytes() == plain.tobytes()
    assert np.ascontiguousarray(pool[:, 16:-32]).tobytes() == state.tobytes()
    assert np.isnan(pool[:, :16]).all()
    assert np.isnan(pool[:, -32:]).all()


@pytest.mark.parametrize("kept", [np.float32, BF16, np.float16])
def test_slots_that_no_row_names_keep_their_bits(library: Library, kept: Any) -> None:
    """NaN with payloads there changes nothing elsewhere, and stays."""
    call = _given(np.float16 if kept is np.float16 else BF16, kept) if kept is not np.float32 else _given()
    call["state_indices"] = i32([3, 0, -1, 1])
    out, state = _step(library, call)
    unused = [0, 2, 4, 5]
    dirty = call["state"].copy()
    dirty[unused] = np.nan
    codes = dirty.view(np.uint8).reshape(len(dirty), -1)
    codes[unused, ::2] ^= 1
    again, left = _step(library, {**call, "state": dirty})
    assert again.tobytes() == out.tobytes()
    assert not out[1:3].any()
    assert left[unused].tobytes() == dirty[unused].tobytes()
    assert left[[1, 3]].tobytes() == state[[1, 3]].tobytes()
    assert state[[1, 3]].tobytes() != call["state"][[1, 3]].tobytes()


def test_a_state_may_be_written_elsewhere(library: Library) -> None:
    """Only the slots of rows are: the rest of the other buffer is not touched."""
    call = _given()
    _, wanted = _step(library, call)
    kept, other = call["state"].copy(), np.full_like(call["state"], np.nan)
    out = np.empty((ROWS, VALUE_HEADS * VALUE), np.float32)
    library.op(PACKED_DECODE.name)(**call, scale=0.25, **SIZES, out=(out, other))
    named = call["state_indices"][call["state_indices"] > 0]
    assert other[named].tobytes() == wanted[named].tobytes()
    assert np.isnan(np.delete(other, named, axis=0)).all()
    assert call["state"].tobytes() == kept.tobytes()


def test_a_state_that_overlaps_what_it_is_written_to_is_refused(library: Library) -> None:
    call = _given()
    pool = np.zeros((len(call["state"]) + 1, call["state"].shape[1]), np.float32)
    shifted = {**call, "state": pool[:-1]}
    out = np.empty((ROWS, VALUE_HEADS * VALUE), np.float32)
    with pytest.raises(ContractError, match="overlap"):
        library.op(PACKED_DECODE.name)(**shifted, scale=0.25, **SIZES, out=(out, pool[1:]))


def test_rows_that_share_a_slot_touch_no_other(library: Library) -> None:
    """Which of them is later is not said; rows without a slot may be any number."""
    call = _given() | {"state_indices": i32([2, 2, 0, 0])}
    out, state = _step(library, call)
    assert np.isfinite(out).all()
    assert not out[2:].any()
    rest = [0, 1, 3, 4, 5]
    assert state[rest].tobytes() == call["state"][rest].tobytes()
    assert state[2].tobytes() != call["state"][2].tobytes()


@pytest.mark.parametrize(("io", "kept"), [(np.float32, np.float32), (BF16, BF16), (np.float16, np.float16)])
def test_zero_gates_keep_every_state_as_it_is(library: Library, io: Any, kept: Any) -> None:
    """No decay, no update: what a type holds goes through f32 and back, subnormals too; out = scale S q."""
    call = _given(io, kept)
    codes = np.random.default_rng(4).integers(0, 1 << 8 * np.dtype(kept).itemsize, call["state"].shape)
    held = codes.astype(f"u{np.dtype(kept).itemsize}").view(kept)
    # Of zeros the sign is not kept, and products of the largest overflow.
    size = np.abs(np.nan_to_num(held.astype(np.float32), nan=np.inf))
    plain = (size < 1e4) & (size > 0)
    call["state"] = np.where(plain, held, np.asarray(1, kept)).astype(kept)
    off = {"a": np.full_like(call["a"], NEVER), "b": np.full_like(call["b"], NEVER)}
    call |= off | {"dt_bias": np.zeros_like(call["dt_bias"])}
    out, state = _step(library, call, scale=1.0)
    assert state.tobytes() == call["state"].tobytes()
    wanted, _ = expected(call, HEADS, KEY, VALUE, 1.0)
    assert distance(out, wanted) < (3e-6 if io is np.float32 else 2**-8)
    updated, moved = _step(library, call | {"b": np.zeros_like(call["b"])}, scale=1.0)
    assert moved.tobytes() != state.tobytes()
    assert updated.tobytes() != out.tobytes()


TIES = ((BF16, 2.0**-7), (np.float16, 2.0**-10))
"""Type of a state and its spacing at 1."""


@pytest.mark.parametrize(("kept", "ulp"), TIES)
def test_a_state_is_rounded_to_nearest_even(library: Library, kept: Any, ulp: float) -> None:
    """Onto a state of zeros, beta 1: v k^T of products halfway between two numbers, in vectors and behind."""
    key = 19
    call = operands(1, 1, 1, key, 2, kept, kept) | {"state_indices": i32([1])}
    row = [1.5] * 2 * key + [1 + ulp, 1 + 3 * ulp]
    call |= {"mixed_qkv": np.array([row], kept), "b": np.full((1, 1), -NEVER, kept)}
    call["state"] = np.zeros_like(call["state"])
    _, state = _step(library, call, heads=1, key_dim=key, value_dim=2, scale=1.0, qk_l2norm=False)
    wanted = np.repeat([1.5 + 2 * ulp, 1.5 + 4 * ulp], key)
    assert state[1].astype(np.float64).tolist() == wanted.tolist()


@pytest.mark.parametrize("io", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_scale_of_1_is_one(library: Library, io: Any, scale: float) -> None:
    call = _given(io)
    out, _ = _step(library, call, scale=scale)
    bound = 3e-6 if io is np.float32 else 2**-8
    assert distance(out, expected(call, HEADS, KEY, VALUE, scale)[0]) < bound
    assert distance(out, expected(call, HEADS, KEY, VALUE, scale / 2)[0]) > 0.1


@pytest.mark.parametrize("io", [np.float32, np.float16, BF16])
def test_the_upstream_grid(library: Library, io: Any) -> None:
    """32 rows, H 4, HV 8, K = V = 128; the last three rows have no slot."""
    call = operands(32, 4, 8, 128, 128, io, np.float32)
    call["state_indices"][-3:] = -1
    sizes = {"heads": 4, "key_dim": 128, "value_dim": 128}
    out, state = _step(library, call, **sizes, scale=128**-0.5)
    wanted, pool = expected(call, 4, 128, 128, 128**-0.5)
    rtol, atol = (1e-4, 1e-4) if io is np.float32 else (1e-2, 2e-2)
    np.testing.assert_allclose(out.astype(np.float32), wanted, rtol=rtol, atol=atol)
    np.testing.assert_allclose(state, pool, rtol=rtol, atol=atol)
    assert not out[-3:].any()
    assert distance(state, pool) < 1e-6


def test_many_heads_of_one_without_slots_are_zeros(library: Library) -> None:
    call = operands(1024, 1, 64, 1, 1, np.float32, np.float32)
    call["state"], call["state_indices"] = call["state"][:4], np.zeros(1024, np.int32)
    out, state = _step(library, call, heads=1, key_dim=1, value_dim=1)
    assert out.shape == (1024, 64)
    assert not out.any()
    assert state.tobytes() == call["state"].tobytes()


@pytest.mark.parametrize("io", [np.float32, BF16])
def test_a_step_goes_on_where_prefill_ends(library: Library, io: Any) -> None:
    """T tokens at once are T - 1, then a step: raw rows go through the split after the convolution first."""
    tokens, rng = 70, np.random.default_rng(11)
    raw = rng.standard_normal((tokens, 2 * HEADS * KEY + VALUE_HEADS * VALUE)).astype(io)
    a, b = (rng.standard_normal((tokens, VALUE_HEADS)).astype(io) for _ in "ab")
    layer = {n: rng.standard_normal(VALUE_HEADS).astype(np.float32) for n in ("a_log", "dt_bias")}
    start = 0.1 * rng.standard_normal((1, VALUE_HEADS * VALUE * KEY)).astype(np.float32)

    def prefill(n: int) -> tuple[Array, Array]:
        parts = library.op(POST_CONV.name)(raw[:n], a[:n], b[:n], **layer, **SIZES)
        edges = i32([0, n])
        out, final = library.op(CHUNKED.name)(*parts, edges, start, **SIZES, scale=0.25)
        return np.asarray(out), np.asarray(final)

    whole, final = prefill(tokens)
    before, middle = prefill(tokens - 1)
    assert before.tobytes() == whole[:-1].tobytes()
    pool = np.concatenate([np.zeros_like(middle), middle])
    last = {"mixed_qkv": raw[-1:], "a": a[-1:], "b": b[-1:], **layer, "state_indices": i32([1])}
    out, state = _step(library, last | {"state": pool})
    # Prefill rounds normalized keys to the rows' type, and a step rounds beta to that of b.
    bound = 1e-5 if io is np.float32 else 2.0**-7
    assert distance(out, whole[-1:]) < bound
    assert distance(state[1:], final) < bound
    stale, _ = _step(library, last | {"state": np.concatenate([pool[:1], start])})
    assert distance(stale, whole[-1:]) > 10 * bound


REFUSED: tuple[tuple[Call, Call, str], ...] = (
    (
        {"mixed_qkv": np.zeros((ROWS, 95), np.float32)},
        {},
        "axis 1 of mixed_qkv has extent 95, expected .* = 96",
    ),
    ({"mixed_qkv": np.zeros(96, np.float32)}, {}, "B=1|B=4"),
    (
        {"mixed_qkv": np.asfortranarray(np.zeros((ROWS, 96), np.float32))},
        {},
        "elements of a row of mixed_qkv",
    ),
    ({"mixed_qkv": np.zeros((ROWS, 96), np.int32)}, {}, "mixed_qkv is i32, expected one of bf16, f16, f32"),
    ({"a": np.zeros((ROWS, 3), np.float32)}, {}, "HV=3"),
    ({"b": np.zeros((ROWS, 4), BF16)}, {}, "b is bf16 but mixed_qkv is f32"),
    ({"a_log": np.zeros(3, np.float32)}, {}, "HV=3"),
    ({"dt_bias": np.zeros(5, np.float32)}, {}, "HV=5"),
    ({"state_indices": np.zeros(3, np.int32)}, {}, "B=3"),
    ({"state_indices": np.zeros((ROWS, 2), np.int32)}, {}, "state_indices has shape"),
    ({"state_indices": np.zeros(ROWS, np.int16)}, {}, "state_indices is i16"),
    ({"state": np.zeros((6, 511), np.float32)}, {}, "axis 1 of state has extent 511, expected .* = 512"),
    ({"state": np.zeros((6, 4, VALUE, KEY), np.float32)}, {}, "axis 1 of state has extent 16, expected"),
    ({"state_indices": i32([1, 6, 0, 2])}, {}, "row 1 holds an index that is out of range"),
    ({}, {"heads": 3}, "HV must be divisible by H|axis 1 of mixed_qkv"),
    ({}, {"scale": 0.0}, "scale is 0"),
    ({}, {"out": (np.zeros((ROWS, 31), np.float32), None)}, "axis 1 of out has extent 31, expected .* = 32"),
)


@pytest.mark.parametrize(("changed", "scalars", "why"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    library: Library, changed: Call, scalars: Call, why: str
) -> None:
    call = _given()
    with pytest.raises(KilnError, match=why):
        _step(library, call | changed, **scalars)
    _step(library, call)
