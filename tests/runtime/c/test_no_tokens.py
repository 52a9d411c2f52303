"""libkiln on calls without rows that have something to write all the same: the states after no tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.recipes.gdn_chunk import CHUNKED
from kiln.runtime.targets import cpu_target
from kiln.tests.recipes.test_gdn_chunk import call
from kiln.tests.runtime.c import libkiln
from kiln.tests.support.committed import build_from


@pytest.fixture(scope="module")
def lib(c: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[libkiln.Library]:
    out: Path = tmp_path_factory.mktemp("chunk") / "tree"
    build_from(out, [cpu_target()], [CHUNKED.name], [CpuBackend()])
    with libkiln.Library(c, out) as made:
        yield made


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 3, 0]])
def test_states_of_empty_sequences_are_written(lib: libkiln.Library, lengths: list[int]) -> None:
    given = call(lengths, 2, 4, 8, 8)
    rows = sum(lengths)
    for _ in range(2):
        final = np.full_like(given["initial_state"], np.nan)
        lib.gated_delta_rule_chunk(**given, out=(np.empty((rows, 32), np.float32), final))
        for n, length in enumerate(lengths):
            assert np.isfinite(final[n]).all()
            assert (final[n].tobytes() == given["initial_state"][n].tobytes()) == (length == 0)


def test_without_states_nothing_is_launched(lib: libkiln.Library) -> None:
    given = call([3], 1, 2, 8, 8)
    none = given | {n: given[n][:0] for n in ("q", "k", "v", "g", "beta", "initial_state")}
    before = sum(lib.stats().get(CHUNKED.name, {}).values())
    none["cu_seqlens"] = np.zeros(1, np.int32)
    out = (np.empty((0, 16), np.float32), np.empty((0, 128), np.float32))
    lib.gated_delta_rule_chunk(**none, out=out)
    assert sum(lib.stats().get(CHUNKED.name, {}).values()) == before
