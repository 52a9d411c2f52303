"""The C gated delta rule over sequences: near the oracle, the same bits on every tier and for every split."""

from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.variants.gdn_chunk import PRIMITIVES, STRIDED
from kiln.tests.arrays import i32
from kiln.tests.backends.cpu.native import Native, runnable_tiers
from kiln.tests.recipes.test_gdn_chunk import call, distance, recurrence

Array: TypeAlias = np.ndarray[Any, Any]

TYPES = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}
LENGTHS = ([1], [5, 0, 70], [64, 3])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Native]]:
    folder = tmp_path_factory.mktemp("gdn_chunk")
    types = {(str(p.constants["io"]), str(p.constants["output"])): p for p in PRIMITIVES}
    return {t: {tier: Native(p, tier, folder) for tier in runnable_tiers()} for t, p in types.items()}


def _call(
    kernel: Native, given: dict[str, Any], value_heads: int, output: Any, split: int = 1
) -> tuple[Array, Array]:
    seqs = len(given["initial_state"])
    out = np.full((len(given["q"]), value_heads * given["value_dim"]), 99, output)
    final = np.full_like(given["initial_state"], np.nan)
    held = {**given, "out": out, "final_state": final}
    numbers: dict[str, float] = {f"{t}_stride": held[t].strides[0] // held[t].itemsize for t in STRIDED}
    numbers |= {
        "T": len(given["q"]),
        "sequences": seqs,
        "HV": value_heads,
        "K": given["key_dim"],
        "V": given["value_dim"],
    }
    numbers |= {n: given[n] for n in ("heads", "scale")}
    for begin, end in pairwise(np.linspace(0, seqs * value_heads, split + 1).astype(int)):
        kernel(held, numbers, int(begin), int(end))
    return out, final


@pytest.mark.parametrize("types", [("bf16", "bf16"), ("bf16", "f32"), ("f32", "f32")])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_is_near_the_oracle_and_the_same_on_every_tier(kernels: Any, types: Any, lengths: list[int]) -> None:
    given = call(lengths, 2, 4, 24, 5, TYPES[types[0]])
    wanted = recurrence(given)
    every = {
        t: _call(k, given, 4, TYPES[types[1]], split)
        for split, (t, k) in enumerate(kernels[types].items(), 1)
    }
    out, final = next(iter(every.values()))
    assert all((o.tobytes(), f.tobytes()) == (out.tobytes(), final.tobytes()) for o, f in every.values())
    assert distance(out, wanted[0]) < (2e-6 if types[1] == "f32" else 2**-8)
    assert distance(final, wanted[1]) < 2e-6


def test_boundaries_that_go_back_stay_inside(kernels: Any) -> None:
    given = call([30, 30], 1, 2, 16, 4)
    kernel = next(iter(kernels["f32", "f32"].values()))
    wanted = _call(kernel, given | {"cu_seqlens": i32([0, 60, 60])}, 2, np.float32)
    found = _call(kernel, given | {"cu_seqlens": i32([5, 90, -3])}, 2, np.float32)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


def test_other_strengths_are_not_near(kernels: Any) -> None:
    given = call([70], 1, 2, 16, 4)
    wanted, _ = recurrence(given)
    kernel = next(iter(kernels["f32", "f32"].values()))
    out, _ = _call(kernel, given | {"beta": given["beta"] * np.float32(0.9)}, 2, np.float32)
    assert distance(out, wanted) > 0.02
