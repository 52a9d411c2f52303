"""Expressions and predicates: values worked by hand, refusals with their reason."""

from typing import Any

import pytest

from kiln.runtime.errors import ContractError
from kiln.runtime.expr import Env, compile_expr, names, parse_expr, parse_pred, render, why_not
from kiln.runtime.fields import Mismatch


def env() -> Env:
    e = Env()
    e.dims = {"M": 7, "N": 100, "Z": 0}
    e.strides, e.colstrides = {"x": 128}, {"x": 1}
    e.args, e.attrs = {"eps": 0.5, "k": 3}, {"gemma": True, "size": 16}
    e.dtypes, e.pointers = {"x": "bf16"}, {"x": 4096 + 8}
    return e


VALUES: list[tuple[Any, Any]] = [
    (3, 3),
    (2.5, 2.5),
    (["dim", "N"], 100),
    (["stride", "x"], 128),
    (["colstride", "x"], 1),
    (["arg", "eps"], 0.5),
    (["attr", "size"], 16),
    (["add", ["dim", "M"], 1], 8),
    (["sub", 1, ["dim", "M"]], -6),
    (["mul", 2, ["dim", "N"]], 200),
    (["floordiv", -7, 2], -4),
    (["cdiv", ["dim", "N"], 16], 7),
    (["cdiv", 96, 16], 6),
    (["mod", ["dim", "N"], 16], 4),
    (["min", 3, 4], 3),
    (["max", 3, 4], 4),
    (["roundup", ["dim", "N"], 64], 128),
    (["roundup", 128, 64], 128),
    (["next_pow2", ["dim", "N"]], 128),
    (["next_pow2", 128], 128),
    (["next_pow2", 0], 1),
    (["next_pow2", 1], 1),
]


@pytest.mark.parametrize(("expr", "expected"), VALUES)
def test_value(expr: Any, expected: Any) -> None:
    assert compile_expr(parse_expr(expr))(env()) == expected


BAD_EXPRS: list[Any] = [
    True,
    None,
    "N",
    {},
    [],
    [1, 2],
    ["dim"],
    ["dim", 1],
    ["dim", ""],
    ["dim", "N\0"],
    ["dim", "N", "M"],
    ["pow", 2, 3],
    ["__import__", "os"],
    ["add", 1],
    ["add", 1, 2, 3],
    ["add", 1, True],
    ["next_pow2", 1, 2],
    [["add"], 1, 2],
]


@pytest.mark.parametrize("expr", BAD_EXPRS, ids=repr)
def test_bad_expression_is_refused(expr: Any) -> None:
    with pytest.raises(Mismatch):
        parse_expr(expr)


def test_depth_and_node_caps() -> None:
    def nested(depth: int) -> Any:
        return ["add", 1, nested(depth - 1)] if depth else 1

    def wide(count: int) -> Any:
        return ["or", *([True] * count)]

    assert parse_expr(nested(32))
    with pytest.raises(Mismatch, match="levels"):
        parse_expr(nested(33))
    assert parse_pred(wide(4095))
    with pytest.raises(Mismatch, match="nodes"):
        parse_pred(wide(4096))


HOLDS: list[Any] = [
    True,
    ["and"],
    ["and", True, ["eq", ["dim", "M"], 7]],
    ["or", ["eq", 1, 2], ["ne", 1, 2]],
    ["not", ["lt", 2, 1]],
    ["lt", 1, 2],
    ["le", 2, 2],
    ["gt", 2, 1],
    ["ge", 2, 2],
    ["divisible", ["dim", "N"], 10],
    ["divisible", ["dim", "Z"], 10],
    ["dtype", "x", "bf16"],
    ["aligned", "x", 8],
    ["aligned", "bias", 16],
    ["attr", "gemma", True],
    ["attr", "size", 16],
    ["absent", "bias"],
    ["present", "x"],
]


@pytest.mark.parametrize("pred", HOLDS, ids=repr)
def test_predicate_holds_and_its_negation_does_not(pred: Any) -> None:
    parsed = parse_pred(pred)
    assert why_not(parsed, env()) is None
    assert why_not(("not", parsed), env()) is not None


WHY_NOT: list[tuple[Any, str]] = [
    (["or"], "none of"),
    (["and", True, ["eq", ["dim", "M"], 8]], "needs M == 8, found 7 and 8"),
    (["or", ["eq", 1, 2], ["lt", 2, 1]], "none of: needs 1 == 2, found 1 and 2; needs 2 < 1"),
    (["not", ["aligned", "x", 8]], "aligned(x, 8) holds"),
    (["divisible", ["dim", "N"], 16], "needs N divisible by 16, found 100"),
    (["dtype", "x", "f32"], "needs x of f32, found bf16"),
    (["dtype", "bias", "f32"], "found none"),
    (["aligned", "x", 16], "needs x aligned to 16 bytes, found it 8 bytes off"),
    (["attr", "gemma", False], "needs gemma=False, found True"),
    (["attr", "gemma", 1], "needs gemma=1, found True"),
    (["absent", "x"], "needs x absent"),
    (["present", "bias"], "needs bias present"),
]


@pytest.mark.parametrize(("pred", "why"), WHY_NOT)
def test_why_not_names_the_value(pred: Any, why: str) -> None:
    found = why_not(parse_pred(pred), env())
    assert found is not None
    assert why in found


BAD_PREDS: list[Any] = [
    False,
    1,
    "true",
    ["xor", True, True],
    ["not"],
    ["not", True, True],
    ["eq", 1],
    ["divisible", ["dim", "N"], 0],
    ["divisible", ["dim", "N"], True],
    ["dtype", "x"],
    ["dtype", "x", 1],
    ["aligned", "x", 3],
    ["aligned", "x", 512],
    ["aligned", "x", 2.0],
    ["attr", "gemma", None],
    ["attr", "gemma", "a\0b"],
    ["dtype", "x", "f32\0"],
    ["absent", "x", "y"],
    ["present", 3],
]


@pytest.mark.parametrize("pred", BAD_PREDS, ids=repr)
def test_bad_predicate_is_refused(pred: Any) -> None:
    with pytest.raises(Mismatch):
        parse_pred(pred)


def test_evaluation_errors_are_typed() -> None:
    with pytest.raises(ContractError, match="needs 'K'"):
        compile_expr(parse_expr(["add", ["dim", "K"], 1]))(env())
    with pytest.raises(ContractError, match="divides by zero"):
        compile_expr(parse_expr(["cdiv", 1, ["dim", "Z"]]))(env())


def test_names_and_rendering() -> None:
    tree = parse_pred(["and", ["le", ["mul", 2, ["dim", "N"]], ["stride", "x"]], ["attr", "gemma", True]])
    assert set(names(tree)) == {("dim", "N"), ("stride", "x"), ("attr", "gemma")}
    assert render(tree) == "and((2 * N) <= stride(x), attr(gemma, True))"
