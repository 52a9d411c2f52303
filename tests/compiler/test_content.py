"""Which plans a target is told to lack."""

from typing import Any

from kiln.compiler.content import runnable, unserved


def _plan(variant: str, *ops: str, tier: str = "primitive") -> dict[str, Any]:
    return {"op": "whole", "variant": variant, "tier": tier, "steps": [{"op": op} for op in ops]}


def _missing(plans: list[dict[str, Any]], served: set[str]) -> list[str]:
    return unserved(plans, runnable(plans, served), served, "here")


def test_a_plan_for_other_targets_is_not_missed_where_another_serves() -> None:
    plans = [_plan("two", "solve", "walk"), _plan("three", "prepare", "state", "output")]
    assert _missing(plans, {"solve", "walk"}) == []


def test_an_op_that_no_plan_serves_is_missed() -> None:
    assert _missing([_plan("two", "solve", "walk")], {"solve"}) == [
        "whole.two can't run on here: walk has no realization there"
    ]


def test_a_composite_is_missed_even_where_a_fused_kernel_serves() -> None:
    assert _missing([_plan("composite", "mul", tier="composite")], {"whole"}) == [
        "whole.composite can't run on here: mul has no realization there"
    ]
