"""Calls of the C matrix products: any element types, strided rows, tiles in pieces, guarded memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from kiln.backends.cpu.compile import handwritten, source_text
from kiln.backends.cpu.toolchain import shared_object
from kiln.backends.cpu.variants.gemm import COLS, LAYOUTS, MODE_CODES, PRIMITIVES, ROWS, TYPE_CODES
from kiln.compiler.target import TARGETS, IsaTier
from kiln.recipes.gemm import MATMUL, MATMUL_BT
from kiln.recipes.gemm_packed import MATMUL_PACK, MATMUL_PACKED, pack
from kiln.runtime.cpu import load_object
from kiln.runtime.targets import cpu_features, cpu_target, missing_features
from kiln.tests.backends.cpu.guarded import Guarded

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
CODES = {d.name: code for d, code in TYPE_CODES.items()}
OPS = {op.name: op for op in (MATMUL_BT, MATMUL, MATMUL_PACKED, MATMUL_PACK)}
TARGET = TARGETS[cpu_target()]
EVERY_TIER = (*TARGET.tiers, *TARGET.extra_tiers)
RUNNABLE = tuple(t for t in EVERY_TIER if not missing_features(TARGET.name, t.features, cpu_features()))


@lru_cache(maxsize=4)
def source(op: str) -> str:
    """The C source of a matrix product."""
    return source_text(OPS[op], [handwritten(p) for p in PRIMITIVES if p.op == op])


@lru_cache(maxsize=32)
def loaded(op: str, tier: IsaTier) -> ctypes.CDLL:
    """The object of one tier, its own check passed."""
    return load_object(shared_object(source(op), TARGET, tier, op), op)


@dataclass(frozen=True)
class Product:
    """A matrix product on one tier."""

    op: str
    tier: IsaTier
    mode: str = "exact"

    def __call__(self, x: Array, weight: Array, out: str, split: int = 1) -> Array:
        """x times weight [N, K] transposed, laid out as the op wants it, in `split` pieces of tiles. Operands end
        at a page that may not be touched; rows of x and out lie apart, and what lies between must stay."""
        (m, k), n = x.shape, len(weight)
        given = guarded(x, k + 3)
        laid = {"bt": lambda: guarded(weight, k + 5), "nn": lambda: guarded(weight.T, n + 5)}
        held = laid.get(LAYOUTS[self.op], lambda: guarded(pack(weight).reshape(-1, 16), 16))()
        written = Guarded((m, n), np.dtype(DTYPES[out]), n + 7)
        written.poison()
        ptrs = (ctypes.c_void_p * 3)(given.address, held.address, written.address)
        names = (x.dtype.name, weight.dtype.name, np.dtype(DTYPES[out]).name)
        types = [CODES[next(n for n, d in DTYPES.items() if np.dtype(d).name == name)] for name in names]
        sizes = [m, n, k, given.stride, held.stride, written.stride]
        ints = (ctypes.c_int64 * 10)(*sizes, *types, MODE_CODES[self.mode])
        entry = loaded(self.op, self.tier)[f"kiln_{self.op}"]
        for begin, end in pieces(m, n, split):
            assert entry(ptrs, ints, None, ctypes.c_int64(begin), ctypes.c_int64(end)) == 0
        assert written.gaps_are()
        return written.view.copy()


def guarded(array: Array, stride: int) -> Guarded:
    """A copy whose rows are `stride` apart."""
    if array.size == 0:
        return Guarded((1, stride), array.dtype)
    made = Guarded(array.shape, array.dtype, stride)
    made.poison()
    made.view[:] = array
    return made


def pieces(m: int, n: int, split: int) -> Iterator[tuple[int, int]]:
    """Ranges of tiles, as threads take them."""
    tiles = -(-m // ROWS) * -(-n // COLS)
    return pairwise(int(e) for e in np.linspace(0, tiles, split + 1))


def operands(m: int, n: int, k: int, x: str, weight: str) -> tuple[Array, Array]:
    """Random x [M, K] and weight [N, K]."""
    rng = np.random.default_rng([m, n, k])
    return (
        rng.standard_normal((m, k)).astype(DTYPES[x]),
        rng.standard_normal((n, k)).astype(DTYPES[weight]),
    )
