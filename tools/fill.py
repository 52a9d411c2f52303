"""Seeded operand values for test calls: rows of many kinds, so that one call meets zeros, ties and NaN at
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from kiln.runtime.dtypes import numpy_dtype
from kiln.runtime.entities import Signature
from kiln.tools.cases import Case, Fill, Slot
from kiln.tools.pools import INTEGERS, indexed_dims

Array: TypeAlias = np.ndarray[Any, Any]
Rng: TypeAlias = np.random.Generator

TINY = (1e-45, -1e-45, 1.1754942e-38, -1.1754944e-38, 3e-41, 6e-8, -6.1e-5)
SPECIALS = (
    0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 0.5, 2.5, 448.0, -449.0, 464.0, 6.0, 3.4028235e38,
    -3.4028235e38, 65504.0, 1e10, 88.0, -88.8, -104.0, 20.0, 0.625, 3.92, 87.0, -86.64, *TINY,
)  # fmt: skip
"""Values where functions change branch, types end and rounding ties."""


def _normal(rng: Rng, shape: tuple[int, ...]) -> Array:
    return 2.0 * rng.standard_normal(shape)


def _wide(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.choice((-1.0, 1.0), shape) * 10.0 ** rng.uniform(-6.0, 6.0, shape)


def _zeros(rng: Rng, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < rng.choice((0.0, 0.5)), 0.0, -0.0)


def _ties(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.integers(-8, 9, shape) / 4.0


def _tiny(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.choice(TINY, shape)


def _specials(rng: Rng, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < 0.5, rng.choice(SPECIALS, shape), _normal(rng, shape))


def _one(value: float) -> Callable[[Rng, tuple[int, ...]], Array]:
    def kind(rng: Rng, shape: tuple[int, ...]) -> Array:
        row = _normal(rng, shape)
        if row.size:
            row.reshape(-1)[int(rng.integers(row.size))] = value
        return row

    return kind


def _low(rng: Rng, shape: tuple[int, ...]) -> Array:
    return np.full(shape, -np.inf)


def _nan(rng: Rng, shape: tuple[int, ...]) -> Array:
    return np.full(shape, np.nan)


MIXED = (_normal, _ties, _specials, _wide, _zeros, _one(np.nan), _one(np.inf), _tiny, _low, _one(-1e30), _nan)
"""What successive rows hold; a call with a few rows takes the first of them, turned by its seed."""
SPECIAL = (_specials, _wide, _one(-np.inf), _ties)


def values(rng: Rng, shape: tuple[int, ...], fill: Fill, turn: int) -> Array:
    """Floats of one operand, in f64."""
    if fill == "normal" or not shape:
        return _normal(rng, shape)
    kinds = MIXED if fill == "mixed" else SPECIAL
    if len(shape) == 1:
        return _normal(rng, shape) if fill == "mixed" else _ties(rng, shape)
    made = [kinds[(row + turn) % len(kinds)](rng, shape[1:]) for row in range(shape[0])]
    return np.stack(made) if made else np.zeros(shape)


def operand(sig: Signature, case: Case, slot: Slot, finite: bool) -> Array:
    """The values of an input of a case. `finite` keeps to few and mild exceptions, for envelope contracts."""
    position = [s.tensor.name for s in case.slots].index(slot.tensor.name)
    rng = np.random.default_rng([case.seed, position, *slot.shape])
    if slot.dtype in INTEGERS:
        most = min((case.dims[d] for d in indexed_dims(sig)), default=128)
        draw = _distinct if _writes_table(sig) else _drawn
        return draw(rng, max(most, 1), slot.shape).astype(numpy_dtype(slot.dtype))
    if slot.dtype not in FLOATS:
        return rng.integers(0, 256, slot.shape).astype(numpy_dtype(slot.dtype))
    fill: Fill = "normal" if finite else case.fill
    data = values(rng, slot.shape, fill, case.seed + 3 * position)
    if finite and case.fill == "special" and data.size:
        data.reshape(-1)[int(rng.integers(data.size))] = (np.nan, np.inf, -np.inf)[position % 3]
    with np.errstate(all="ignore"):
        if slot.dtype == "f8e4m3":
            data = np.clip(data, -448.0, 448.0)
        return data.astype(np.float32).astype(numpy_dtype(slot.dtype))


def _drawn(rng: Rng, most: int, shape: tuple[int, ...]) -> Array:
    return rng.integers(0, most, shape)


def _distinct(rng: Rng, most: int, shape: tuple[int, ...]) -> Array:
    """No number twice, but -1 where there are not enough: rows that are written must not be shared."""
    count = int(np.prod(shape))
    found = np.full(count, -1)
    found[: min(count, most)] = rng.permutation(most)[:count]
    return rng.permutation(found).reshape(shape)


def _writes_table(sig: Signature) -> bool:
    """Whether rows that an index operand selects are written."""
    tables = indexed_dims(sig)
    leading = (t.shape[0][1] for t in sig.tensors if t.role == "inout" and len(t.shape) == 2)
    return not tables.isdisjoint(map(str, leading))


FLOATS = ("f32", "bf16", "f16", "f64", "f8e4m3")


def inputs(sig: Signature, case: Case, finite: bool) -> Mapping[str, Array]:
    """The values of everything that the case's call reads."""
    read = [s for s in case.slots if s.tensor.role != "out"]
    return {s.tensor.name: operand(sig, case, s, finite) for s in read}
