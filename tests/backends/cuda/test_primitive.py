"""Primitive realizations as data: names, hints and constants fit the kernels, and a variant covers every
call."""

import ast
from pathlib import Path

import pytest

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.backends.cuda.variants import gemm, topk
from kiln.recipes.topk import MAX_K

ALL = topk.PRIMITIVES + gemm.PRIMITIVES
ROOT = Path(__file__).parents[3]


def _parameters(kernel: str) -> list[str]:
    """Parameter names of a kernel, from its source."""
    module, _, name = kernel.partition(":")
    source = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    found = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    return [a.arg for a in found[0].args.args]


@pytest.mark.parametrize("primitive", ALL, ids=lambda p: f"{p.op}.{p.variant}")
def test_the_signature_is_the_kernels(primitive: CudaPrimitive) -> None:
    assert list(primitive.signature()) == _parameters(primitive.kernel)


def test_variant_names_are_unique() -> None:
    names = [(p.op, p.variant) for p in ALL]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("primitive", ALL, ids=lambda p: f"{p.op}.{p.variant}")
def test_hints_are_implied_by_the_predicate(primitive: CudaPrimitive) -> None:
    when = primitive.when
    for p in primitive.params:
        if isinstance(p, Pointer) and p.hinted:
            assert ["aligned", p.operand, 16] in when
        if isinstance(p, Number) and p.hinted and p.name != "chunk":
            assert ["divisible", p.value, 16] in when


def test_an_unhinted_variant_has_no_attributes() -> None:
    plain = next(p for p in ALL if p.variant == "bf16_any_unaligned")
    hinted = next(p for p in ALL if p.variant == "bf16_any")
    assert plain.attributes() == {}
    assert len(hinted.attributes()) == 7


def test_scalars_and_pointers_as_json() -> None:
    assert Pointer("x", "x", "bf16").json()["align"] == 2
    assert Pointer("x", "x", "bf16", align=16).json()["align"] == 16
    assert Number("k", "i32", ["arg", "k"]).json() == {
        "name": "k",
        "kind": "scalar",
        "dtype": "i32",
        "value": ["arg", "k"],
        "divisible_by": 1,
    }


def test_plans_cover_every_k_once() -> None:
    keeps = [plan.steps[0].args["keep"] for plan in topk.PLANS]
    assert keeps == sorted(keeps)
    assert keeps[-1] == MAX_K
    below = 0
    for plan, keep in zip(topk.PLANS, keeps, strict=True):
        assert plan.when == ["and", ["gt", ["arg", "k"], below], ["le", ["arg", "k"], keep]]
        below = keep


def test_every_plan_step_has_a_realization_for_its_lists() -> None:
    for plan in topk.PLANS:
        for step in plan.steps:
            for dtype in topk.DTYPE_NAMES:
                base = ["and", ["dtype", "scores", dtype], ["eq", ["arg", "keep"], step.args["keep"]]]
                assert any(p.op == step.op and p.when == base for p in topk.PRIMITIVES)
