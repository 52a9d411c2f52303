"""Linear layers on this CPU: the bits of the sums in order and then of the declared epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.ir.interpret import run
from kiln.ir.spec import Ship
from kiln.recipes.gemm import matmul_bt_in_order
from kiln.recipes.linear import LINEAR, LINEAR_EPILOGUE
from kiln.runtime.errors import ContractError, SelectionError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]

BF16 = ml_dtypes.bfloat16
SIZES = [(1, 1, 1), (5, 33, 70), (17, 48, 0), (65, 16, 31)]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """`linear` for the best ISA tier of this machine; what its plan runs comes along."""
    out: Path = tmp_path_factory.mktemp("layers") / "tree"
    build_from(out, [cpu_target()], ["linear"], [CpuBackend()])
    with load(out, "cpu") as library:
        yield library


def _arrays(ship: Ship, m: int, n: int, k: int) -> dict[str, Any]:
    rng = np.random.default_rng([m, n, k])
    shapes = {"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, n)}
    made = {name: rng.standard_normal(shape).astype(ship.dtypes["T"].numpy) for name, shape in shapes.items()}
    return {name: array for name, array in made.items() if name not in ship.absent}


def _expected(arrays: dict[str, Any], alpha: float, activation: str = "none") -> Array:
    rest = dict(arrays)
    x, weight = rest.pop("x"), rest.pop("weight")
    total = matmul_bt_in_order(x, weight, np.float32)
    types = {"T": next(s.dtypes["T"] for s in LINEAR.ship if s.dtypes["T"].numpy == x.dtype)}
    given = {"total": total, "alpha": alpha, **rest}
    (want,) = run(LINEAR_EPILOGUE, given, attrs={"activation": activation}, dtypes=types)
    assert want is not None
    return np.asarray(want)


@pytest.mark.parametrize("number", range(len(LINEAR.ship)))
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_every_layer_that_is_shipped(layers: Library, number: int, m: int, n: int, k: int) -> None:
    ship = LINEAR.ship[number]
    activation = str(ship.attrs.get("activation", "none"))
    arrays = _arrays(ship, m, n, k)
    buffer = np.full((m, n + 7), 99, ship.dtypes["T"].numpy)
    layers.op("linear")(**arrays, alpha=0.37, activation=activation, out=buffer[:, 3 : 3 + n])
    assert buffer[:, 3 : 3 + n].tobytes() == _expected(arrays, 0.37, activation).tobytes()
    assert (buffer[:, :3] == 99).all()
    assert (buffer[:, 3 + n :] == 99).all()


def test_there_is_one_rounding() -> None:
    """1 + 2**-8 of the product is a tie that would round to 1, and then the bias lifts it no more."""
    x, weight = np.array([[1, 2**-8]], BF16), np.ones((1, 2), BF16)
    (got,) = run(LINEAR, {"x": x, "weight": weight, "bias": np.array([2**-8], BF16)})
    assert got is not None
    assert got.astype(np.float32).tolist() == [[1.0078125]]


def test_the_factor_is_of_the_product_alone_and_the_residual_comes_last() -> None:
    x, weight = np.array([[1, 2]], BF16), np.array([[1, 1], [2, -1], [-4, 0.5]], BF16)
    bias, residual = np.array([1, -1, 0], BF16), np.array([[10, 20, 30]], BF16)
    given = {"x": x, "weight": weight, "alpha": 2.0, "bias": bias}
    (plain,) = run(LINEAR, given)
    (rectified,) = run(LINEAR, {**given, "residual": residual}, attrs={"activation": "relu"})
    assert plain is not None
    assert rectified is not None
    assert plain.tolist() == [[7, -1, -6]]
    assert rectified.tolist() == [[17, 20, 30]]


def test_nothing_to_sum_gives_the_bias(layers: Library) -> None:
    bias = np.array([1, -2, 3], BF16)
    out = np.full((2, 3), 99, BF16)
    layers.op("linear")(np.zeros((2, 0), BF16), np.zeros((3, 0), BF16), bias, out=out)
    assert out.tolist() == [[1, -2, 3]] * 2


@pytest.mark.parametrize(("m", "n"), [(0, 3), (2, 0)])
def test_no_rows_and_no_columns_write_nothing(layers: Library, m: int, n: int) -> None:
    got = layers.op("linear")(np.ones((m, 4), BF16), np.ones((n, 4), BF16), np.ones(n, BF16))
    assert got.shape == (m, n)


def _of(absent: str) -> Ship:
    return next(s for s in LINEAR.ship if s.absent == (absent,) and not s.rare)


def test_a_residual_may_be_the_output(layers: Library) -> None:
    arrays = _arrays(_of("bias"), 5, 33, 70)
    want = _expected(arrays, 1.0)
    layers.op("linear")(**arrays, out=arrays["residual"])
    assert arrays["residual"].tobytes() == want.tobytes()


def test_what_is_not_a_number_stays_in_its_row(layers: Library) -> None:
    arrays = _arrays(_of("residual"), 5, 33, 70)
    clean = np.asarray(layers.op("linear")(**arrays))
    arrays["x"][3, 11] = np.nan
    got = np.asarray(layers.op("linear")(**arrays))
    assert np.isnan(got[3].astype(np.float32)).all()
    assert got[[0, 1, 2, 4]].tobytes() == clean[[0, 1, 2, 4]].tobytes()


X, SQUARE, BIAS = np.ones((8, 8), BF16), np.ones((8, 8), BF16), np.ones(8, BF16)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda f: f(X, np.ones((8, 9), BF16), BIAS), "linear: weight has K=9 but x gave K=8"),
        (lambda f: f(X, SQUARE, np.ones(7, BF16)), "linear: bias has N=7 but weight gave N=8"),
        (lambda f: f(X, SQUARE, BIAS, out=X), "out, which is written, overlaps that of x"),
        (lambda f: f(X, SQUARE, BIAS, out=SQUARE), "out, which is written, overlaps that of weight"),
        (lambda f: f(X, SQUARE, BIAS, activation="swish"), "found activation='swish', expected one of"),
        (lambda f: f(X, SQUARE, residual=X.astype(np.float32)), "residual is f32 but x is bf16"),
    ],
)
def test_refusals(layers: Library, call: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(ContractError) as caught:
        call(layers.op("linear"))
    assert told in str(caught.value)


def test_a_residual_that_overlaps_the_output_otherwise_is_refused(layers: Library) -> None:
    buffer = np.ones((9, 8), BF16)
    with pytest.raises(ContractError, match="out, which is written, overlaps that of residual"):
        layers.op("linear")(X, SQUARE, residual=buffer[:8], out=buffer[1:])


def test_what_is_not_shipped_is_told(layers: Library) -> None:
    with pytest.raises(SelectionError, match="linear: none of"):
        layers.op("linear")(X, SQUARE)
