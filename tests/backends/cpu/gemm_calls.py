"""Calls of the C matrix products: any element types, strided rows, tiles in pieces, guarded memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from kiln.backends.cpu.compile import handwritten, source_text
from kiln.backends.cpu.toolchain import shared_object
from kiln.backends.cpu.variants.gemm import COLS, LAYOUTS, MODE_CODES, PRIMITIVES, ROWS, TYPE_CODES, Mix
from kiln.compiler.target import TARGETS, IsaTier
from kiln.recipes.gemm import ENVELOPE, MATMUL, MATMUL_BT
from kiln.recipes.gemm_packed import MATMUL_PACK, MATMUL_PACKED, pack
from kiln.runtime.cpu import load_object
from kiln.runtime.entities import Contract
from kiln.runtime.targets import cpu_features, cpu_target, missing_features
from kiln.tests.backends.cpu.guarded import Guarded
from kiln.tools.oracle import compare

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
CODES = {d.name: code for d, code in TYPE_CODES.items()}
OPS = {op.name: op for op in (MATMUL_BT, MATMUL, MATMUL_PACKED, MATMUL_PACK)}
TARGET = TARGETS[cpu_target()]
EVERY_TIER = (*TARGET.tiers, *TARGET.extra_tiers)
FEATURES = cpu_features() | {"sse4a"}
"""Where it is missing, what asks for it runs as well, only slower."""
RUNNABLE = tuple(t for t in EVERY_TIER if not missing_features(TARGET.name, t.features, FEATURES))


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
        """x times weight [N, K] transposed, laid out as the op wants it, in `split` pieces of tiles.

        Operands end at a page that may not be touched; rows of x and out lie apart; what is between stays.
        """
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
        for begin, end in pairwise(int(e) for e in np.linspace(0, self.tiles(m, n), split + 1)):
            assert self.entry()(ptrs, ints, None, ctypes.c_int64(begin), ctypes.c_int64(end)) == 0
        assert written.gaps_are()
        return written.view.copy()

    def entry(self) -> Any:
        """The function."""
        return loaded(self.op, self.tier)[f"kiln_{self.op}"]

    def tiles(self, m: int, n: int) -> int:
        """How many tiles an output [m, n] has."""
        return -(-m // ROWS) * -(-n // COLS)


class Sparse:
    """Rows of 16-bit elements that lie far apart, in memory that exists where it is touched."""

    def __init__(self, rows: int, apart: int, dtype: Any) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, 2 * (apart * (rows - 1) + 64), flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        flat: Array = np.frombuffer(self._map, dtype)
        self.rows: Array = np.lib.stride_tricks.as_strided(flat, (rows, 64), (2 * apart, 2))


FLUSH = """
#if defined(__aarch64__)
long long mode(void) { long long bits; __asm__ volatile("mrs %0, fpcr" : "=r"(bits)); return bits; }
void set(long long bits) { __asm__ volatile("msr fpcr, %0" : : "r"(bits)); }
long long flushed(void) { return mode() | 1ll << 24; }
#else
long long mode(void) { return __builtin_ia32_stmxcsr(); }
void set(long long bits) { __builtin_ia32_ldmxcsr((unsigned)bits); }
long long flushed(void) { return mode() | 0x8040 | 0x6000; } /* and truncate */
#endif
float times(float x, float y) { return x * y; }
"""


@contextmanager
def flushing() -> Iterator[Callable[[float], float]]:
    """Subnormals are flushed to zero, on x86 results truncated too; gives a product with one."""
    host = load_object(shared_object(FLUSH, TARGET, TARGET.tiers[0], "flush"), "flush.so")
    for name in ("mode", "flushed"):
        host[name].restype = ctypes.c_int64
    host.set.argtypes, host.times.argtypes = [ctypes.c_int64], [ctypes.c_float] * 2
    host.times.restype = ctypes.c_float
    before = host.mode()
    host.set(host.flushed())
    try:
        yield lambda x: float(host.times(x, 1.0))
    finally:
        host.set(before)


def guarded(array: Array, stride: int) -> Guarded:
    """A copy whose rows are `stride` apart."""
    if array.size == 0:
        return Guarded((1, stride), array.dtype)
    made = Guarded(array.shape, array.dtype, stride)
    made.poison()
    made.view[:] = array
    return made


def operands(m: int, n: int, k: int, x: str, weight: str) -> tuple[Array, Array]:
    """Random x [M, K] and weight [N, K]."""
    rng = np.random.default_rng([m, n, k])
    return (
        rng.standard_normal((m, k)).astype(DTYPES[x]),
        rng.standard_normal((n, k)).astype(DTYPES[weight]),
    )


PROMISE = Contract(ENVELOPE.kind, ENVELOPE.rel_l2, ENVELOPE.max_eps)
"""Of the fast mode."""


def check_envelope(product: Product, mix: Mix, m: int, n: int, k: int) -> None:
    """A product of random operands keeps the fast mode's promise."""
    x, weight = operands(m, n, k, mix.x.name, mix.weight.name)
    want = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(DTYPES[mix.out.name])
    assert compare(product(x, weight, mix.out.name), want, PROMISE).why is None, (m, n, k)


def check_zeros_and_nan(product: Product, mix: Mix, m: int, n: int) -> None:
    """Nothing to sum gives zeros, and a NaN stays in its row."""
    x, weight = operands(m, n, 40, mix.x.name, mix.weight.name)
    assert not product(x[:, :0], weight[:, :0], mix.out.name).view(np.uint8).any()
    clean = product(x, weight, mix.out.name)
    x[2, 3] = np.nan
    got = product(x, weight, mix.out.name)
    assert np.isnan(got[2].astype(np.float32)).all()
    assert np.delete(got, 2, 0).tobytes() == np.delete(clean, 2, 0).tobytes()
