"""How rows are walked: what is kept, what is read back, when outputs are stored, and the forms that are
refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from kiln.backends.cpu.c_emitter import emit
from kiln.backends.cpu.c_expr import NARROW, WIDE, literal
from kiln.backends.cpu.c_loops import lanes_of
from kiln.backends.cpu.schedule import Schedule, Space, space_of
from kiln.compiler.lower import Request, lower
from kiln.compiler.rowprogram import RowProgram
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dtypes import BF16, F16, F32, DType
from kiln.ir.language import Shape, Value, exp, group, group_max, row_max, row_sum, spread, ungroup
from kiln.ir.spec import Op, Tensor
from kiln.tests.backends.cpu.entries import ops


def program(name: str, types: dict[str, DType], absent: tuple[str, ...] = (), **attrs: Any) -> RowProgram:
    return lower(Request(ops()[name], types, attrs, absent), ops()).program


def own(body: Callable[..., Any], *operands: Tensor) -> tuple[Op, RowProgram]:
    op = Op("own", "TEST", operands, body=body)
    return op, lower(Request(op, {}), {"own": op}).program


X = Tensor("x", F32, ("M", "N"))
OUT = Tensor("out", F32, ("M", "N"), "out")
NORM = {"T": BF16, "R": BF16, "W": BF16}


def test_a_stored_residual_is_read_back() -> None:
    schedule = Schedule(program("fused_add_rms_norm", NORM))
    assert [(c.stage, c.operand) for c in schedule.cuts] == [(0, "residual:out")]
    assert schedule.last == 1


def test_a_dear_value_is_buffered_and_a_cheap_one_is_not() -> None:
    assert [(c.stage, c.operand) for c in Schedule(program("softmax", {"T": F32})).cuts] == [(1, "")]
    assert Schedule(program("rms_norm", {"T": BF16, "W": BF16, "O": BF16})).cuts == ()


def test_what_only_the_last_loop_needs_is_not_buffered() -> None:
    assert Schedule(program("rms_norm_gated", {"T": BF16, "W": BF16, "O": BF16})).cuts == ()


def test_groups_make_steps() -> None:
    schedule = Schedule(program("silu_mul_fp4_quant", {"T": BF16}))
    assert (schedule.last, schedule.steps(0), schedule.group) == (0, 1, 16)
    assert [(c.block, c.step) for c in schedule.cuts] == [(True, 0)]


def test_a_store_that_would_overwrite_what_is_read_later_waits() -> None:
    def body(x: Value) -> tuple[Value, Value]:
        doubled = x + x
        return doubled, x * row_sum(doubled)

    op, lowered = own(body, X, Tensor("first", F32, ("M", "N"), "out"), OUT)
    schedule = Schedule(lowered)
    assert schedule.deferred == {"first:out"}
    assert op.body is not None


@pytest.mark.parametrize(
    ("name", "types", "lanes"),
    [
        ("rms_norm", {"T": BF16, "W": BF16, "O": BF16}, WIDE),
        ("rms_norm", {"T": F16, "W": F16, "O": F16}, NARROW),
        ("rms_norm", {"T": F32, "W": F32, "O": F32}, NARROW),
        ("cast", {"T": F32, "O": BF16}, NARROW),
        ("gelu", {"T": BF16}, NARROW),
    ],
)
def test_bf16_rows_are_wide(name: str, types: dict[str, DType], lanes: object) -> None:
    assert lanes_of(Schedule(program(name, types))) is lanes


def test_nan_is_clean_where_it_comes_from_bf16_and_arithmetic() -> None:
    for name, types, clean in (
        ("add", {"T": BF16, "U": BF16}, True), ("add", {"T": BF16, "U": F32}, None), ("silu", {"T": BF16},
        False), ("cast", {"T": F32, "O": BF16}, False),
    ):  # fmt: skip
        schedule = Schedule(program(name, types))
        rounded = [i for i in schedule.instructions if i.name == "arith.truncf"]
        assert [schedule.clean(i.args[0]) for i in rounded] == ([] if clean is None else [clean])


@pytest.mark.parametrize(
    ("shape", "space"),
    [
        (Shape(), Space.SCALAR), (Shape(Fraction(1)), Space.ROW), (Shape(Fraction(1, 16), 16), Space.ROW),
        (Shape(Fraction(1, 2)), Space.PAIR),
        (Shape(Fraction(1, 64)), Space.GROUP), (Shape(Fraction(2)), Space.MEMORY),
    ],
)  # fmt: skip
def test_spaces(shape: Shape, space: Space) -> None:
    assert space_of(shape) is space


@pytest.mark.parametrize(
    "shape", [Shape(Fraction(1, 8)), Shape(Fraction(1, 24)), Shape(Fraction(3)), Shape(Fraction(1, 2), 4)]
)
def test_shapes_without_a_vector_form_are_refused(shape: Shape) -> None:
    with pytest.raises(LegalityError, match="has no vector form; group by 2 or by a multiple of 16"):
        space_of(shape)


def _sum_of_groups(x: Value) -> Value:
    largest = spread(group_max(group(x, 16)), 16)
    return x * row_sum(ungroup(group(x, 16) * largest))


def _two_sizes(x: Value) -> Value:
    a = ungroup(group(x, 16) * spread(group_max(group(x, 16)), 16))
    return ungroup(group(a, 32) * spread(group_max(group(a, 32)), 32))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_sum_of_groups, "depend on a group reduction has no CPU form"),
        (_two_sizes, "groups of 16 and 32 in one kernel have no CPU form"),
    ],
)
def test_forms_without_code_are_refused(body: Callable[[Value], Value], words: str) -> None:
    op, lowered = own(body, X, OUT)
    with pytest.raises(LegalityError, match=words):
        emit(op, lowered, {}, {}, "own")


def test_two_reductions_of_one_loop_are_written() -> None:
    def body(x: Value) -> Value:
        return x * row_sum(x) + row_max(exp(x))

    op, lowered = own(body, X, OUT)
    text = emit(op, lowered, {}, {}, "own").text
    assert text.count("tree_root(") == 1
    assert text.count("lanes_max(") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0f"),
        (0.1, "0.1f"),
        (1e-10, "1e-10f"),
        (-0.0, "-0.0f"),
        (float("-inf"), "-__builtin_inff()"),
        (7, "7"),
        (-(2**31), "(-2147483647 - 1)"),
    ],
)
def test_literals(value: float, text: str) -> None:
    assert literal(value) == text
