"""The fast mode's bf16 products on the tiles of AMX: within their envelope whatever the values, and the same
bits however a call is cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kiln.backends.cpu.compile import handwritten, source_text
from kiln.backends.cpu.toolchain import shared_object
from kiln.backends.cpu.variants.gemm import LAYOUTS
from kiln.backends.cpu.variants.gemm_amx import DEPTH, PANEL, PRIMITIVES, ROWS, RUN, TIER
from kiln.runtime.cpu import load_object
from kiln.runtime.targets import cpu_features, missing_features
from kiln.runtime.tiles import tiles_refusal
from kiln.tests.backends.cpu.gemm_calls import (
    DTYPES,
    EVERY_TIER,
    OPS,
    PROMISE,
    TARGET,
    Array,
    Product,
    flushing,
    operands,
)
from kiln.tools.oracle import compare

AMX = next((t for t in EVERY_TIER if t.name == TIER), None)
LACKING = missing_features(TARGET.name, AMX.features, cpu_features()) if AMX else [TIER]
pytestmark = pytest.mark.skipif(
    bool(LACKING) or tiles_refusal() is not None,
    reason=f"this CPU has no AMX ({', '.join(LACKING)})" if LACKING else str(tiles_refusal()),
)
OUTS = ("bf16", "f32")
SHAPES = (
    (1, 1, 1), (5, 17, 33), (16, 64, 32), (8, 131, DEPTH + 31), (17, 16, DEPTH),
    (33, PANEL * RUN + 70, 2 * DEPTH + 2), (47, 65, 300), (ROWS + 19, PANEL + 1, 95),
)  # fmt: skip


@lru_cache(maxsize=3)
def entry_of(op: str) -> Any:
    """The entry of one layout of weight."""
    assert AMX is not None
    row = next(p for p in PRIMITIVES if p.op == op)
    made = shared_object(source_text(OPS[op], [handwritten(row)]), TARGET, AMX, op)
    return load_object(made, f"{op}.amx.so")[row.entry]


@dataclass(frozen=True)
class Tiled(Product):
    """A product on tiles."""

    def entry(self) -> Any:
        """See Product."""
        return entry_of(self.op)

    def tiles(self, m: int, n: int) -> int:
        """See Product."""
        return -(-m // ROWS) * -(-n // PANEL)


@pytest.fixture(params=LAYOUTS)
def product(request: pytest.FixtureRequest) -> Tiled:
    """One of each layout of weight."""
    assert AMX is not None
    return Tiled(request.param, AMX, "fast")


def near(got: Array, x: Array, weight: Array) -> str | None:
    """What is wrong with a product."""
    with np.errstate(over="ignore", invalid="ignore"):
        want = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(got.dtype)
    return compare(got, want, PROMISE).why


@pytest.mark.parametrize("out", OUTS)
def test_stays_in_its_envelope(product: Tiled, out: str) -> None:
    for m, n, k in SHAPES:
        x, weight = operands(m, n, k, "bf16", "bf16")
        assert near(product(x, weight, out), x, weight) is None, (m, n, k)


def test_pieces_and_rows_have_the_same_bits(product: Tiled) -> None:
    m, n, k = ROWS + 40, PANEL * (RUN + 2) - 3, DEPTH + 40
    x, weight = operands(m, n, k, "bf16", "bf16")
    whole = product(x, weight, "f32")
    for split in (2, 3, product.tiles(m, n)):
        assert product(x, weight, "f32", split).tobytes() == whole.tobytes()
    few = product(x[:7], weight, "f32")
    assert few.tobytes() == whole[:7].tobytes()


def test_nothing_to_sum_gives_zeros(product: Tiled) -> None:
    x, weight = operands(40, 70, 40, "bf16", "bf16")
    assert not product(x[:, :0], weight[:, :0], "bf16").view(np.uint8).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(product: Tiled, value: float) -> None:
    x, weight = operands(40, 70, 300, "bf16", "bf16")
    clean = product(x, weight, "bf16")
    x[19, 270] = value
    weight[66, 5] = value
    got = product(x, weight, "bf16")
    wide = got.astype(np.float32)
    assert not np.isfinite(wide[19]).any()
    assert not np.isfinite(wide[:, 66]).any()
    rest = np.ix_(np.arange(40) != 19, np.arange(70) != 66)
    assert got[rest].tobytes() == clean[rest].tobytes()


TINY = [(2.0**-130, 2.0**120), (2.0**120, 2.0**-130), (2.0**-62, 2.0**-62), (2.0**-70, 2.0**-60)]
"""Scales of x and weight: subnormal operands, products above and below the least normal number."""


@pytest.mark.parametrize(("of_x", "of_weight"), TINY)
def test_subnormal_values_count(product: Tiled, of_x: float, of_weight: float) -> None:
    x, weight = operands(37, 70, 300, "f32", "f32")
    x, weight = ((a * s).astype(DTYPES["bf16"]) for a, s in ((x, of_x), (weight, of_weight)))
    assert near(product(x, weight, "f32"), x, weight) is None
    with flushing() as times:
        got = product(x, weight, "f32")
        assert times(2.0**-130) == 0.0
    assert near(got, x, weight) is None


def test_one_subnormal_value_slows_its_neighbours_but_leaves_their_values(product: Tiled) -> None:
    x, weight = operands(20, 130, 600, "bf16", "bf16")
    clean = product(x, weight, "f32")
    weight[100, 300] = 1e-40
    got = product(x, weight, "f32")
    assert got[:, :PANEL].tobytes() == clean[:, :PANEL].tobytes()
    assert near(got, x, weight) is None


IN_USE = """
long long in_use(void);
long long in_use(void)
{
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return low >> 17 & 3;
}
"""


def test_tiles_are_released(product: Tiled) -> None:
    """Else every switch of threads would save and restore eight kilobytes."""
    assert AMX is not None
    host = load_object(shared_object(IN_USE, TARGET, AMX, "in_use"), "in_use.so")
    x, weight = operands(8, 64, 64, "bf16", "bf16")
    product(x, weight, "bf16")
    assert host.in_use() == 0
