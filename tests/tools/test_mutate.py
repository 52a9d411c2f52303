"""Every mutant of generated C and Triton is caught by the conformance run; the kernels themselves pass."""

from __future__ import annotations

import pytest

from kiln.tools.interpreted import pool
from kiln.tools.mutate import MUTATIONS, Mutation, survivors, trial

C = [m for m in MUTATIONS if m.language == "c"]
TRITON = [m for m in MUTATIONS if m.language == "triton"]


@pytest.mark.parametrize("mutation", C, ids=lambda m: m.name)
def test_a_mutant_of_c_is_caught(mutation: Mutation) -> None:
    assert not trial(mutation).passed


@pytest.mark.parametrize("mutation", [C[0], C[-1]], ids=lambda m: m.op)
def test_unbroken_c_passes(mutation: Mutation) -> None:
    assert trial(mutation, broken=False).faults == []


def test_mutants_of_triton_are_caught() -> None:
    with pool(2) as executor:
        halves = [executor.submit(survivors, TRITON[i::2]) for i in range(2)]
        assert [name for half in halves for name in half.result()] == []


def test_unbroken_triton_passes() -> None:
    with pool(1) as executor:
        for mutation in (TRITON[0], TRITON[-1]):
            assert executor.submit(trial, mutation, broken=False).result().faults == []


def test_a_mutation_that_does_not_apply_is_an_error() -> None:
    with pytest.raises(LookupError, match="nothing in its c matches"):
        trial(Mutation("none", "c", "relu", "no such text", ""))
    with pytest.raises(LookupError, match="no kernel 'f128'"):
        trial(Mutation("none", "c", "relu", "x", "y", "f128"))
