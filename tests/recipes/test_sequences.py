"""Ops over sequences: rows that no sequence covers are refused, since nobody would write them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kiln.compiler.signatures import signature_json
from kiln.ir.spec import Op
from kiln.recipes.gdn_chunk import CHUNKED
from kiln.recipes.ssm import FORWARD
from kiln.runtime.arguments import Arguments
from kiln.runtime.arrays import CPU, View, described
from kiln.runtime.bind import Binder, Bound
from kiln.runtime.errors import ContractError
from kiln.runtime.fields import read
from kiln.runtime.schema import SIGNATURE


def bound(op: Op, **given: Any) -> Bound:
    """A call of the op, checked against its declaration."""
    sig = read(SIGNATURE, json.loads(json.dumps(signature_json(op))), "the op")
    sorted_ = Arguments(op.name, sig).sort((), given, None)
    attrs = {a.name: v for a, v in zip(sig.attrs, sorted_.attrs, strict=True)}
    return Binder(op.name, sig, CPU).bind(sorted_.reads, sorted_.writes, sorted_.scalars, attrs)


def i32(*shape: int) -> View:
    return described(shape, "i32")


def f32(*shape: int) -> View:
    return described(shape, "f32")


def convolution(rows: int, sequences: int) -> Bound:
    return bound(
        FORWARD, x=f32(rows, 8), weight=f32(8, 4), conv_state=f32(3, 24), cu_seqlens=i32(sequences + 1),
        state_indices=i32(sequences), has_initial_state=i32(sequences),
    )  # fmt: skip


def delta_rule(rows: int, sequences: int) -> Bound:
    return bound(
        CHUNKED, q=f32(rows, 16), k=f32(rows, 16), v=f32(rows, 16), g=f32(rows, 2), beta=f32(rows, 2),
        cu_seqlens=i32(sequences + 1), initial_state=f32(sequences, 128), heads=2, scale=1.0, key_dim=8,
        value_dim=8,
    )  # fmt: skip


@pytest.mark.parametrize("call", [convolution, delta_rule])
def test_rows_need_a_sequence(call: Callable[[int, int], Bound]) -> None:
    assert not call(5, 1).empty
    assert call(0, 0).empty
    with pytest.raises(ContractError, match="rows need a sequence: pass cu_seqlens with two entries or more"):
        call(5, 0)


def test_states_of_sequences_without_rows_are_written() -> None:
    """The state after no token is the one before it: a launch copies it."""
    assert not delta_rule(0, 2).empty
    assert convolution(0, 2).empty  # its states are written in place, and stay
