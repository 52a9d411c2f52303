"""The C packing of projections: the table's rows on every tier and for every split, and not a byte beside
them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from kiln.backends.cpu.variants.gdn_pack import PRIMITIVES
from kiln.ir.dtypes import DTYPES
from kiln.tests.backends.cpu.aarch64 import MISSING, QEMU
from kiln.tests.backends.cpu.aarch64 import call as on_neon
from kiln.tests.backends.cpu.guarded import Guarded
from kiln.tests.backends.cpu.native import Native, render, runnable_tiers
from kiln.tests.recipes.test_gdn_pack import operands, wanted

Array: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, int, int, int]

SHAPES: tuple[Shape, ...] = ((2, 3, 0, 5), (4, 5, 3, 31), (4, 1, 2, 33), (2, 1, 1, 200))
"""Key heads, rows of v and of q of one, columns: rows of 5 to 800 bytes, none of them a multiple of 64."""
ONE = {str(p.constants["split"]): p for p in PRIMITIVES}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Native]]:
    folder: Path = tmp_path_factory.mktemp("gdn_pack")
    return {
        fused: {t: Native(ONE[str(not fused)], t, folder) for t in runnable_tiers()}
        for fused in (False, True)
    }


def _held(x: Array, gap: int, at_end: bool) -> Guarded:
    made = Guarded(x.shape, x.dtype, x.shape[1] + gap, at_end=at_end)
    made.poison()
    made.view.view(np.uint8)[...] = np.ascontiguousarray(x).view(np.uint8)
    return made


def _numbers(shape: Shape, held: dict[str, Guarded], itemsize: int, rank: int, size: int) -> dict[str, float]:
    heads, values, keys, columns = shape
    strides = {f"{n}_stride": g.stride * itemsize for n, g in held.items()}
    sizes = {"heads": heads, "keys": keys, "values": values, "rank": rank, "size": size}
    return {"row_bytes": columns * itemsize, **sizes, **strides}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["f8e4m3", "bf16", "f32"])
def test_moves_the_tables_rows_and_touches_nothing_else(
    kernels: Any, shape: Shape, fused: bool, dtype: str
) -> None:
    kind = np.dtype(DTYPES[dtype].numpy)
    call = operands(shape, fused, kind)
    for split, (tier, kernel) in enumerate(kernels[fused].items(), 1):
        for rank, size, gap in ((0, 1, 3), (1, 2, 0)):
            at_end = bool(rank)
            held = {n: _held(x, gap, at_end) for n, x in call.items()}
            rows = shape[0] // size * 2 * (shape[1] + shape[2])
            packed = held["packed"] = Guarded((rows, shape[3]), kind, shape[3] + gap, at_end=at_end)
            packed.poison(0x5A)
            numbers = _numbers(shape, held, kind.itemsize, rank, size)
            for begin, end in pairwise(np.linspace(0, rows, split + 1).astype(int)):
                kernel({n: g.flat for n, g in held.items()}, numbers, int(begin), int(end))
            assert np.ascontiguousarray(packed.view).tobytes() == wanted(call, shape, rank, size), tier
            assert packed.gaps_are(0x5A)
            assert all(held[n].gaps_are() for n in call)


def test_another_rank_has_other_rows(kernels: Any) -> None:
    shape = SHAPES[1]
    call = operands(shape, True, np.float32)
    assert wanted(call, shape, 0, 2) != wanted(call, shape, 1, 2)
    held = {"fused": _held(call["fused"], 0, True), "packed": Guarded((32, 31), np.dtype(np.float32))}
    kernel = next(iter(kernels[True].values()))
    kernel({n: g.flat for n, g in held.items()}, _numbers(shape, held, 4, 0, 2), 0, 32)
    assert held["packed"].view.tobytes() != wanted(call, shape, 1, 2)


@pytest.mark.skipif(QEMU is None, reason=MISSING)
@pytest.mark.parametrize("fused", [False, True])
def test_the_same_on_neon(tmp_path: Path, fused: bool) -> None:
    shape, row = SHAPES[1], ONE[str(not fused)]
    call = operands(shape, fused, np.float32)
    out = np.zeros((4 * 2 * 8, 31), np.float32)
    ints = [124, 4, 3, 5, 0, 1, *[124] * (len(call) + 1)]
    found = on_neon(tmp_path, render(row), row.entry, [*call.values(), out], ints, [], len(out))
    assert found.status == 0
    assert found.memory[len(call)] == wanted(call, shape, 0, 1)
