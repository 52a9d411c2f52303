"""Primitive realizations as data: names, hints and constants fit the kernels, and a variant covers every
call."""

import ast
from pathlib import Path
from typing import Any

import pytest

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer, PrimitivePlan
from kiln.backends.cuda.variants import gemm, topk
from kiln.recipes.topk import MAX_K

ALL = topk.PRIMITIVES + gemm.CANDIDATES
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
    for sm in (80, 90, 120):
        names = [(p.op, p.variant) for p in ALL if p.min_sm <= sm <= p.max_sm]
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


def _fits(when: Any, **call: int) -> bool:
    """Whether a plan's limits on k, V and programs admit an aligned f32 call."""
    lists = -(-call["V"] // call["tile"])
    found = {"k": call["k"], "V": call["V"], "programs": call["R"] * lists}
    names = {str(topk.K): "k", str(topk.V): "V"}
    limits = {names.get(str(left), "programs"): right for head, left, right in when[1:] if head == "le"}
    return when[1] == ["dtype", "scores", "f32"] and all(found[n] <= limit for n, limit in limits.items())


@pytest.mark.parametrize(
    ("rows", "width", "k", "variant"),
    [
        (1, 151936, 16, "split_f32_k16_tile2048_lists128"),
        (224, 248320, 16, "split_f32_k16_tile8192_lists128"),
        (64, 131072, 64, "split_f32_k64_tile8192_lists16"),
        (64, 131073, 64, "split_f32_k64_tile8192_lists32"),
        (1, 300000, 16, "split_f32_k16_tile8192_lists128"),
        (1, 262144, 17, "split_f32_k64_tile8192_lists32"),
        (1, 300000, 17, None),
        (1, 1000, 65, None),
    ],
)
def test_the_first_fitting_plan(rows: int, width: int, k: int, variant: str | None) -> None:
    ordered = sorted(topk.PLANS, key=lambda p: -p.priority)
    fitting = [
        p.variant for p in ordered if _fits(p.when, R=rows, V=width, k=k, tile=int(p.steps[0].args["tile"]))
    ]
    assert (fitting[0] if fitting else None) == variant


def test_what_no_plan_takes_has_a_kernel_of_its_own() -> None:
    assert topk.ROW.when == ["and", ["dtype", "scores", "f32"], ["le", topk.V, 2**31 - topk.ROW_TILE]]
    assert topk.ROW.constants["KEEP"] >= MAX_K
    assert topk.ROW.priority < min(p.priority for p in topk.PLANS)


def _realizations(plan: PrimitivePlan, position: int) -> list[CudaPrimitive]:
    """What can run a step of a plan, whatever the number of lists and the alignment of temporaries."""
    step = plan.steps[position]
    base = [plan.when[1], ["eq", ["arg", "keep"], step.args["keep"]]]
    if "tile" in step.args:
        base.append(["eq", ["arg", "tile"], step.args["tile"]])
    return [p for p in topk.PRIMITIVES if p.op == step.op and all(test in p.when for test in base)]


@pytest.mark.parametrize("plan", topk.PLANS, ids=lambda p: p.variant)
def test_every_plan_step_has_a_realization(plan: PrimitivePlan) -> None:
    tiles, merges = _realizations(plan, 0), _realizations(plan, 1)
    unaligned = [p for p in tiles if ["aligned", "scores", 16] not in p.when]
    assert tiles
    assert unaligned or ["aligned", "scores", 16] in plan.when
    longest = next(right for head, left, right in plan.when[1:] if head == "le" and left == topk.V)
    tile = int(plan.steps[0].args["tile"])
    assert longest // tile in {p.constants["LISTS"] for p in merges}


@pytest.mark.parametrize("scan", topk.SCANS, ids=repr)
def test_a_scan_holds_its_columns_in_one_mask_a_thread(scan: topk.Scan) -> None:
    assert scan.tile // (32 * scan.warps) <= 32
    assert scan.used <= scan.groups <= 32 * scan.warps


@pytest.mark.parametrize("merge", topk.MERGES, ids=repr)
def test_a_merge_holds_its_slots_in_one_mask_a_thread(merge: topk.Merge) -> None:
    assert merge.lists * merge.used // (32 * merge.warps) <= 32
    assert merge.used <= merge.groups <= 32 * merge.warps
