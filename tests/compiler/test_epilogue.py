"""What follows a primitive op in a recipe: found as an op of its own, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kiln.compiler.catalog import load_catalogs
from kiln.compiler.epilogue import TOTAL, Epilogue, epilogue_of
from kiln.compiler.lower import Request, lower
from kiln.compiler.plan import plan_json
from kiln.compiler.validate import validate
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.dtypes import BF16, F32
from kiln.ir.interpret import run
from kiln.ir.language import Value, call
from kiln.ir.record import expressible
from kiln.ir.spec import Op, Ship, Tensor
from kiln.recipes.activation import ADD, CAST, MUL_COLUMNS, UNARY
from kiln.recipes.gemm import MATMUL, MATMUL_BT, WEIGHT, X
from kiln.recipes.linear import LINEAR, LINEAR_EPILOGUE
from kiln.recipes.norm import L2_NORM

SILU = next(op for op in UNARY if op.name == "silu")
OUT = Tensor("out", BF16, ("M", "N"), "out")
ALPHA = Tensor("alpha", F32, ("N",))
SHIP = Ship({"T": BF16, "W": BF16})


def _product(x: Value, weight: Value, dtype: Any = F32) -> Value:
    return call(MATMUL_BT, x, weight, dtypes={"U": dtype})[0]


def _scaled(x: Value, weight: Value, alpha: Value) -> Value:
    return call(CAST, call(MUL_COLUMNS, _product(x, weight), alpha)[0], dtypes={"O": BF16})[0]


def _mine(body: Any, *operands: Tensor) -> Op:
    return Op("mine", "F", operands or (X, WEIGHT, OUT), body=body, is_recipe=True, ship=(SHIP,))


SCALED = _mine(_scaled, X, WEIGHT, ALPHA, OUT)


def test_the_rest_of_a_recipe_is_an_op_over_the_total() -> None:
    made = epilogue_of(SCALED, SHIP)
    assert isinstance(made, Epilogue)
    assert [o.name for o in made.op.operands] == [TOTAL, "alpha", "out"]
    assert (made.head, dict(made.types)) == (MATMUL_BT, {"x": BF16, "weight": BF16})
    assert "arith.mulf" in made.operations
    total, alpha = np.full((2, 3), 1.5, np.float32), np.array([2, 4, 8], np.float32)
    (got,) = run(made.op, {TOTAL: total, "alpha": alpha})
    assert got is not None
    assert got.tolist() == [[3, 6, 12]] * 2


def test_it_lowers_to_a_row_program() -> None:
    made = epilogue_of(SCALED, SHIP)
    assert isinstance(made, Epilogue)
    program = lower(Request(made.op, SHIP.dtypes), load_catalogs(("kiln.recipes",))).program
    assert [i.text for i in program.instructions if i.name == "kiln.load"] == [TOTAL, "alpha"]
    assert [i.text for i in program.instructions if i.name == "kiln.store"] == ["out:out"]


@pytest.mark.parametrize("ship", LINEAR.ship)
def test_every_linear_layer_has_the_epilogue_of_its_second_step(ship: Ship) -> None:
    made = epilogue_of(LINEAR, ship)
    assert isinstance(made, Epilogue)
    rest = [o.name for o in made.op.operands]
    assert rest == [o.name for o in LINEAR_EPILOGUE.operands]
    assert [s["op"] for s in plan_json(LINEAR, ship)["steps"]] == ["matmul_bt", "linear_epilogue"]


def _normed(x: Value, weight: Value) -> Value:
    return call(CAST, call(L2_NORM, _product(x, weight))[0], dtypes={"O": BF16})[0]


def _rounded_before(x: Value, weight: Value) -> Value:
    return call(SILU, _product(x, weight, BF16))[0]


def _twice(x: Value, weight: Value) -> Value:
    first, second = _product(x, weight), _product(x, weight)
    return call(CAST, call(ADD, first, second)[0], dtypes={"O": BF16})[0]


def _reads_weight(x: Value, weight: Value) -> Value:
    return call(CAST, call(ADD, _product(x, weight), weight)[0], dtypes={"O": BF16})[0]


def _no_product(x: Value, weight: Value) -> Value:
    return call(SILU, x)[0]


def _cast(x: Value, weight: Value) -> Value:
    return call(CAST, _product(x, weight), dtypes={"O": BF16})[0]


def _other_name(acts: Value, weight: Value) -> Value:
    return _cast(acts, weight)


def _two_results(x: Value, weight: Value) -> tuple[Value, Value]:
    total = _product(x, weight)
    return call(CAST, total, dtypes={"O": BF16})[0], call(SILU, total)[0]


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (_mine(_normed), "linalg.reduce reduces over the row or over groups of it"),
        (_mine(_rounded_before), "matmul_bt must have one result, in f32"),
        (_mine(_twice), "it calls matmul_bt after matmul_bt"),
        (_mine(_reads_weight), "add reads weight, which matmul_bt reads"),
        (_mine(_no_product), "its first op, silu, is not primitive"),
        (_mine(_other_name, replace(X, name="acts"), WEIGHT, OUT), "it must declare x as matmul_bt does"),
        (
            _mine(_cast, X, replace(WEIGHT, shape=("K", "N")), OUT),
            "it must declare weight as matmul_bt does",
        ),
        (
            _mine(_two_results, X, WEIGHT, OUT, Tensor("other", F32, ("M", "N"), "out")),
            "it must write one [M, N]",
        ),
    ],
)
def test_what_is_no_epilogue_is_told_by_name(recipe: Op, why: str) -> None:
    assert epilogue_of(recipe, SHIP) == f"mine has no epilogue and stays composite: {why}"


def test_a_recipe_with_a_reduction_keeps_its_plan() -> None:
    plan = plan_json(_mine(_normed), SHIP)
    assert [s["op"] for s in plan["steps"]] == ["matmul_bt", "l2_norm", "cast"]
    assert {t["dtype"] for t in plan["temps"]} == {"f32"}


def test_what_one_row_can_run() -> None:
    assert expressible(SILU)
    assert not expressible(MATMUL_BT)
    assert not expressible(SCALED)
    assert not expressible(LINEAR)


def test_the_oracle_runs_the_primitive_op_of_a_recipe() -> None:
    x = np.array([[1, 2], [3, -1]], BF16.numpy)
    weight = np.array([[1, 1], [2, -1], [4, 0.5]], BF16.numpy)
    (got,) = run(SCALED, {"x": x, "weight": weight, "alpha": np.array([1, 1, 2], np.float32)})
    assert got is not None
    assert got.astype(np.float32).tolist() == [[3, 0, 10], [2, 7, 23]]


def test_other_columns_are_for_primitive_ops_alone() -> None:
    recipe = _mine(_no_product)
    with pytest.raises(DeclarationError, match=r"mine: .*hands x \[M, K\] to silu, which computes rows of N"):
        validate({o.name: o for o in (SILU, recipe)})
    validate({o.name: o for o in (MATMUL_BT, MATMUL, MUL_COLUMNS, CAST, SCALED)})
