"""The Triton top-k kernels in Triton's interpreter, on small tiles, against the ops' references."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.topk import TOP_K_MERGE, TOP_K_PAIRS, TOP_K_TILES
from kiln.tests.backends.cuda.interpreter import View, interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNELS = "kiln.backends.cuda.kernels.topk:"
KEEP, LOG_KEEP = 8, 3


def _scan(vec: int, groups: int = KEEP, tile: int = 64) -> dict[str, int | bool]:
    """Constexprs of a scanning kernel: `vec` elements a load, unmasked if more than one."""
    logs = {"LOG_GROUPS": groups.bit_length() - 1, "LOG_KEEP": LOG_KEEP}
    return {"TILE": tile, "GROUPS": groups, "KEEP": KEEP, **logs, "VEC": vec, "WHOLE": vec > 1}


def _row(scores: Array, k: int, padding: int, constants: dict[str, int | bool]) -> tuple[Array, Array]:
    rows, width = scores.shape
    values, indices = np.full((rows + 1, k), 77, scores.dtype), np.full((rows + 1, k), -77, np.int32)
    stride = scores.strides[0] // scores.itemsize
    numbers = (stride, width, width - padding, k)
    _, values, indices = interpret(
        f"{KERNELS}top_k_row", (rows,), scores, values, indices, *numbers, **constants
    )
    assert (indices[rows] == -77).all()
    return values[:rows], indices[:rows]


def _split(
    scores: Array, k: int, padding: int, constants: dict[str, int | bool], lists: int
) -> tuple[Array, Array, Array]:
    """Both launches; the chunk unit is the references'."""
    rows, width = scores.shape
    chunk = (width + lists * 128 - 1) // (lists * 128) * 128
    packed = np.full((rows, lists * KEEP), -1, np.int64)
    scan = (width, width, width - padding, k, chunk, lists)
    scores, packed = interpret(f"{KERNELS}top_k_tiles", (rows, lists), scores, packed, *scan, **constants)
    values, indices = np.full((rows, k), 77, scores.dtype), np.full((rows, k), -77, np.int32)
    merge = (width, width - padding, k, lists)
    sizes = {"LISTS": 2, "KEEP": KEEP, "LOG_ALL": LOG_KEEP + 1, "LOG_KEEP": LOG_KEEP}
    arrays = (packed, scores, values, indices)
    _, _, values, indices = interpret(f"{KERNELS}top_k_merge", (rows,), *arrays, *merge, **sizes)
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
@pytest.mark.parametrize("vec", [1, 4])
def test_one_launch_equals_the_reference(kind: str, vec: int) -> None:
    scores = _rows(kind, 2, 144)
    for k, padding in ((1, 0), (5, 3), (8, 140)):
        assert _same(_row(scores, k, padding, _scan(vec)), _reference(scores, k, padding))


@pytest.mark.parametrize("kind", ["ties", "special", "rising"])
@pytest.mark.parametrize(("lists", "vec"), [(1, 1), (3, 4), (4, 1)])
def test_two_launches_equal_the_references(kind: str, lists: int, vec: int) -> None:
    scores, k, padding = _rows(kind, 1, 400), 7, 9
    packed, values, indices = _split(scores, k, padding, _scan(vec), lists)
    arguments = {"scores": scores, "k": k, "keep": KEEP, "lists": lists, "num_org_vocab_padding": padding}
    assert TOP_K_TILES.reference is not None
    assert TOP_K_MERGE.reference is not None
    assert packed.tobytes() == TOP_K_TILES.reference(**arguments)[0].tobytes()
    assert _same((values, indices), TOP_K_MERGE.reference(packed=packed, **arguments))
    assert _same((values, indices), _reference(scores, k, padding))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sixteen_bit_scores(dtype: Any) -> None:
    with np.errstate(invalid="ignore"):
        scores = _rows("special", 2, 128).astype(dtype)
    assert _same(_row(scores, 6, 0, _scan(8)), _reference(scores, 6, 0))


def test_more_groups_than_slots() -> None:
    scores = _rows("ties", 2, 100)
    assert _same(_row(scores, 8, 0, _scan(1, groups=32)), _reference(scores, 8, 0))


@pytest.mark.parametrize("width", [8, 63, 64, 65])
def test_widths_around_the_tile(width: int) -> None:
    scores = _rows("ties", 1, width)
    assert _same(_row(scores, 8, 0, _scan(1)), _reference(scores, 8, 0))


def test_a_strided_view_reads_its_own_columns_only() -> None:
    wide = np.full((2, 200), np.inf, np.float32)
    wide[:, 16:112] = _rows("plain", 2, 96)
    values, indices = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.int32)
    arguments = (View(wide, 16), values, indices, 200, 96, 96, 4)
    _, values, indices = interpret(f"{KERNELS}top_k_row", (2,), *arguments, **_scan(1))
    assert _same((values, indices), _reference(wide[:, 16:112], 4, 0))


def test_a_view_sent_as_an_array_is_refused() -> None:
    with pytest.raises(ValueError, match="is a strided view: pass View"):
        _row(np.zeros((2, 200), np.float32)[:, 16:112], 4, 0, _scan(1))


def test_the_oracle_tells_a_wrong_tie_apart() -> None:
    scores = _rows("equal", 1, 64)
    values, indices = _row(scores, 3, 0, _scan(1))
    assert indices.tolist() == [[0, 1, 2]]
    assert not _same((values, indices[:, ::-1]), _reference(scores, 3, 0))
