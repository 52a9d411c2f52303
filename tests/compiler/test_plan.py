"""Composite plans: the order of steps, shared temporaries, absent operands; and the plans of every shipped
recipe.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kiln.compiler.catalog import load_catalogs
from kiln.compiler.plan import plan_json, type_predicates, variant_name
from kiln.ir.dtypes import BF16, F32
from kiln.ir.language import Value, call
from kiln.ir.spec import Op, Scalar, Ship, Tensor
from kiln.runtime.manifest import dump, parse_plan
from kiln.tests.compiler.lowering import ACC, BF, CHAIN, GROW, JOIN, LEVELS, OUT, SHARE, K, T, X

OWN = load_catalogs(("kiln.recipes",))
SHIP = Ship(BF)
PLANS = [(op, ship) for op in OWN.values() if op.is_recipe for ship in op.ship]


def _recipe(body: Any, *operands: Tensor | Scalar, returns: tuple[str, ...] = ()) -> Op:
    return Op("mine", "F", operands, body=body, is_recipe=True, returns=returns)


def test_steps_bind_operands_temporaries_and_results() -> None:
    plan = plan_json(CHAIN, SHIP)
    assert [s["op"] for s in plan["steps"]] == ["join", "grow", "share"]
    assert [s["bind"] for s in plan["steps"]] == [
        {"x": "x", "y": None, "out": "acc"}, {"x": "acc", "out": "temp:s0"}, {"x": "temp:s0", "out": "out"},
    ]  # fmt: skip
    assert plan["steps"][1]["args"] == {"k": ["arg", "k"]}
    assert plan["steps"][1]["attrs"] == {"twice": True}
    assert plan["temps"] == [{"name": "s0", "dtype": "bf16", "shape": [["dim", "M"], ["dim", "N"]]}]
    assert (plan["variant"], plan["tier"], plan["mode"]) == ("composite.bf16", "composite", "exact")


def _long(x: Value, k: Value) -> Value:
    for _ in range(4):
        x = call(GROW, x, k)[0]
    return x


def test_temporaries_share_slots_once_they_are_dead() -> None:
    plan = plan_json(_recipe(_long, X, K, OUT), SHIP)
    assert [s["bind"]["out"] for s in plan["steps"]] == ["temp:s0", "temp:s1", "temp:s0", "out"]
    assert [t["name"] for t in plan["temps"]] == ["s0", "s1"]


def _kept_alive(x: Value, k: Value) -> Value:
    first = call(GROW, x, k)[0]
    second = call(GROW, first, k)[0]
    third = call(GROW, second, k)[0]
    return call(ADD, third, first)[0]


ADD = Op("plus", "F", (X, Tensor("y", T, ("M", "N")), OUT), body=lambda x, y: x.to(F32) + y.to(F32))


def test_a_temporary_that_is_read_later_keeps_its_slot() -> None:
    plan = plan_json(_recipe(_kept_alive, X, K, OUT), SHIP)
    assert [s["bind"]["out"] for s in plan["steps"]] == ["temp:s0", "temp:s1", "temp:s2", "out"]
    assert plan["steps"][3]["bind"] == {"x": "temp:s2", "y": "temp:s0", "out": "out"}


def _read_twice(x: Value, k: Value) -> Value:
    first = call(GROW, x, k)[0]
    doubled = call(ADD, first, first)[0]
    left, right = call(GROW, doubled, k)[0], call(GROW, doubled, 2.0)[0]
    return call(ADD, left, right)[0]


def test_a_temporary_read_twice_by_one_step_is_freed_once() -> None:
    plan = plan_json(_recipe(_read_twice, X, K, OUT), SHIP)
    left, right = (s["bind"]["out"] for s in plan["steps"][2:4])
    assert left != right
    assert plan["steps"][3]["args"] == {"k": 2.0}


def _two_kinds(x: Value) -> Value:
    codes, tops = call(LEVELS, call(SHARE, x)[0])
    return call(FIRST, codes, tops)[0]


FIRST = Op(
    "first",
    "F",
    (
        Tensor("codes", LEVELS.tensors[1].dtype, ("M", "N")),
        Tensor("tops", F32, LEVELS.tensors[2].shape),
        Tensor("out", F32, ("M", "N"), "out"),
    ),
    body=lambda codes, tops: codes,
)


def test_slots_are_shared_by_equal_types_and_shapes_alone() -> None:
    plan = plan_json(_recipe(_two_kinds, X, Tensor("out", F32, ("M", "N"), "out")), SHIP)
    assert {(t["dtype"], json.dumps(t["shape"][1])) for t in plan["temps"]} == {
        ("bf16", '["dim", "N"]'), ("u8", '["dim", "N"]'), ("f32", '["floordiv", ["dim", "N"], 4]'),
    }  # fmt: skip


def _reader_after_writer(x: Value, acc: Value) -> tuple[Value, Value]:
    fresh = call(ADD, x, acc)[0]
    old = call(SHARE, acc)[0]
    return old, fresh


def test_an_old_value_is_read_before_it_is_overwritten() -> None:
    plan = plan_json(_recipe(_reader_after_writer, X, ACC, OUT, returns=("out", "acc")), SHIP)
    assert [(s["op"], s["bind"]["out"]) for s in plan["steps"]] == [("share", "out"), ("plus", "acc")]


@pytest.mark.parametrize(
    ("ship", "want"),
    [
        (Ship({"T": BF16}), "bf16"),
        (Ship({"T": BF16, "U": BF16}), "bf16"),
        (Ship({"T": BF16, "U": F32}), "bf16_f32"),
        (Ship({}), "any"),
        (Ship({"T": BF16}, {"gemma": True}), "bf16_gemma"),
        (
            Ship({"T": BF16}, {"gemma": False, "group": 64, "activation": "silu"}),
            "bf16_nogemma_group64_activationsilu",
        ),
        (Ship({"T": BF16}, absent=("weight", "bias")), "bf16_no_weight_no_bias"),
    ],
)
def test_variant_names(ship: Ship, want: str) -> None:
    assert variant_name(ship) == want


def test_predicates_of_a_specialization() -> None:
    assert type_predicates(JOIN, SHIP) == [
        ["dtype", "x", "bf16"],
        ["present", "y"],
        ["dtype", "y", "bf16"],
        ["dtype", "out", "bf16"],
    ]
    assert ["absent", "y"] in type_predicates(JOIN, Ship(BF, absent=("y",)))
    assert ["attr", "twice", False] in type_predicates(GROW, SHIP)
    assert ["attr", "twice", True] in type_predicates(GROW, Ship(BF, {"twice": True}))


@pytest.mark.parametrize(("op", "ship"), PLANS, ids=[f"{op.name}-{variant_name(s)}" for op, s in PLANS])
def test_every_shipped_plan_is_sound(op: Op, ship: Ship) -> None:
    """It parses, binds every operand of every step, reads nothing before it is written, writes every
    result.
    """
    plan = plan_json(op, ship)
    assert dump(parse_plan(plan)) == plan
    present = {t.name for t in op.inputs} - set(ship.absent)
    written: set[Any] = set()
    for step in plan["steps"]:
        callee = OWN[step["op"]]
        assert step["bind"].keys() == {t.name for t in callee.tensors}
        for tensor in callee.inputs:
            place = step["bind"][tensor.name]
            assert place in present | written or (place is None and tensor.optional)
        written |= {step["bind"][t.name] for t in callee.outputs}
    assert {t.name for t in op.outputs} - set(ship.absent) <= written
    assert {f"temp:{t['name']}" for t in plan["temps"]} <= written


def test_a_residual_that_is_absent_is_no_step() -> None:
    op = OWN["rms_norm_quant_fp8"]
    steps = {s.absent: [x["op"] for x in plan_json(op, s)["steps"]] for s in op.ship}
    for absent, ops in steps.items():
        assert ("add" in ops) == ("residual" not in absent)
