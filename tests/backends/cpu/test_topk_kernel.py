"""The C top-k against the op's reference, and against literals, on every tier that runs here."""

from typing import Any, TypeAlias

import numpy as np
import pytest

from kiln.backends.cpu.variants.topk import PRIMITIVES
from kiln.recipes.topk import MAX_K, TOP_K_PAIRS
from kiln.tests.backends.cpu.native import Native, runnable_tiers

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES = {p.variant: dtype for p, dtype in zip(PRIMITIVES, ("float32", "bfloat16", "float16"), strict=True)}


def _call(kernel: Native, scores: Array, k: int, padding: int = 0) -> tuple[Array, Array]:
    """Run over poisoned outputs with a guard row behind them."""
    rows, width = scores.shape
    values = np.full((rows + 1, k), 77, scores.dtype)
    indices = np.full((rows + 1, k), -77, np.int32)
    stride = scores.strides[0] // scores.itemsize
    numbers = {"row_stride": stride, "limit": width - padding, "k": k}
    kernel({"scores": scores, "values": values, "indices": indices}, numbers, 0, rows)
    assert (values[rows].astype(np.float32) == 77).all()
    assert (indices[rows] == -77).all()
    return values[:rows], indices[:rows]


@pytest.fixture(scope="module", params=runnable_tiers())
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Native]:
    folder = tmp_path_factory.mktemp("topk")
    return {p.variant: Native(p, request.param, folder) for p in PRIMITIVES}


def _scores(rng: np.random.Generator, rows: int, width: int, dtype: str) -> Array:
    """Few distinct values, so that ties straddle k, with every special value among them."""
    pool = np.array([-np.inf, np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 2.5, 6e4, -6e4])
    plain = rng.standard_normal((rows, width)).astype(np.float32)
    return np.where(rng.random((rows, width)) < 0.3, rng.choice(pool, (rows, width)), plain).astype(dtype)


def _reference(scores: Array, k: int, num_org_vocab_padding: int = 0) -> tuple[Array, Array]:
    assert TOP_K_PAIRS.reference is not None
    values, indices = TOP_K_PAIRS.reference(scores=scores, k=k, num_org_vocab_padding=num_org_vocab_padding)
    return values, indices


def _same(got: tuple[Array, Array], want: tuple[Array, Array]) -> bool:
    return got[0].tobytes() == want[0].tobytes() and np.array_equal(got[1], want[1])


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(1, 1, 1), (3, 17, 17), (2, 64, 1), (2, 1000, 16), (1, 5000, MAX_K)]
)
def test_equals_the_reference(
    kernels: dict[str, Native], variant: str, rows: int, width: int, k: int
) -> None:
    rng = np.random.default_rng(width + k)
    for padding in (0, 1, width // 2, width):
        scores = _scores(rng, rows, width, DTYPES[variant])
        before = scores.tobytes()
        want = _reference(scores=scores, k=k, num_org_vocab_padding=padding)
        assert _same(_call(kernels[variant], scores, k, padding), want)
        assert scores.tobytes() == before


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_rows(kernels: dict[str, Native], order: int) -> None:
    scores = np.arange(3000, dtype=np.float32)[None, ::order].copy()
    assert _same(_call(kernels["f32"], scores, 40), _reference(scores=scores, k=40))


def test_a_strided_view_reads_its_own_columns_only(kernels: dict[str, Native]) -> None:
    wide = np.full((4, 300), np.inf, np.float32)
    wide[:, 10:150] = np.random.default_rng(0).standard_normal((4, 140))
    view = wide[:, 10:150]
    want = _reference(scores=view, k=9)
    assert _same(_call(kernels["f32"], view, 9), want)


def test_rows_are_independent_tiles(kernels: dict[str, Native]) -> None:
    scores = np.random.default_rng(1).standard_normal((5, 200)).astype(np.float32)
    values, indices = np.zeros((5, 4), np.float32), np.full((5, 4), -1, np.int32)
    operands = {"scores": scores, "values": values, "indices": indices}
    kernels["f32"](operands, {"row_stride": 200, "limit": 200, "k": 4}, 2, 3)
    want = _reference(scores=scores[2:3], k=4)
    assert _same((values[2:3], indices[2:3]), want)
    assert (indices[[0, 1, 3, 4]] == -1).all()


def test_the_oracle_tells_a_wrong_tie_apart(kernels: dict[str, Native]) -> None:
    scores = np.array([[4, 4, 4, 4, 4]], np.float32)
    values, indices = _call(kernels["f32"], scores, 3)
    assert indices.tolist() == [[0, 1, 2]]
    assert not _same((values, indices[:, ::-1]), _reference(scores=scores, k=3))
