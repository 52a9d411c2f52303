"""Top-k declarations: the reference against hand-worked rows, and the two halves against the whole."""

from typing import Any, TypeAlias

import numpy as np
import pytest

from kiln.recipes.topk import TOP_K_MERGE, TOP_K_PAIRS, TOP_K_TILES, order_keys
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]

INF, NAN = np.inf, np.nan


def _top_k(row: list[float], k: int, padding: int = 0) -> tuple[Array, list[int]]:
    assert TOP_K_PAIRS.reference is not None
    scores = np.array([row], np.float32)
    values, indices = TOP_K_PAIRS.reference(scores=scores, k=k, num_org_vocab_padding=padding)
    assert scores.tobytes() == np.array([row], np.float32).tobytes()
    return values[0], indices[0].tolist()


@pytest.mark.parametrize(
    ("row", "k", "padding", "values", "indices"),
    [
        pytest.param([2, 7, 7, 1, 7, 5], 2, 0, [7, 7], [1, 2], marks=literal("topk/1.two")),
        pytest.param([2, 7, 7, 1, 7, 5], 4, 0, [7, 7, 7, 5], [1, 2, 4, 5], marks=literal("topk/1.four")),
        pytest.param([5, 1, 5, 3, 3, 3, 0], 3, 0, [5, 5, 3], [0, 2, 3], marks=literal("topk/2.straddling")),
        pytest.param([4, 4, 4, 4, 4], 3, 0, [4, 4, 4], [0, 1, 2], marks=literal("topk/2.larger_group")),
        pytest.param([1, 2, 99, 98], 2, 2, [2, 1], [1, 0], marks=literal("topk/3.padded")),
        pytest.param([1, 2, 99, 98], 2, 0, [99, 98], [2, 3], marks=literal("topk/3.unpadded")),
        pytest.param([1, 2, 3, 9], 3, 3, [1, -INF, -INF], [0, 1, 2], marks=literal("topk/3.into_padding")),
        pytest.param([1, NAN, 3, NAN, 3], 4, 0, [NAN, NAN, 3, 3], [1, 3, 2, 4], marks=literal("topk/4.nan")),
        pytest.param(
            [INF, -INF, NAN, 0], 4, 0, [NAN, INF, 0, -INF], [2, 0, 3, 1], marks=literal("topk/4.infinities")
        ),
        pytest.param([-INF] * 4, 2, 0, [-INF, -INF], [0, 1], marks=literal("topk/6.all_minus_infinity")),
        pytest.param([1, 2, 3], 3, 0, [3, 2, 1], [2, 1, 0], marks=literal("topk/6.whole_row")),
    ],
)
def test_literals(row: list[float], k: int, padding: int, values: list[float], indices: list[int]) -> None:
    got = _top_k(row, k, padding)
    assert np.array_equal(got[0], np.array(values, np.float32), equal_nan=True)
    assert got[1] == indices


@literal("topk/5.three", "topk/5.two")
def test_zeros_are_equal_and_keep_their_sign() -> None:
    values, indices = _top_k([0.0, -0.0, 0.0, -1], 3)
    assert indices == [0, 1, 2]
    assert np.signbit(values).tolist() == [False, True, False]
    assert _top_k([-0.0, 0.0], 2)[1] == [0, 1]


def test_a_nan_keeps_its_payload() -> None:
    scores = np.array([[0x7FC00001, 0xFFC00002, 0x3F800000]], np.uint32).view(np.float32)
    assert TOP_K_PAIRS.reference is not None
    values, indices = TOP_K_PAIRS.reference(scores=scores, k=2)
    assert values.view(np.uint32).tolist() == [[0x7FC00001, 0xFFC00002]]
    assert indices.tolist() == [[0, 1]]


@literal("topk/7.keys")
def test_keys() -> None:
    scores = np.array([-INF, -1, 0, -0.0, 1, INF, NAN, -NAN], np.float32)
    keys = [0x007FFFFF, 0x407FFFFF, 0x80000000, 0x80000000, 0xBF800000, 0xFF800000, 0xFFFFFFFF, 0xFFFFFFFF]
    assert order_keys(scores).tolist() == keys


@literal("topk/7.raw")
def test_keys_without_the_two_exceptions_would_be_wrong() -> None:
    """The bits made monotonic alone put -0 below 0 and a negative NaN below -inf."""
    bits = np.array([-0.0, -NAN, -INF, 0], np.float32).view(np.uint32)
    raw = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000))
    assert raw.tolist() == [0x7FFFFFFF, 0x003FFFFF, 0x007FFFFF, 0x80000000]
    ours = order_keys(bits.view(np.float32))
    assert (ours != raw).tolist() == [True, True, False, False]


@pytest.mark.parametrize("lists", [1, 3, 8])
def test_the_split_does_not_change_the_result(lists: int) -> None:
    scores = np.random.default_rng(lists).integers(-9, 9, (3, 700)).astype(np.float32)
    arguments: dict[str, Any] = {"scores": scores, "k": 11, "num_org_vocab_padding": 5}
    assert TOP_K_TILES.reference is not None
    assert TOP_K_MERGE.reference is not None
    assert TOP_K_PAIRS.reference is not None
    (packed,) = TOP_K_TILES.reference(**arguments, keep=32, tile=-(-700 // lists), lists=lists)
    assert packed.shape == (3, lists * 32)
    merged = TOP_K_MERGE.reference(packed=packed, keep=32, lists=lists, **arguments)
    whole = TOP_K_PAIRS.reference(**arguments)
    assert merged[0].tobytes() == whole[0].tobytes()
    assert merged[1].tobytes() == whole[1].tobytes()


def test_refusals_are_declared() -> None:
    sentences = " ".join(sentence for _, sentence in TOP_K_PAIRS.constraints)
    for word in ("k must be at most 1024", "k must not exceed", "num_org_vocab_padding", "2**31"):
        assert word in sentences
    bounds = {s.name: s.minimum for s in TOP_K_PAIRS.scalars}
    assert bounds == {"k": 1, "num_org_vocab_padding": 0}


def test_exact_by_contract() -> None:
    assert TOP_K_PAIRS.contract.kind == "exact"
    assert [t.name for t in TOP_K_PAIRS.outputs] == ["values", "indices"]
