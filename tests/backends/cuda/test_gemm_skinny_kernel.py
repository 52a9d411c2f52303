"""The matrix products for few rows in Triton's interpreter, on small tiles."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.gemm import MATMUL_BT
from kiln.tests.backends.cuda.interpreter import View, interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNELS = "kiln.backends.cuda.kernels.gemm_skinny"
TILE = {"BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": 16}
NO_EPILOGUE: dict[str, Any] = {"EPILOGUE": None}


class SplitK:
    """`split_k` with the counters that it keeps from launch to launch."""

    def __init__(self, split: int, even: bool = False, kernel: str = "split_k") -> None:
        self.split, self.even, self.kernel = split, even, kernel
        self.arrivals = np.zeros(64, np.int32)

    def __call__(
        self, x: Array, weight: Array, out: Any = None, scales: tuple[Array, ...] = (), absent: int = 0
    ) -> Array:
        """Into a column slice of a poisoned buffer; partial sums are poisoned too. `scales` are x_scale,
        weight_scale and bias; the last `absent` programs do not run."""
        (m, k), n = x.shape, weight.shape[0]
        buffer = np.full((m + 1, n + 7), 99, x.dtype if out is None else out)
        tiles = -(-m // TILE["BLOCK_M"]) * -(-n // TILE["BLOCK_N"])
        partials = np.full(tiles * self.split * TILE["BLOCK_M"] * TILE["BLOCK_N"], np.nan, np.float32)
        steps: list[Any] = [int(s.size > 1) for s in scales[:2]] or [None] * 2
        arguments: list[Any] = [x, weight, *(scales or [None] * 3), View(buffer, 3), partials, self.arrivals]
        arguments += [m, n, k, k, k, n + 7, *steps, None]
        constants: dict[str, Any] = TILE | {"SPLIT": self.split, "EVEN_K": self.even, "IMPRECISE": None}
        grid = (tiles * self.split - absent,)
        *_, buffer, _, self.arrivals = interpret(
            f"{KERNELS}:{self.kernel}", grid, *arguments, **constants, **NO_EPILOGUE
        )
        assert (buffer[m] == 99).all()
        assert (buffer[:, :3] == 99).all()
        assert (buffer[:, 3 + n :] == 99).all()
        return buffer[:m, 3 : 3 + n].copy()


def _one_row(x: Array, weight: Array) -> Array:
    (m, k), n = x.shape, weight.shape[0]
    buffer = np.full((m + 1, n + 7), 99, x.dtype)
    arguments: list[Any] = [x, weight, View(buffer, 3), m, n, k, k, k, n + 7, None]
    constants: dict[str, Any] = {"BLOCK_N": 16, "BLOCK_K": 32, "STAGES": 2}
    *_, buffer = interpret(f"{KERNELS}:one_row", (-(-n // 16), m), *arguments, **constants, **NO_EPILOGUE)
    assert (buffer[m] == 99).all()
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, 3 + n :] == 99).all()
    return buffer[:m, 3 : 3 + n].copy()


def _operands(m: int, n: int, k: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    rng = np.random.default_rng(m + n + k)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)


def _error(got: Array, x: Array, weight: Array) -> float:
    """Relative L2 distance from the sums in float64."""
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    return float(np.linalg.norm(got.astype(np.float64) - exact) / max(float(np.linalg.norm(exact)), 1e-30))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("split", [1, 3, 4])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (8, 16, 16), (9, 33, 47), (16, 50, 96)])
def test_meets_the_contract(dtype: Any, split: int, m: int, n: int, k: int) -> None:
    x, weight = _operands(m, n, k, dtype)
    bound = 1e-6 if dtype is np.float32 else MATMUL_BT.contract.rel_l2
    assert _error(SplitK(split)(x, weight), x, weight) <= bound


def test_swapped_operands_do_not_meet_it() -> None:
    x, weight = _operands(16, 16, 16)
    assert _error(SplitK(2)(weight, x), x, weight) > MATMUL_BT.contract.rel_l2


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 33, 47), (3, 16, 96)])
def test_sums_without_matrix_units_meet_it(dtype: Any, m: int, n: int, k: int) -> None:
    x, weight = _operands(m, n, k, dtype)
    bound = 1e-6 if dtype is np.float32 else MATMUL_BT.contract.rel_l2
    assert _error(_one_row(x, weight), x, weight) <= bound


def test_whole_steps_need_no_mask() -> None:
    x, weight = _operands(5, 20, 64)
    for split in (1, 3):
        assert np.array_equal(SplitK(split, even=True)(x, weight), SplitK(split)(x, weight))


@pytest.mark.parametrize("split", [1, 2])
def test_nothing_to_sum_gives_zeros(split: int) -> None:
    pad = np.zeros((3, 1), np.float32)
    buffer, arrivals = np.full((3, 5), 99, np.float32), np.zeros(1, np.int32)
    partials = np.full(split * 8 * 16, np.nan, np.float32)
    arguments: list[Any] = [
        pad,
        pad,
        None,
        None,
        None,
        buffer,
        partials,
        arrivals,
        3,
        5,
        0,
        1,
        1,
        5,
        None,
        None,
        None,
    ]
    constants: dict[str, Any] = TILE | {"SPLIT": split, "EVEN_K": False, "IMPRECISE": None}
    *_, out, _, _ = interpret(f"{KERNELS}:split_k", (split,), *arguments, **constants, **NO_EPILOGUE)
    assert out.tolist() == [[0.0] * 5] * 3


def test_counters_are_zero_after_each_launch() -> None:
    """So that the next launch, of any shape, gives the same."""
    run, (x, weight) = SplitK(3), _operands(9, 40, 80)
    first = run(x, weight)
    assert not run.arrivals.any()
    assert np.array_equal(run(x, weight), first)
    assert np.array_equal(run(x[:1], weight[:5]), first[:1, :5])


def test_a_counter_left_over_is_seen() -> None:
    """What a kernel that does not reset them would leave."""
    run, (x, weight) = SplitK(3), _operands(9, 40, 80)
    first = run(x, weight)
    run.arrivals[:] = 3
    assert not np.array_equal(run(x, weight), first)


def test_the_last_program_of_a_tile_stores_it() -> None:
    run, (x, weight) = SplitK(3), _operands(8, 32, 80)
    got = run(x, weight, absent=1)
    assert run.arrivals[:2].tolist() == [0, 2]
    assert np.array_equal(got[:, :16], SplitK(3)(x, weight)[:, :16])
    assert (got[:, 16:] == 99).all()


def test_slices_are_added_in_their_order() -> None:
    """A large value that cancels swallows what was added before, and not what comes after."""
    x, weight = np.zeros((1, 48), np.float32), np.ones((1, 48), np.float32)
    x[0, [0, 16, 32]] = 1.0, 2.0**25, -(2.0**25)
    assert SplitK(3)(x, weight).tolist() == [[0.0]]
    x[0, [0, 16, 32]] = 2.0**25, -(2.0**25), 1.0
    assert SplitK(3)(x, weight).tolist() == [[1.0]]


@pytest.mark.parametrize("split", [1, 3])
def test_rows_have_their_bits_whatever_is_beside_them(split: int) -> None:
    x, weight = _operands(12, 20, 80)
    clean = SplitK(split)(x, weight)
    for m in (1, 7, 8, 9):
        assert np.array_equal(SplitK(split)(x[:m], weight), clean[:m])
    x[10, 3] = np.nan
    got = SplitK(split)(x, weight)
    assert np.isnan(got[10]).all()
    rest = [i for i in range(12) if i != 10]
    assert np.array_equal(got[rest], clean[rest])


def test_merged_weights_give_the_same_bits_as_separate_ones() -> None:
    x, weight = _operands(5, 40, 48)
    merged = SplitK(3)(x, weight)
    for begin, end in ((0, 13), (13, 40)):
        assert np.array_equal(merged[:, begin:end], SplitK(3)(x, weight[begin:end].copy()))


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("each", [False, True])
def test_scales_and_bias_are_applied_once(split: int, each: bool) -> None:
    x, weight = _operands(9, 20, 64)
    rng = np.random.default_rng(0)
    scales = [rng.random(size if each else 1).astype(np.float32) for size in (9, 20)]
    bias = rng.standard_normal(20).astype(np.float32)
    got = SplitK(split)(x, weight, scales=(*scales, bias))
    want = scales[0][:, None] * (scales[1] * SplitK(split)(x, weight)) + bias
    assert np.array_equal(got, want.astype(np.float32))


def test_one_rounding_to_the_type_of_the_output() -> None:
    x, weight = _operands(3, 20, 64, ml_dtypes.bfloat16)
    wide = SplitK(2)(x, weight, np.float32)
    assert np.array_equal(SplitK(2)(x, weight), wide.astype(ml_dtypes.bfloat16))
