"""The Triton kernels of the chunked gated delta rule in Triton's interpreter, with small heads."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gdn_chunk import CHUNK, ENVELOPE, OUTPUT, PREPARE, STATE
from kiln.runtime.entities import Contract
from kiln.tests.arrays import i32
from kiln.tests.backends.cuda.interpreter import interpret, interpret_with
from kiln.tests.recipes.test_gdn_chunk import call, distance, recurrence
from kiln.tools.oracle import compare

Array: TypeAlias = np.ndarray[Any, Any]

KERNELS = "kiln.backends.cuda.kernels.gdn_chunk"
HEADS, VALUE_HEADS, KEY, VALUE, LANES = 1, 2, 16, 16, 16
BF16 = ml_dtypes.bfloat16
PROMISE = Contract(ENVELOPE.kind, ENVELOPE.rel_l2, ENVELOPE.max_eps)
SIZES = {"K": KEY, "V": VALUE, "LANES": LANES}


def _prepare(given: dict[str, Any], chunk: int = CHUNK) -> tuple[Array, Array, Array]:
    rows, seqs = len(given["k"]), len(given["initial_state"])
    decay = np.full((rows, VALUE_HEADS), np.nan, np.float32)
    w, u = (np.full((rows, VALUE_HEADS * n), np.nan, BF16) for n in (KEY, VALUE))
    grid = (-(-rows // chunk) + seqs, VALUE_HEADS)
    strides = (HEADS * KEY, VALUE_HEADS * VALUE, VALUE_HEADS, VALUE_HEADS)
    made = interpret_with(
        {"CHUNK": chunk}, f"{KERNELS}:prepare", grid,
        *(given[n] for n in ("k", "v", "g", "beta", "cu_seqlens")), decay, w, u,
        rows, seqs, VALUE_HEADS, HEADS, *strides, **SIZES, PART=16,
    )  # fmt: skip
    return made[5], made[6], made[7]


def _state(
    given: dict[str, Any], w: Array, u: Array, decay: Array, chunk: int = CHUNK
) -> tuple[Array, Array, Array]:
    rows, seqs = len(w), len(given["initial_state"])
    states = np.full((-(-rows // chunk) + seqs, VALUE_HEADS * KEY * VALUE), np.nan, BF16)
    fresh = np.full((rows, VALUE_HEADS * VALUE), np.nan, BF16)
    final = np.full_like(given["initial_state"], np.nan)
    made = interpret_with(
        {"CHUNK": chunk}, f"{KERNELS}:state", (1, seqs * VALUE_HEADS),
        given["k"], w, u, decay, given["initial_state"], given["cu_seqlens"], states, fresh, final,
        rows, seqs, VALUE_HEADS, HEADS, HEADS * KEY,
        **SIZES, BLOCK_V=VALUE, STAGES=1,
    )  # fmt: skip
    return made[6], made[7], made[8]


def _output(given: dict[str, Any], fresh: Array, states: Array, decay: Array, chunk: int = CHUNK) -> Array:
    rows, seqs = len(fresh), len(given["initial_state"])
    out = np.full((rows, VALUE_HEADS * VALUE), np.nan, np.float32)
    made = interpret_with(
        {"CHUNK": chunk}, f"{KERNELS}:output", (1, -(-rows // chunk) + seqs, VALUE_HEADS),
        given["q"], given["k"], fresh, states, decay, given["cu_seqlens"], out,
        rows, seqs, VALUE_HEADS, HEADS, given["scale"], HEADS * KEY, HEADS * KEY, VALUE_HEADS * VALUE,
        **SIZES, BLOCK_V=VALUE,
    )  # fmt: skip
    return made[6]


def _all(given: dict[str, Any], chunk: int = CHUNK) -> tuple[Array, Array]:
    decay, w, u = _prepare(given, chunk)
    states, fresh, final = _state(given, w, u, decay, chunk)
    return _output(given, fresh, states, decay, chunk), final


def _call(lengths: list[int]) -> dict[str, Any]:
    return call(lengths, HEADS, VALUE_HEADS, KEY, VALUE, BF16)


@pytest.mark.parametrize("lengths", [[1], [64], [1, 63, 65, 0, 70]])
def test_launches_give_the_recurrence(lengths: list[int]) -> None:
    given = _call(lengths)
    for found, wanted in zip(_all(given), recurrence(given), strict=True):
        assert distance(found, wanted) < 8e-3


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_launches_meet_the_contract_in_shorter_chunks_too(chunk: int) -> None:
    """The length is a constant of the module, 64 in every compiled kernel."""
    given = _call([0, 1, 15, 16, 17, 63, 64, 65, 127, 130])
    still = _call([0, 17, 65]) | {"scale": 1.0}
    still |= {n: np.zeros_like(still[n]) for n in ("g", "beta")}
    for each in (given, still):
        for found, wanted in zip(_all(each, chunk), recurrence(each), strict=True):
            assert compare(found, wanted, PROMISE).why is None


def test_a_chunk_of_128_is_beyond_the_levels_of_the_inverse() -> None:
    """It is built from blocks of 4, then 16, then 64: what is left of those is missing from a longer one."""
    given = _call([128])
    given["g"] = np.zeros_like(given["g"])
    wanted, _ = recurrence(given)
    assert distance(_all(given, 128)[0], wanted) > 0.1
    assert distance(_all(given, 64)[0], wanted) < 8e-3


@pytest.mark.parametrize("chunk", [16, 64])
def test_without_a_token_states_are_what_they_were(chunk: int) -> None:
    given = _call([0, 0])
    out, final = _all(given, chunk)
    assert out.shape == (0, VALUE_HEADS * VALUE)
    assert final.tobytes() == given["initial_state"].tobytes()


def test_each_launch_is_near_its_reference() -> None:
    given = _call([70, 20])
    own = {n: given[n] for n in ("k", "cu_seqlens", "heads", "key_dim", "value_dim")} | {"seqs": 2}
    assert PREPARE.reference is not None
    assert STATE.reference is not None
    assert OUTPUT.reference is not None
    decay, w, u = PREPARE.reference(**own, **{n: given[n] for n in ("v", "g", "beta")})
    for found, wanted in zip(_prepare(given), (decay, w, u), strict=True):
        assert distance(found, wanted) < 5e-3
    parts = STATE.reference(**own, w=w, u=u, decay=decay, initial_state=given["initial_state"])
    made = _state(given, w, u, decay)
    for mine, theirs in zip((made[0][:3], *made[1:]), (parts[0][:3], *parts[1:]), strict=True):
        assert distance(mine, theirs) < 6e-3
    (out,) = OUTPUT.reference(
        **own, q=given["q"], v_new=parts[1], states=parts[0], decay=decay, scale=given["scale"]
    )
    assert distance(_output(given, parts[1], parts[0], decay), out) < 6e-3


def test_a_sequence_does_not_see_its_neighbours() -> None:
    given = _call([65, 40])
    out, final = _all(given)
    given["v"] = given["v"].copy()
    given["v"][65:] = np.nan
    with_nan, left = _all(given)
    assert with_nan[:65].tobytes() == out[:65].tobytes()
    assert left[0].tobytes() == final[0].tobytes()
    assert np.isnan(with_nan[65:]).any()


def test_a_long_decay_is_no_nan() -> None:
    given = _call([64])
    given["g"] = np.full_like(given["g"], -10.0)
    assert all(np.isfinite(x).all() for x in _all(given))


def test_boundaries_that_go_back_stay_inside() -> None:
    given = _call([30, 30])
    given["cu_seqlens"] = i32([5, 90, -3])
    wanted = _all(given | {"cu_seqlens": i32([0, 60, 60])})
    for found, same in zip(_all(given), wanted, strict=True):
        assert found.tobytes() == same.tobytes()


def test_other_strengths_are_not_near() -> None:
    given = _call([70])
    wanted, _ = recurrence(given)
    out, _ = _all(given | {"beta": given["beta"] * np.float32(0.9)})
    assert distance(out, wanted) > 0.02


def _lower(rows: int, hardest: bool) -> Array:
    """beta_r (k_r . k_s) below the diagonal of the first rows of a chunk, in f16; zeros beyond them."""
    given = call([CHUNK], 1, 1, KEY, VALUE)
    k = np.tile(given["k"][:1], (CHUNK, 1)) if hardest else given["k"]
    beta = np.ones_like(given["beta"]) if hardest else given["beta"]
    live = np.arange(CHUNK) < rows
    inside = np.tril(np.outer(live, live), -1)
    return np.where(inside, beta * (k @ k.T), 0).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("hardest", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 63, 64])
def test_the_inverse_times_the_matrix_is_one(rows: int, hardest: bool) -> None:
    """f16 has 11 bits, and rows are sums of up to 64. The hardest: all keys are one, nothing decays."""
    a = _lower(rows, hardest)
    _, t = interpret("kiln.tests.backends.cuda.inverse_kernel:inverse", (1,), a, np.full_like(a, np.nan))
    assert np.array_equal(np.triu(t), np.eye(CHUNK))
    left = (np.eye(CHUNK) + a.astype(np.float64)) @ t - np.eye(CHUNK)
    assert np.abs(left).max() < 2.0**-8
    other = a.copy()
    other[-1, 0] += 0.1
    assert np.abs((np.eye(CHUNK) + other) @ t - np.eye(CHUNK)).max() > 0.05
