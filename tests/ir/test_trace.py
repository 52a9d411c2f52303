"""Recipes traced into a graph of kiln operations."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from mlir import ir

from kiln.ir import trace
from kiln.ir.diagnostics import DeclarationError, TypeCheckError
from kiln.ir.dialect import context
from kiln.ir.dtypes import F16, F32
from kiln.ir.language import Value, call
from kiln.ir.record import record, reduces_rows
from kiln.ir.spec import Op, Tensor
from kiln.tests.compiler.lowering import ACC, BF, CHAIN, GROW, JOIN, LEVELS, OPS, OUT, SHARE, K, X


def _graph(op: Op, **fields: Any) -> str:
    with context(OPS.values()):
        return str(trace.graph(op, BF, fields.get("attrs", {}), fields.get("absent", ())))


def test_a_recipe_is_a_graph_of_ops() -> None:
    text = _graph(CHAIN)
    assert re.findall(r'"(kiln\.\w+)"', text) == ["kiln.absent", "kiln.join", "kiln.grow", "kiln.share"]
    assert "(%arg0: tensor<?x?xbf16>, %arg1: tensor<?x?xbf16>, %arg2: f32)" in text
    assert '"kiln.grow"(%1, %arg2) {twice = true}' in text
    assert "return %3, %1" in text


def test_an_op_is_a_graph_of_one() -> None:
    text = _graph(GROW, attrs={"twice": True})
    assert re.findall(r'"(kiln\.\w+)"', text) == ["kiln.grow"]
    assert "{twice = true}" in text


def test_an_absent_operand_is_no_argument() -> None:
    assert '"kiln.join"(%arg0, %0) : (tensor<?x?xbf16>, none)' in _graph(JOIN, absent=("y",))
    assert '"kiln.join"(%arg0, %arg1) : (tensor<?x?xbf16>, tensor<?xbf16>)' in _graph(JOIN)


def test_operations_carry_the_recipes_lines() -> None:
    with context(OPS.values()):
        module = trace.graph(CHAIN, BF, {})
        text = module.operation.get_asm(enable_debug_info=True)
    assert CHAIN.body is not None
    first = inspect.getsourcelines(CHAIN.body)[1]
    lines = {int(n) for n in re.findall(r'lowering\.py":(\d+):1\)', text)}
    assert {first + 1, first + 2} <= lines


def _recipe(body: Any, *operands: Any) -> Op:
    return Op(
        "mine",
        "F",
        operands or (X, ACC, K, OUT),
        body=body,
        is_recipe=True,
        returns=() if operands else ("out", "acc"),
    )


def _arithmetic(x: Value, acc: Value, k: Value) -> tuple[Value, Value]:
    return x.to(F32) * k, acc


def _wrong_type(x: Value, acc: Value, k: Value) -> tuple[Value, Value]:
    wide = call(LEVELS, x)[1]
    return call(SHARE, wide)[0], call(JOIN, x, wide)[0]


def _narrowing(x: Value) -> Value:
    return call(SHARE, x)[0]


@pytest.mark.parametrize(
    ("body", "offset", "message"),
    [
        (_arithmetic, 1, "a recipe calls ops; arith.extf belongs into an op's body"),
        (_wrong_type, 2, "join: operand y is f32, expected bf16"),
    ],
)
def test_what_a_recipe_may_not_do(body: Any, offset: int, message: str) -> None:
    with pytest.raises(TypeCheckError, match=re.escape(message)) as caught:
        _graph(_recipe(body))
    assert caught.value.location == f"{__file__}:{inspect.getsourcelines(body)[1] + offset}"


def test_a_result_of_another_type_is_refused() -> None:
    narrow = Tensor("out", F16, ("M", "N"), "out")
    with pytest.raises(DeclarationError, match="belongs into an op's body"):
        _graph(_recipe(_narrowing, X, narrow))


def test_recording_lists_calls_without_mlir() -> None:
    recorder, results = record(CHAIN, BF, {}, (), inline=False)
    assert [c.op.name for c in recorder.calls] == ["join", "grow", "share"]
    assert dict(recorder.calls[1].scalars) == {"k": "arg:k"}
    assert recorder.calls[0].operands == {"x": "x", "y": None}
    assert [r.data for r in results if r is not None] == ["t2", "t0"]
    assert recorder.operations == []


@pytest.mark.parametrize(
    ("op", "want"), [(SHARE, True), (CHAIN, True), (GROW, False), (LEVELS, False), (JOIN, False)]
)
def test_which_bodies_need_whole_rows(op: Op, want: bool) -> None:
    assert reduces_rows(op, BF, {}, ()) == want


@pytest.mark.parametrize("value", [True, False, 7, -1, "silu"])
def test_attributes_round_trip(value: Any) -> None:
    with ir.Context():
        assert trace.plain(trace.attribute(value)) == value
        assert type(trace.plain(trace.attribute(value))) is type(value)


def test_other_attributes_are_refused() -> None:
    with ir.Context(), pytest.raises(TypeError, match="is neither bool, integer nor string"):
        trace.plain(ir.UnitAttr.get())
