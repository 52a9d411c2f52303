"""The chunked gated delta rule: its parts against the recurrence, and both against hand-worked numbers."""

from typing import Any, TypeAlias

import numpy as np
import pytest

from kiln.recipes.gdn_chunk import CHUNKED, OUTPUT, PREPARE, STATE, chunks, sequences
from kiln.recipes.gdn_chunk_walk import SOLVE, WALK
from kiln.tests.arrays import f32, i32
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]
Call: TypeAlias = dict[str, Any]


def call(
    lengths: list[int], heads: int, value_heads: int, key: int, value: int, dtype: Any = np.float32
) -> Call:
    """Random operands with normalized keys and queries."""
    rng = np.random.default_rng([*lengths, value_heads])
    rows = sum(lengths)

    def unit() -> Array:
        x = rng.standard_normal((rows, heads, key))
        made: Array = (x / np.linalg.norm(x, axis=-1, keepdims=True)).reshape(rows, heads * key).astype(dtype)
        return made

    return {
        "q": unit(), "k": unit(), "v": rng.standard_normal((rows, value_heads * value)).astype(dtype),
        "g": -rng.random((rows, value_heads)).astype(np.float32),
        "beta": rng.random((rows, value_heads)).astype(np.float32),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
        "initial_state": 0.1 * rng.standard_normal((len(lengths),
        value_heads * value * key)).astype(np.float32),
        "heads": heads, "scale": 0.25, "key_dim": key, "value_dim": value,
    }  # fmt: skip


def recurrence(given: Call) -> tuple[Array, Array]:
    """(out, final_state) of the declared oracle."""
    assert CHUNKED.reference is not None
    out, final = CHUNKED.reference(**given)
    return out, final


def in_parts(given: Call, **how: Any) -> tuple[Array, Array]:
    """The same from the references of the three parts; `how`: their chunk size and types."""
    assert PREPARE.reference is not None
    assert STATE.reference is not None
    assert OUTPUT.reference is not None
    seqs = {"seqs": len(given["initial_state"]), **how}
    own = {n: given[n] for n in ("k", "heads", "key_dim", "value_dim", "cu_seqlens")}
    decay, w, u = PREPARE.reference(**own, **seqs, **{n: given[n] for n in ("v", "g", "beta")})
    states, v_new, final = STATE.reference(
        **own, **seqs, w=w, u=u, decay=decay, initial_state=given["initial_state"]
    )
    (out,) = OUTPUT.reference(
        **own, **seqs, q=given["q"], v_new=v_new, states=states, decay=decay, scale=given["scale"]
    )
    return out, final


def in_two_parts(given: Call, **how: Any) -> tuple[Array, Array]:
    """The same from the references of the two parts that keep nothing in memory between them."""
    assert SOLVE.reference is not None
    assert WALK.reference is not None
    common = {n: given[n] for n in ("q", "k", "heads", "scale", "key_dim", "value_dim", "cu_seqlens")}
    common |= {"seqs": len(given["initial_state"]), **how}
    blocks, factors = SOLVE.reference(**common, g=given["g"], beta=given["beta"])
    out, final = WALK.reference(
        **common, v=given["v"], blocks=blocks, factors=factors, initial_state=given["initial_state"]
    )
    return out, final


def distance(found: Array, wanted: Array) -> float:
    """Relative L2 distance."""
    exact = wanted.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - exact) / max(float(np.linalg.norm(exact)), 1e-30))


HAND: Call = {
    "q": f32([[1, 0], [0, 1]]), "k": f32([[1, 0], [0.6, 0.8]]), "v": f32([[2, 0], [0, 4]]),
    "g": np.log(f32([[0.5], [0.5]])), "beta": f32([[0.5], [1]]), "cu_seqlens": i32([0, 2]),
    "initial_state": f32([[1, 0, 0, 2]]), "heads": 1, "scale": 1.0, "key_dim": 2, "value_dim": 2,
}  # fmt: skip


@literal("gdn_chunk/1.recurrence")
def test_two_tokens_by_hand() -> None:
    out, final = recurrence(HAND)
    np.testing.assert_allclose(out, [[1.25, 0], [-0.3, 3.38]], rtol=1e-6)
    np.testing.assert_allclose(final[0], [0.4, -0.3, 2.16, 3.38], rtol=1e-6)


