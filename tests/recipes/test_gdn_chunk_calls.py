"""The delta rule over sequences through the runtime: without tokens, cut in two, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.recipes.gdn_chunk import CHUNKED
from kiln.runtime.errors import ContractError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.recipes.test_gdn_chunk import Call, call, distance, recurrence
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]

TOKENS = ("q", "k", "v", "g", "beta")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    out: Path = tmp_path_factory.mktemp("chunk") / "tree"
    build_from(out, [cpu_target()], [CHUNKED.name], [CpuBackend()])
    with load(out, "cpu") as made:
        yield made


def _run(library: Library, given: Call, **more: Any) -> tuple[Array, Array]:
    out, final = library.op(CHUNKED.name)(**given, **more)
    return np.asarray(out), np.asarray(final)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]])
def test_without_a_token_states_are_what_they_were(library: Library, lengths: list[int]) -> None:
    """There are no rows, and yet something to write: twice, as the first call of a form goes another way."""
    given = call(lengths, 2, 4, 8, 8)
    for _ in range(2):
        final = np.full_like(given["initial_state"], np.nan)
        out, written = _run(library, given, out=(np.empty((0, 32), np.float32), final))
        assert out.shape == (0, 32)
        assert written.tobytes() == final.tobytes() == given["initial_state"].tobytes()
        assert _run(library, given)[1].tobytes() == given["initial_state"].tobytes()
    final = np.full_like(given["initial_state"], np.nan)
    library.op(CHUNKED.name).bind(**given, out=(np.empty((0, 32), np.float32), final))()
    assert final.tobytes() == given["initial_state"].tobytes()


def test_without_a_sequence_nothing_is_written(library: Library) -> None:
    given = call([3], 1, 2, 8, 8)
    none = given | {"initial_state": given["initial_state"][:0], "cu_seqlens": np.zeros(1, np.int32)}
    none |= {n: given[n][:0] for n in TOKENS}
    out, final = _run(library, none)
    assert (out.shape, final.shape) == ((0, 16), (0, 128))


def test_empty_sequences_between_others_keep_their_states(library: Library) -> None:
    given = call([0, 5, 0, 70, 0], 2, 4, 8, 8)
    out, final = _run(library, given)
    for found, wanted in zip((out, final), recurrence(given), strict=True):
        assert distance(found, wanted) < 2e-6
    for n in (0, 2, 4):
        assert final[n].tobytes() == given["initial_state"][n].tobytes()
    assert final[3].tobytes() != given["initial_state"][3].tobytes()


@pytest.mark.parametrize("cut", [1, 20, 64, 69])
def test_a_state_carries_a_sequence_on_to_the_bit(library: Library, cut: int) -> None:
    """The CPU goes token by token: where a sequence is cut changes nothing."""
    given = call([70], 2, 4, 8, 8)
    out, final = _run(library, given)
    state, parts = given["initial_state"], []
    for begin, end in ((0, cut), (cut, 70)):
        edges = np.array([0, end - begin], np.int32)
        some = given | {n: given[n][begin:end] for n in TOKENS} | {"initial_state": state}
        made, state = _run(library, some | {"cu_seqlens": edges})
        parts.append(made)
    assert np.concatenate(parts).tobytes() == out.tobytes()
    assert state.tobytes() == final.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_scale_of_1_and_gates_of_zero(library: Library, dtype: Any) -> None:
    given = call([7, 66], 2, 4, 8, 8, dtype) | {"scale": 1.0}
    still = given | {"g": np.zeros_like(given["g"]), "beta": np.zeros_like(given["beta"])}
    out, final = _run(library, still)
    assert final.tobytes() == given["initial_state"].tobytes()
    assert distance(out, recurrence(still)[0]) < (2e-6 if dtype is np.float32 else 2**-8)
    assert distance(out, recurrence(still | {"scale": 0.5})[0]) > 0.1
    assert _run(library, given)[1].tobytes() != final.tobytes()


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"heads": 3}, "HV must be divisible by H|axis 1 of q"),
    ({"scale": 0.0}, "scale is 0"),
    ({"cu_seqlens": np.array([0, 9], np.int64)}, "cu_seqlens is i64, expected i32"),
    ({"cu_seqlens": np.array([0, 4, 9], np.int32)}, "axis 0 of cu_seqlens has extent 3"),
    ({"initial_state": np.zeros((2, 256), np.float32)}, "axis 0 of cu_seqlens has extent 2"),
    ({"initial_state": np.zeros((1, 256), ml_dtypes.bfloat16)}, "initial_state is bf16, expected f32"),
    ({"beta": np.zeros((8, 4), np.float32)}, "beta has T=8 but q gave T=9"),
    ({"beta": np.zeros((9, 3), np.float32)}, "beta has HV=3 but g gave HV=4"),
    ({"g": np.zeros((9, 4), ml_dtypes.bfloat16)}, "g is bf16, expected f32"),
    ({"k": np.zeros((9, 16), ml_dtypes.bfloat16)}, "make them the same type"),
)


@pytest.mark.parametrize(("changed", "why"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(library: Library, changed: dict[str, Any], why: str) -> None:
    given = call([9], 2, 4, 8, 8)
    with pytest.raises(ContractError, match=why):
        _run(library, given | changed)
    _run(library, given)
