"""Catalogs, and what is refused when they are loaded: each with the op's name and the place it is written."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from kiln.compiler.catalog import Catalog, find, load, load_catalogs
from kiln.compiler.errors import CheckError
from kiln.compiler.signatures import signature_json
from kiln.compiler.validate import MAX_OPERANDS, MAX_STEPS, validate
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.dtypes import BF16, F16, F32
from kiln.ir.language import Value, call
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Ship, Step, Tensor
from kiln.runtime.manifest import dump, parse_signature
from kiln.tests.compiler.lowering import ACC, BF, CHAIN, GROW, JOIN, OPS, OUT, SHARE, K, T, X

OWN = load_catalogs(("kiln.recipes",))


def _body(x: Value) -> Value:
    return x


PLAIN = Op("plain", "F", (X, OUT), body=_body, ship=(Ship(BF),))


def _check(*ops: Op) -> None:
    validate({op.name: op for op in ops})


def _refusal(*ops: Op) -> str:
    with pytest.raises(DeclarationError) as caught:
        _check(*ops)
    return str(caught.value)


def test_what_is_declared_well_passes() -> None:
    _check(PLAIN)
    validate(OPS)
    validate(OWN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Plain"}, "its name must be snake_case"),
        ({"name": "1st"}, "snake_case"),
        ({"name": "half"}, "its name is taken by the IR itself"),
        ({"family": "TWO WORDS"}, "expected a printable word"),
        ({"operands": (X, X, OUT)}, "x is declared twice or reserved"),
        (
            {"operands": (X, Scalar("stream", F32), OUT)},
            "stream is declared twice or reserved for the call itself",
        ),
        ({"operands": (X, OUT), "attrs": (Attr("x", (1,), 1),)}, "x is declared twice"),
        ({"operands": (Tensor("x", T, ("M", ["dim", "N"], ["cat", 1])), OUT)}, "expected an expression head"),
        ({"operands": (Tensor("x-y", T, ("M", "N")), OUT)}, "expected an identifier"),
        ({"returns": ("out", "out")}, "returns out, out, expected each written operand once: out"),
        (
            {"attrs": (Attr("kind", ("a", "b"), "c"),)},
            "attribute kind: its default 'c' is not one of its choices",
        ),
        (
            {"constraints": ((["divisible", ["dim", "K"], 2], "K must be even"),)},
            "names 'K', which is no dim of the op",
        ),
        ({"constraints": ((["even", ["dim", "N"]], "N must be even"),)}, "expected"),
        ({"body": None}, "op plain: has neither body nor reference nor steps; an op has body="),
        ({"reference": _body}, "op plain: has body and reference"),
        (
            {"is_recipe": True, "body": None, "reference": _body},
            "recipe plain: has reference; a recipe has body=",
        ),
        ({"body": lambda x: x + x}, "cannot add bf16 and bf16"),
        ({"body": lambda x: (x, x)}, "plain returns 2 values, declared are 1 (out)"),
        ({"ship": (Ship({}),)}, "ship entry 0: the type T is not given; choose bf16/f32"),
        ({"ship": (Ship(BF), Ship({"T": F16}))}, "ship entry 1: the type T is f16, expected bf16/f32"),
        ({"ship": (Ship({"T": BF16, "S": BF16}),)}, "gives a type 'S', the op's are T"),
        ({"ship": (Ship(BF, {"gemma": True}),)}, "attribute gemma is True, legal are the attributes none"),
        ({"ship": (Ship(BF, absent=("x",)),)}, "leaves out 'x'; the optional operands are none"),
        ({"ship": (Ship(BF, widths=(-4,)),)}, "width -4: expected at least 1"),
    ],
)
def test_what_an_op_may_not_say(changes: dict[str, Any], message: str) -> None:
    found = _refusal(replace(PLAIN, **changes))
    assert message in found


def test_a_refusal_points_at_the_body() -> None:
    line = inspect.getsourcelines(_body)[1]
    assert _refusal(replace(PLAIN, ship=(Ship({}),))).startswith(f"{__file__}:{line}: op plain: ship entry 0")


def test_attribute_values_and_widths_of_a_ship() -> None:
    by_group = (["eq", ["mod", ["dim", "N"], ["attr", "group"]], 0], "N must be a multiple of the group")
    op = replace(
        PLAIN, attrs=(Attr("group", (64, 128), 128),), constraints=(by_group,), body=lambda x, group: x,
        ship=(Ship(BF, {"group": 64}, widths=(192,)), Ship(BF, widths=(256,))),
    )  # fmt: skip
    _check(op)
    assert "width 192: N must be a multiple of the group" in _refusal(
        replace(op, ship=(Ship(BF, widths=(192,)),))
    )
    assert "attribute group is 32, legal are 64, 128" in _refusal(
        replace(op, ship=(Ship(BF, {"group": 32}),))
    )


def test_a_type_of_an_absent_operand_need_not_be_given() -> None:
    other = DTypeVar("U", (BF16, F32))
    op = replace(
        PLAIN, operands=(X, Tensor("y", other, ("N",), optional=True), OUT), body=lambda x, y: x,
        ship=(Ship(BF, absent=("y",)),),
    )  # fmt: skip
    _check(op)
    assert "the type U is not given" in _refusal(replace(op, ship=(Ship(BF),)))


# -- recipes
# ---------------------------------------------------------------------------------------------------------


def _mine(body: Any, *operands: Tensor | Scalar, **fields: Any) -> Op:
    return Op("mine", "F", operands or (X, OUT), body=body, is_recipe=True, **{"ship": (Ship(BF),), **fields})


def _steps(count: int) -> Any:
    def body(x: Value) -> Value:
        for _ in range(count):
            x = call(SHARE, x)[0]
        return x

    return body


def test_the_longest_recipe_passes() -> None:
    _check(SHARE, _mine(_steps(MAX_STEPS)))


def test_a_recipe_that_is_too_long_or_empty() -> None:
    assert "recipe mine: calls 9 ops, expected 1 to 8; split it" in _refusal(
        SHARE, _mine(_steps(MAX_STEPS + 1))
    )
    assert "recipe mine: calls 0 ops, expected 1 to 8; a recipe composes ops" in _refusal(_mine(_steps(0)))


def test_a_recipe_with_too_many_operands() -> None:
    def body(x: Value, **_: Value) -> Value:
        return call(SHARE, x)[0]

    scalars = [Scalar(f"k{i}", F32, 1.0) for i in range(MAX_OPERANDS - 2)]
    _check(SHARE, _mine(body, X, OUT, *scalars))
    wide = _mine(body, X, OUT, *scalars, Scalar("more", F32, 1.0))
    assert "recipe mine: has 17 operands, a recipe at most 16; split it" in _refusal(SHARE, wide)


def _unknown_operand(x: Value) -> Value:
    return call(SHARE, y=x)[0]


def _missing_operand(x: Value) -> Value:
    return call(GROW, x)[0]


def _arithmetic(x: Value) -> Value:
    y = x.to(F32)
    return call(SHARE, y * y)[0]


def _not_produced(x: Value) -> Value:
    call(SHARE, x)
    return x


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_unknown_operand, "share has no free operand or attribute 'y'; it takes x"),
        (_missing_operand, "grow needs operand k; it takes x, k"),
        (_arithmetic, "computes arith.extf itself; a recipe calls ops"),
        (_not_produced, "returns x as out: no op writes it; call one, such as copy"),
    ],
)
def test_what_a_recipe_may_not_do(body: Any, message: str) -> None:
    found = _refusal(SHARE, GROW, _mine(body))
    assert message in found
    assert found.startswith(f"{__file__}:")


def test_a_recipe_may_only_call_what_the_build_knows() -> None:
    shipped = replace(CHAIN, ship=(Ship(BF),))
    _check(shipped, JOIN, GROW, SHARE)
    message = "recipe chain: calls share, which no catalog of this build lists; add it to your catalog's ops"
    assert message in _refusal(shipped, JOIN, GROW)
    assert message in _refusal(shipped, JOIN, GROW, replace(SHARE, doc="another of that name"))


def test_one_value_for_two_results() -> None:
    def body(x: Value, acc: Value) -> tuple[Value, Value]:
        total = call(SHARE, x)[0]
        return total, total

    recipe = _mine(body, X, ACC, OUT, returns=("out", "acc"))
    assert "returns one value as out and acc; each written operand needs a value of its own" in _refusal(
        SHARE, recipe
    )


def test_an_old_value_that_is_needed_after_the_new_one() -> None:
    def body(x: Value, acc: Value) -> tuple[Value, Value]:
        total = call(PLUS, x, acc)[0]
        return call(PLUS, total, acc)[0], total

    recipe = _mine(body, X, ACC, OUT, returns=("out", "acc"))
    assert (
        "plus reads acc after it was overwritten; use its new value, or copy the old one first"
        in _refusal(PLUS, recipe)
    )


PLUS = Op("plus", "F", (X, Tensor("y", T, ("M", "N")), OUT), body=lambda x, y: x.to(F32) + y.to(F32))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Step(GROW, {"x": "x", "out": "out"}, {"k": "k"}),), None),
        ((Step(GROW, {"x": "y", "out": "out"}, {"k": "k"}),), "step 0 (grow) names 'y', which is no operand"),
        (
            (Step(GROW, {"x": "x", "out": "out"}, {"k": "eps"}),),
            "step 0 (grow) names 'eps', which is no operand",
        ),
        ((Step(GROW, {"x": "x"}, {"k": "k"}),), "step 0 (grow) binds x; expected out, x"),
        ((Step(GROW, {"x": "x", "out": "x"}, {"k": "k"}),), "no step writes out"),
        ((), "calls 0 ops, expected 1 to 8"),
        ((Step(SHARE, {"x": "x", "out": "out"}),), "calls share, which no catalog of this build lists"),
    ],
)
def test_steps_of_a_pipeline(steps: tuple[Step, ...], message: str | None) -> None:
    op = Op("mine", "F", (X, K, OUT), steps=lambda _: steps, is_recipe=True, ship=(Ship(BF),))
    if message is None:
        _check(GROW, op)
    else:
        assert message in _refusal(GROW, op)


# -- packages
# --------------------------------------------------------------------------------------------------------


def _install(monkeypatch: pytest.MonkeyPatch, name: str, made: Any) -> str:
    module = ModuleType(name)
    module.catalog = lambda: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    load.cache_clear()
    return name


def test_catalogs_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    a = _install(monkeypatch, "catalog_a", Catalog((PLAIN,), ("row a",)))
    b = _install(monkeypatch, "catalog_b", Catalog((SHARE, PLAIN), ("row b", "row a")))
    loaded = load((a, b))
    assert list(loaded.ops) == ["plain", "share"]
    assert loaded.realizations == ("row a", "row b")
    assert loaded.modules["plain"] == __name__


def test_two_ops_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a = _install(monkeypatch, "catalog_a", Catalog((PLAIN,)))
    b = _install(monkeypatch, "catalog_b", Catalog((replace(PLAIN, doc="another"),)))
    with pytest.raises(
        CheckError, match=r"op plain is declared twice \(again in catalog_b\); names are unique"
    ):
        load((a, b))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_catalog", "catalog no_such_catalog cannot be imported"),
        ("json", "package json has no function catalog()"),
    ],
)
def test_what_is_no_catalog(name: str, message: str) -> None:
    with pytest.raises(CheckError, match=re.escape(message)):
        load((name,))


def test_names_are_guessed() -> None:
    assert find(OWN, "rms_norm").name == "rms_norm"
    with pytest.raises(CheckError, match=r"no op or recipe named 'rms_nrom'; did you mean rms_norm"):
        find(OWN, "rms_nrom")
    with pytest.raises(CheckError, match=r"no op or recipe named 'zzz'; known: plain"):
        find({"plain": PLAIN}, "zzz")


@pytest.mark.parametrize("name", list(OWN))
def test_every_signature_is_a_manifests(name: str) -> None:
    value = signature_json(OWN[name])
    assert dump(parse_signature(value)) == value
