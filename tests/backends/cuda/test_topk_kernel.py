"""The Triton top-k kernels in Triton's interpreter, on small tiles, against the ops' references."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.topk import TOP_K_MERGE, TOP_K_PAIRS, TOP_K_TILES
from kiln.tests.backends.cuda.interpreter import View, interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNELS = "kiln.backends.cuda.kernels.topk:"
USED, KEEP = 8, 16


def _scan(vec: int, tile: int = 128, threads: int = 16) -> dict[str, int]:
    """Constexprs of a scanning kernel, `vec` elements a load."""
    return {"TILE": tile, "THREADS": threads, "GROUPS": USED, "KEEP": KEEP, "VEC": vec}


def _row(scores: Array, k: int, padding: int, keep: int = KEEP, tile: int = 64) -> tuple[Array, Array]:
    """The kernel of any k and width; the rows after the last stay as they were."""
    rows, width = scores.shape
    values, indices = np.full((rows + 1, k), 77, scores.dtype), np.full((rows + 1, k), -77, np.int32)
    scratch = np.full((rows + 1, keep), -1, np.int64)
    numbers = (width, width, width - padding, k)
    arrays = (scores, values, indices, scratch)
    _, values, indices, scratch = interpret(
        f"{KERNELS}top_k_row", (rows,), *arrays, *numbers, TILE=tile, KEEP=keep
    )
    assert (indices[rows] == -77).all()
    assert (scratch[rows] == -1).all()
    return values[:rows], indices[:rows]


def _split(
    scores: Array, k: int, padding: int, constants: dict[str, int], lists: int | None = None
) -> tuple[Array, Array, Array]:
    """Both launches."""
    rows, width = scores.shape
    lists = lists or -(-width // constants["TILE"])
    packed = np.full((rows, lists * KEEP), -1, np.int64)
    scan = (width, width, width - padding, k, lists)
    scores, packed = interpret(f"{KERNELS}top_k_tiles", (rows, lists), scores, packed, *scan, **constants)
    values, indices = np.full((rows, k), 77, scores.dtype), np.full((rows, k), -77, np.int32)
    scratch = np.full((rows + 1, KEEP), -1, np.int64)
    sizes = {"LISTS": 8, "KEEP": KEEP, "USED": USED, "THREADS": 8, "GROUPS": 8, "VEC": 2}
    arrays = (packed, scores, values, indices, scratch)
    merge = (width, width - padding, k, lists)
    _, _, values, indices, scratch = interpret(f"{KERNELS}top_k_merge", (rows,), *arrays, *merge, **sizes)
    assert (scratch[rows] == -1).all()
    return packed, values, indices


def _reference(scores: Array, k: int, padding: int) -> tuple[Array, Array]:
    assert TOP_K_PAIRS.reference is not None
    values, indices = TOP_K_PAIRS.reference(scores=scores, k=k, num_org_vocab_padding=padding)
    return values, indices


def _same(got: tuple[Array, Array], want: tuple[Array, Array]) -> bool:
    return got[0].tobytes() == want[0].tobytes() and np.array_equal(got[1], want[1])


def _rows(kind: str, rows: int, width: int) -> Array:
    rng = np.random.default_rng(width)
    plain = rng.standard_normal((rows, width))
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40])
    one_group = plain.copy()
    one_group[:, ::64] = 50 + np.arange(one_group[:, ::64].shape[1])
    table = {
        "plain": plain,
        "ties": rng.integers(-2, 3, (rows, width)),
        "equal": np.full((rows, width), 2.5),
        "lowest": np.full((rows, width), -np.inf),
        "rising": np.sort(plain, axis=1),
        "falling": -np.sort(-plain, axis=1),
        "special": np.where(rng.random((rows, width)) < 0.4, rng.choice(special, (rows, width)), plain),
        "one_group": one_group,
    }
    return table[kind].astype(np.float32)


KINDS = ("plain", "ties", "equal", "lowest", "rising", "falling", "special", "one_group")


@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_equals_the_reference(kind: str) -> None:
    scores = _rows(kind, 2, 144)
    for k, padding in ((1, 0), (5, 3), (16, 140)):
        assert _same(_row(scores, k, padding), _reference(scores, k, padding))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "vec", "padding"), [(400, 1, 9), (400, 4, 0), (1000, 8, 990)])
def test_two_launches_equal_the_references(kind: str, width: int, vec: int, padding: int) -> None:
    scores, k, lists = _rows(kind, 1, width), 7, -(-width // 128)
    packed, values, indices = _split(scores, k, padding, _scan(vec))
    arguments = {"scores": scores, "k": k, "keep": KEEP, "lists": lists, "num_org_vocab_padding": padding}
    assert TOP_K_TILES.reference is not None
    assert TOP_K_MERGE.reference is not None
    assert packed.tobytes() == TOP_K_TILES.reference(**arguments, tile=128)[0].tobytes()
    assert _same((values, indices), TOP_K_MERGE.reference(packed=packed, **arguments))
    assert _same((values, indices), _reference(scores, k, padding))


def test_full_masks() -> None:
    """32 elements a thread, the sign bit of its mask included."""
    scores = _rows("rising", 1, 500)
    got = _split(scores, 8, 0, _scan(4, tile=512), lists=1)
    assert _same(got[1:], _reference(scores, 8, 0))


@pytest.mark.parametrize("kind", ["special", "ties"])
def test_bf16_scores_keep_their_bits(kind: str) -> None:
    scores = _rows(kind, 2, 256).astype(ml_dtypes.bfloat16)
    scores.view(np.uint16)[0, ::50] = 0xFFA1
    scores.view(np.uint16)[1, ::30] = 0x7FD5
    assert _same(_split(scores, 6, 0, _scan(8))[1:], _reference(scores, 6, 0))


@pytest.mark.parametrize("width", [8, 63, 64, 65])
def test_widths_around_the_tile(width: int) -> None:
    scores = _rows("ties", 1, width)
    assert _same(_row(scores, 8, 0), _reference(scores, 8, 0))
    assert _same(_split(scores, 8, 0, _scan(1, tile=64))[1:], _reference(scores, 8, 0))


def test_more_candidates_than_a_slice_ranks() -> None:
    scores = _rows("ties", 1, 600)
    assert _same(_row(scores, 200, 0, keep=256), _reference(scores, 200, 0))


def test_a_strided_view_reads_its_own_columns_only() -> None:
    wide = np.full((2, 200), np.inf, np.float32)
    wide[:, 16:112] = _rows("plain", 2, 96)
    values, indices = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.int32)
    arguments = (View(wide, 16), values, indices, np.zeros((2, KEEP), np.int64), 200, 96, 96, 4)
    _, values, indices, _ = interpret(f"{KERNELS}top_k_row", (2,), *arguments, TILE=64, KEEP=KEEP)
    assert _same((values, indices), _reference(wide[:, 16:112], 4, 0))


def test_a_view_sent_as_an_array_is_refused() -> None:
    with pytest.raises(ValueError, match="is a strided view: pass View"):
        _row(np.zeros((2, 200), np.float32)[:, 16:112], 4, 0)


def test_the_oracle_tells_a_wrong_tie_apart() -> None:
    scores = _rows("equal", 1, 64)
    values, indices = _row(scores, 3, 0)
    assert indices.tolist() == [[0, 1, 2]]
    assert not _same((values, indices[:, ::-1]), _reference(scores, 3, 0))
