"""Causal convolutions and the split after them through the runtime: worked numbers, updates one by one, slots
and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.recipes.ssm import FORWARD, POST_CONV, UPDATE
from kiln.runtime.errors import KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.arrays import f32, i32
from kiln.tests.recipes.literals import literal
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]
Call: TypeAlias = dict[str, Any]

BF16 = ml_dtypes.bfloat16
TAPS, TOKENS = f32([[1, 10, 100, 1000]]), np.arange(1, 6, dtype=np.float32)[:, None]
LENGTHS = (1, 8, 9, 0, 64)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    out: Path = tmp_path_factory.mktemp("ssm") / "tree"
    build_from(out, [cpu_target()], [FORWARD.name, UPDATE.name, POST_CONV.name], [CpuBackend()])
    with load(out, "cpu") as made:
        yield made


def _call(width: int = 4, channels: int = 300, dtype: Any = np.float32, bias: bool = True) -> Call:
    """Sequences in slots 1, 2, …: more channels than a tile has."""
    rng = np.random.default_rng([width, channels])
    rows, slots = sum(LENGTHS), len(LENGTHS) + 2
    given = {
        "x": (rows, channels),
        "weight": (channels, width),
        "conv_state": (slots, (width - 1) * channels),
    }
    arrays = {n: rng.standard_normal(shape).astype(dtype) for n, shape in given.items()}
    return {
        **arrays,
        "cu_seqlens": np.cumsum([0, *LENGTHS], dtype=np.int32),
        "state_indices": np.arange(1, len(LENGTHS) + 1, dtype=np.int32),
        "has_initial_state": i32([1, 0, 1, 0, 0]),
        "bias": rng.standard_normal(channels).astype(dtype) if bias else None,
    }


def _run(library: Library, name: str, call: Call, **more: Any) -> tuple[Array, Array]:
    """(out, conv_state) on a copy of the state."""
    out, state = library.op(name)(**{**call, "conv_state": call["conv_state"].copy()}, **more)
    return np.asarray(out), np.asarray(state)


@literal("ssm/1.op")
def test_taps_run_from_the_oldest_input(library: Library) -> None:
    call = {
        "x": TOKENS, "weight": TAPS, "conv_state": f32([[0, 0, 0], [-3, -2, -1]]), "cu_seqlens": i32([0, 5]),
        "state_indices": i32([1]), "has_initial_state": i32([1]),
    }  # fmt: skip
    out, state = _run(library, FORWARD.name, call, silu=False)
    assert out[:, 0].tolist() == [877, 2088, 3209, 4321, 5432]
    assert state[1].tolist() == [3, 4, 5]
    out, state = _run(library, FORWARD.name, call | {"has_initial_state": i32([0])}, silu=False)
    assert out[:, 0].tolist() == [1000, 2100, 3210, 4321, 5432]
    head = {"x": TOKENS[:2], "cu_seqlens": i32([0, 2])}
    _, state = _run(library, FORWARD.name, call | head, silu=False)
    assert state[1].tolist() == [-1, 1, 2]


@literal("ssm/1.products_op")
def test_products_are_f32(library: Library) -> None:
    call = {
        "x": np.array([[1.2421875], [1.34375], [1.203125], [1.046875]], BF16),
        "weight": np.array([[1.921875, 1.6875, 1.6953125, 1.8046875]], BF16),
        "conv_state": np.zeros((2, 3), BF16), "cu_seqlens": i32([0, 4]), "state_indices": i32([1]),
        "has_initial_state": i32([0]),
    }  # fmt: skip
    out, _ = _run(library, FORWARD.name, call, silu=False)
    assert float(out[3, 0]) == 8.5625


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "bias", "silu"), [(np.float32, True, True), (BF16, False, False)])
def test_a_forward_is_its_updates_to_the_bit(
    library: Library, width: int, dtype: Any, bias: bool, silu: bool
) -> None:
    call = _call(width, dtype=dtype, bias=bias)
    out, left = _run(library, FORWARD.name, call, silu=silu)
    state = call["conv_state"].copy()
    state[np.flatnonzero(call["has_initial_state"] == 0) + 1] = 0
    # An empty sequence leaves its state as it is.
    state[4] = call["conv_state"][4]
    edges, steps = call["cu_seqlens"], np.empty_like(call["x"])
    for t in range(max(LENGTHS)):
        rows = [n for n, length in enumerate(LENGTHS) if t < length]
        token = {"x": call["x"][[edges[n] + t for n in rows]], "state_indices": i32([n + 1 for n in rows])}
        step = token | {n: call[n] for n in ("weight", "bias")} | {"conv_state": state}
        made, state = _run(library, UPDATE.name, step, silu=silu)
        steps[[edges[n] + t for n in rows]] = made
    assert steps.tobytes() == out.tobytes()
    assert state.tobytes() == left.tobytes()


def test_slots_of_no_sequence_keep_their_bits(library: Library) -> None:
    """Null slots give rows of zeros; NaN in unused slots is nowhere else, and stays."""
    call = _call()
    call["state_indices"] = i32([3, 0, -1, 2, 5])
    call["has_initial_state"] = i32([1] * 5)
    out, state = _run(library, FORWARD.name, call)
    assert not out[1:18].any()
    unused = [0, 1, 2, 4, 6]
    dirty = call["conv_state"].copy()
    dirty[unused] = np.nan
    again, left = _run(library, FORWARD.name, call | {"conv_state": dirty})
    assert again.tobytes() == out.tobytes()
    assert left[unused].tobytes() == dirty[unused].tobytes()
    assert left[[3, 5]].tobytes() == state[[3, 5]].tobytes()
    assert state[[3, 5]].tobytes() != call["conv_state"][[3, 5]].tobytes()
    ignored, _ = _run(library, FORWARD.name, call | {"has_initial_state": i32([0] * 5)})
    assert ignored.tobytes() != out.tobytes()


def test_a_state_that_is_not_known_may_be_garbage(library: Library) -> None:
    call = _call() | {"has_initial_state": i32([0] * 5)}
    out, state = _run(library, FORWARD.name, call)
    dirty = np.full_like(call["conv_state"], np.nan)
    again, left = _run(library, FORWARD.name, call | {"conv_state": dirty})
    assert again.tobytes() == out.tobytes()
    written = [1, 2, 3, 5]
    assert left[written].tobytes() == state[written].tobytes()


WRONG: tuple[tuple[str, Call, str], ...] = (
    (FORWARD.name, {"weight": np.zeros((300, 5), np.float32), "conv_state": np.zeros((7, 1200), np.float32)},
     "width must be 2..4"),
    (FORWARD.name, {"weight": np.zeros((300, 1), np.float32), "conv_state": np.zeros((7, 0), np.float32)},
     "width must be 2..4"),
    (FORWARD.name, {"x": np.zeros((300, 82), np.float32).T}, "elements of a row of x"),
    (FORWARD.name, {"conv_state": np.zeros((7, 600), np.float32)}, "axis 1 of conv_state has extent 600"),
    (FORWARD.name, {"conv_state": np.zeros((7, 900), BF16)}, "conv_state is bf16 but x is f32"),
    (FORWARD.name, {"cu_seqlens": np.zeros(6, np.int64)}, "cu_seqlens is i64, expected i32"),
    (FORWARD.name, {"has_initial_state": np.ones(5, bool)}, "has_initial_state is bool, expected i32"),
    (FORWARD.name, {"bias": np.zeros(299, np.float32)}, "C=299"),
    (FORWARD.name, {"state_indices": i32([1, 2, 7, 3, 4])}, "row 2 holds an index that is out of range"),
    (FORWARD.name, {"silu": "gelu"}, "silu"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "why"), WRONG)
def test_what_does_not_fit_is_refused_by_name(library: Library, name: str, changed: Call, why: str) -> None:
    call = _call()
    with pytest.raises(KilnError, match=why):
        _run(library, name, call | changed)
    _run(library, name, call)


def _rows(count: int, dtype: Any = np.float32) -> Call:
    rng = np.random.default_rng(count)
    wide = rng.standard_normal((count, 2 * 2 * 16 + 4 * 8 + 5)).astype(dtype)
    gates = rng.standard_normal((count, 8)).astype(dtype)
    return {
        "mixed_qkv": wide[:, :-5], "a": gates[:, 4:], "b": gates[:, :4],
        "a_log": rng.standard_normal(4).astype(np.float32),
        "dt_bias": rng.standard_normal(4).astype(np.float32), "heads": 2, "key_dim": 16, "value_dim": 8,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17])
def test_the_split_copies_values_bit_for_bit(library: Library, count: int, dtype: Any) -> None:
    """From views; signalling NaN with payloads among the values. No row depends on another."""
    call = _rows(count, dtype)
    code = {2: 0x7F81, 4: 0x7F812345}[np.dtype(dtype).itemsize]
    call["mixed_qkv"][:, 64::5].view(f"u{np.dtype(dtype).itemsize}")[...] = code
    parts = [np.asarray(x) for x in library.op(POST_CONV.name)(**call)]
    assert parts[2].tobytes() == np.ascontiguousarray(call["mixed_qkv"][:, 64:]).tobytes()
    assert POST_CONV.reference is not None
    for found, wanted in zip(parts, POST_CONV.reference(**call), strict=True):
        assert found.shape == wanted.shape
        if found is not parts[2]:
            exact = wanted.astype(np.float32)
            np.testing.assert_allclose(
                found.astype(np.float32), exact, rtol=1e-5 if dtype is np.float32 else 2**-8
            )
    if count > 1:
        last = {n: call[n][-1:] for n in ("mixed_qkv", "a", "b")}
        alone = [np.asarray(x) for x in library.op(POST_CONV.name)(**call | last)]
        assert all(a.tobytes() == p[-1:].tobytes() for a, p in zip(alone, parts, strict=True))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mixed_qkv": np.zeros((3, 95), np.float32)}, "axis 1 of mixed_qkv has extent 95, expected .* = 96"),
        ({"a": np.zeros((3, 3), np.float32)}, "HV=3"),
        ({"b": np.zeros((2, 4), np.float32)}, "T=2"),
        ({"heads": 3}, "HV must be divisible by H|axis 1 of mixed_qkv"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(library: Library, changed: Call, why: str) -> None:
    with pytest.raises(KilnError, match=why):
        library.op(POST_CONV.name)(**_rows(3) | changed)
    library.op(POST_CONV.name)(**_rows(3))
