"""The table of what each stage may contain."""

import re
from collections.abc import Iterator

import pytest
from mlir import ir

from kiln.compiler.legality import ROW_OPS, check_stage
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dialect import context
from kiln.tests.compiler.lowering import CHAIN, OPS, lowered

STAGES = ("rows", "expand", "functions", "simplify")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with context(OPS.values()):
        yield


def _module(line: str) -> ir.Module:
    return ir.Module.parse(f"func.func @f(%x: f32, %y: tensor<?x?xbf16>, %i: i32) {{\n{line}\nreturn\n}}")


DECLARED = '%z = "kiln.share"(%y) : (tensor<?x?xbf16>) -> tensor<?x?xbf16>'


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("graph", DECLARED),
        ("rows", DECLARED),
        ("graph", "%c = arith.constant 1.0 : f32"),
        ("expand", "%z = arith.addf %x, %x : f32"),
        ("functions", "%z = math.fma %x, %x, %x : f32"),
        ("simplify", '%z = "kiln.to_e4m3"(%x) : (f32) -> i8'),
    ],
)
def test_what_a_stage_allows(stage: str, line: str) -> None:
    check_stage(_module(line), stage)


@pytest.mark.parametrize(
    ("stage", "line", "name"),
    [
        ("graph", "%z = arith.addf %x, %x : f32", "arith.addf"),
        ("graph", '%z = "kiln.to_e4m3"(%x) : (f32) -> i8', "kiln.to_e4m3"),
        ("expand", DECLARED, "kiln.share"),
        ("functions", DECLARED, "kiln.share"),
        ("simplify", DECLARED, "kiln.share"),
        ("rows", "%z = math.powf %x, %x : f32", "math.powf"),
        ("expand", "%z = arith.remf %x, %x : f32", "arith.remf"),
        ("simplify", "%z = arith.remsi %i, %i : i32", "arith.remsi"),
    ],
)
def test_what_a_stage_refuses(stage: str, line: str, name: str) -> None:
    with pytest.raises(LegalityError, match=re.escape(f"{name} is not legal after stage {stage}")):
        check_stage(_module(line), stage)


def test_nested_regions_are_searched() -> None:
    text = """
    func.func @f(%x: tensor<?xf32>, %s: tensor<f32>) {
      %r = linalg.reduce ins(%x : tensor<?xf32>) outs(%s : tensor<f32>) dimensions = [0] (%a: f32, %b: f32) {
        %c = arith.remf %a, %b : f32
        linalg.yield %c : f32
      }
      return
    }"""
    with pytest.raises(LegalityError, match=r"arith\.remf"):
        check_stage(ir.Module.parse(text), "simplify")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_of_a_recipe_is_legal(stage: str) -> None:
    with lowered(CHAIN, stage) as module:
        check_stage(module, stage)


def test_only_fused_multiply_add_is_a_contraction() -> None:
    assert not {n for n in ROW_OPS if "fast" in n or "rsqrt" in n or n in ("arith.remf", "vector.fma")}