@literal("gdn_chunk/1.parts")
def test_two_tokens_by_hand_in_parts() -> None:
    assert PREPARE.reference is not None
    own = {n: HAND[n] for n in ("k", "v", "g", "beta", "cu_seqlens", "heads")}
    _, w, u = PREPARE.reference(**own, seqs=1)
    np.testing.assert_allclose(u.astype(np.float32), f32([[1, 0], [-0.3, 4]]), rtol=4e-3)
    np.testing.assert_allclose(w.astype(np.float32), f32([[0.25, 0], [0.075, 0.2]]), rtol=4e-3)
    for out, final in (in_parts(HAND), in_two_parts(HAND)):
        np.testing.assert_allclose(out, [[1.25, 0], [-0.3, 3.38]], rtol=6e-3)
        np.testing.assert_allclose(final[0], [0.4, -0.3, 2.16, 3.38], rtol=6e-3)


@literal("gdn_chunk/7.chunks")
def test_chunks_of_ragged_sequences() -> None:
    assert [(n, a) for n, a, _ in chunks(i32([0, 65, 68]), 68)] == [(0, 0), (0, 64), (1, 65)]


@pytest.mark.parametrize(
    ("edges", "wanted"),
    [([0, 3, 3, 8], [(0, 3), (3, 3), (3, 8)]), ([5, 9, -2, 1], [(0, 8), (8, 8), (8, 8)]), ([7, 7], [(0, 8)])],
)
def test_sequences_cover_every_row_whatever_the_boundaries(edges: list[int], wanted: Any) -> None:
    assert sequences(i32(edges), 8) == wanted


@pytest.mark.parametrize("parts", [in_parts, in_two_parts])
@pytest.mark.parametrize("lengths", [[1], [64], [37], [1, 63, 64, 65, 0, 130]])
def test_parts_are_the_recurrence(lengths: list[int], parts: Any) -> None:
    given = call(lengths, 2, 4, 8, 8)
    for found, wanted in zip(parts(given), recurrence(given), strict=True):
        assert distance(found, wanted) < 8e-3


@pytest.mark.parametrize("parts", [in_parts, in_two_parts])
def test_parts_of_other_strengths_are_not_near(parts: Any) -> None:
    given = call([70], 2, 4, 8, 8)
    out, _ = parts(given | {"beta": given["beta"] * np.float32(0.9)})
    assert distance(out, recurrence(given)[0]) > 0.02


def test_a_sequence_split_in_two_ends_in_the_same_state() -> None:
    whole = call([37], 1, 2, 8, 8)
    out, final = recurrence(whole)
    parts = {n: whole[n] for n in ("q", "k", "v", "g", "beta")}
    head = whole | {n: x[:20] for n, x in parts.items()} | {"cu_seqlens": i32([0, 20])}
    first, middle = recurrence(head)
    tail = (
        whole
        | {n: x[20:] for n, x in parts.items()}
        | {"cu_seqlens": i32([0, 17]), "initial_state": middle}
    )
    second, end = recurrence(tail)
    np.testing.assert_allclose(np.concatenate([first, second]), out, atol=2e-6)
    np.testing.assert_allclose(end, final, atol=2e-6)


def test_without_updates_the_state_only_decays() -> None:
    given = call([5], 1, 1, 4, 4)
    given["beta"] = np.zeros_like(given["beta"])
    out, final = recurrence(given)
    np.testing.assert_allclose(final, given["initial_state"] * np.exp(given["g"].sum()), rtol=1e-5)
    asked = given["q"] @ given["initial_state"].reshape(4, 4).T
    np.testing.assert_allclose(out, 0.25 * np.exp(np.cumsum(given["g"], axis=0)) * asked, rtol=1e-5)


def test_an_orthonormal_key_recalls_its_value() -> None:
    given = call([3], 1, 1, 4, 4)
    given |= {
        "g": np.zeros((3, 1), np.float32),
        "beta": np.ones((3, 1), np.float32),
        "k": np.eye(4, dtype=np.float32)[:3],
    }
    _, final = recurrence(given)
    np.testing.assert_allclose(final.reshape(4, 4) @ given["k"].T, given["v"].T, atol=1e-6)


def test_a_long_decay_is_no_nan() -> None:
    given = call([64], 1, 1, 4, 4)
    given["g"] = np.full_like(given["g"], -10.0)
    out, final = in_parts(given)
    assert np.isfinite(out).all()
    assert np.isfinite(final).all()


def test_another_strength_is_not_near() -> None:
    given = call([70], 1, 2, 8, 8)
    wanted, _ = recurrence(given)
    out, _ = in_parts(given | {"beta": given["beta"] * 0.9})
    assert distance(out, wanted) > 0.02
