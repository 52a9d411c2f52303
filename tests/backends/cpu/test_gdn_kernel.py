"""The C decode step of the gated delta rule: near the oracle, the same bits on every tier and for every
split."""

from itertools import pairwise
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.variants.gdn import PRIMITIVES, STRIDED
from kiln.tests.backends import gdn_step
from kiln.tests.backends.cpu.native import Native, runnable_tiers

Array: TypeAlias = np.ndarray[Any, Any]

BY_TYPES = {tuple(p.constants[k] for k in ("io", "state", "bias", "output")): p for p in PRIMITIVES}
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
SHAPES = ((4, 2, 4, 16, 8), (3, 1, 2, 24, 5), (1, 1, 1, 1, 1), (5, 2, 6, 128, 3))
"""rows, key heads, value heads, K, V."""
COMBINATIONS = (
    ("f32", "f32", "f32", "f32"),
    ("bf16", "f32", "f32", "bf16"),
    ("bf16", "bf16", "f32", "bf16"),
    ("f16", "f16", "f32", "f16"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Native]]:
    folder = tmp_path_factory.mktemp("gdn")
    return {c: {t: Native(BY_TYPES[c], t, folder) for t in runnable_tiers()} for c in COMBINATIONS}


def _call(
    kernel: Native, call: dict[str, Array], shape: Any, output: Any, split: int = 1
) -> tuple[Array, Array]:
    rows, heads, value_heads, key, value = shape
    state = call["state"].copy()
    out = np.full((rows, value_heads * value), 99, output)
    held = {**call, "state": state, "out": out}
    numbers: dict[str, float] = {f"{t}_stride": held[t].strides[0] // held[t].itemsize for t in STRIDED}
    numbers |= {
        "HV": value_heads,
        "heads": heads,
        "slots": len(state),
        "K": key,
        "V": value,
        "norm": 1,
        "scale": 0.25,
    }
    for begin, end in pairwise(np.linspace(0, rows * value_heads, split + 1).astype(int)):
        kernel(held, numbers, int(begin), int(end))
    return out, state


@pytest.mark.parametrize("types", COMBINATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_near_the_oracle_and_the_same_on_every_tier(kernels: Any, types: Any, shape: Any) -> None:
    rows, heads, value_heads, key, value = shape
    io, kept, _, output = (TYPES[t] for t in types)
    call = gdn_step.operands(rows, heads, value_heads, key, value, io, kept)
    wanted, pool = gdn_step.expected(call, heads, key, value, 0.25)
    found = {
        tier: _call(k, call, shape, output, split)
        for split, (tier, k) in enumerate(kernels[types].items(), 1)
    }
    out, state = next(iter(found.values()))
    assert all((o.tobytes(), s.tobytes()) == (out.tobytes(), state.tobytes()) for o, s in found.values())
    assert gdn_step.distance(out, wanted) < (2e-6 if output is np.float32 else 2**-8)
    assert gdn_step.distance(state, pool) < (1e-6 if kept is np.float32 else 2**-8)
    untouched = [s for s in range(len(state)) if s not in call["state_indices"]]
    assert state[untouched].tobytes() == call["state"][untouched].tobytes()
    assert not out[call["state_indices"] <= 0].any()


def test_a_slot_beyond_the_pool_is_told_by_its_row(kernels: Any) -> None:
    call = gdn_step.operands(4, 2, 4, 16, 8, np.float32, np.float32)
    call["state_indices"][1] = len(call["state"])
    kernel = next(iter(kernels[COMBINATIONS[0]].values()))
    with pytest.raises(ValueError, match="returned 2"):
        _call(kernel, call, (4, 2, 4, 16, 8), np.float32)


def test_another_scale_is_not_near(kernels: Any) -> None:
    call = gdn_step.operands(4, 2, 4, 16, 8, np.float32, np.float32)
    wanted, _ = gdn_step.expected(call, 2, 16, 8, 0.26)
    out, _ = _call(next(iter(kernels[COMBINATIONS[0]].values())), call, (4, 2, 4, 16, 8), np.float32)
    assert gdn_step.distance(out, wanted) > 0.01
