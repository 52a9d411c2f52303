"""The pipeline as a whole: stages kept as text, the row program that the emitters read, every shipped op."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kiln.compiler.catalog import load_catalogs
from kiln.compiler.lower import Lowered, Request, lower
from kiln.ir.diagnostics import TypeCheckError
from kiln.ir.dtypes import BF16, F32, U8, DType
from kiln.ir.language import ROW, SCALAR, Shape
from kiln.ir.record import expressible
from kiln.ir.spec import Op, Ship
from kiln.tests.compiler.lowering import BF, CHAIN, GROW, LEVELS, OPS, OUT, SHARE, X
from kiln.tests.conftest import Golden

OWN = load_catalogs(("kiln.recipes",))
STAGES = ("graph", "rows", "expand", "functions", "simplify")
TYPES: dict[str, DType] = {"T": BF16, "R": BF16, "W": BF16}


def _own(name: str, absent: tuple[str, ...] = ()) -> Lowered:
    return lower(Request(OWN[name], TYPES, absent=absent, features=frozenset({"e4m3"})), OWN)


def test_every_stage_is_kept() -> None:
    assert tuple(lower(Request(CHAIN, BF), OPS).stages) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_golden_stages_of_a_recipe(golden: Golden, stage: str) -> None:
    text = _own("rms_norm_quant_fp8", absent=("normed",)).stages[stage]
    assert ".py" not in text
    golden(f"rms_norm_quant_fp8.{stage}.mlir", text)


def test_lowering_is_deterministic() -> None:
    first = _own("silu_mul_fp4_quant")
    for _ in range(3):
        again = _own("silu_mul_fp4_quant")
        assert again == first


def test_the_row_program_of_a_sum() -> None:
    program = lower(Request(SHARE, BF), OPS).program
    assert (program.name, program.arguments) == ("share", ("x", "out:out"))
    assert program.reduces_rows
    (reduce,) = (i for i in program.instructions if i.name == "linalg.reduce")
    assert (reduce.text, reduce.shape, reduce.dtype) == ("arith.addf", SCALAR, F32)
    (store,) = (i for i in program.instructions if i.name == "kiln.store")
    assert (store.text, store.dtype, store.shape, store.result) == ("out:out", BF16, ROW, -1)


def test_the_row_program_of_groups() -> None:
    program = lower(Request(LEVELS, BF, features=frozenset({"e4m3"})), OPS).program
    shapes = {i.name: i.shape for i in program.instructions}
    assert shapes["tensor.expand_shape"] == Shape(Fraction(1, 4), 4)
    assert shapes["linalg.reduce"] == Shape(Fraction(1, 4))
    assert shapes["kiln.to_e4m3"] == Shape(Fraction(1, 4), 4)
    stores = [(i.text, i.shape, i.dtype) for i in program.instructions if i.name == "kiln.store"]
    assert stores == [("out:out", ROW, U8), ("tops:out", Shape(Fraction(1, 4)), F32)]
    assert not program.reduces_rows


def test_scalars_and_constants() -> None:
    program = lower(Request(GROW, BF, {"twice": True}), OPS).program
    arguments = [i.text for i in program.instructions if i.name == "kiln.argument"]
    assert arguments == ["k"]
    assert {89.0, -104.0} <= {i.constant for i in program.instructions if i.name == "arith.constant"}


def test_every_value_is_defined_before_it_is_used() -> None:
    for name in ("rms_norm_quant_fp8", "silu_mul_fp4_quant_swizzled", "rope", "embedding", "softmax"):
        op = OWN[name]
        program = lower(_request(op, op.ship[0]), OWN).program
        defined: set[int] = set()
        for i in program.instructions:
            assert set(i.args) <= defined, f"{name}: {i}"
            defined.add(i.result)


def _request(op: Op, ship: Ship, *features: str, fast: bool = False) -> Request:
    return Request(op, ship.dtypes, ship.attrs, ship.absent, frozenset(features), fast)


@pytest.mark.parametrize("name", [n for n, op in OWN.items() if expressible(op)])
def test_every_shipped_specialization_lowers(name: str) -> None:
    op = OWN[name]
    for ship in op.ship:
        for features in ((), ("e4m3", "canonical_nan")):
            program = lower(_request(op, ship, *features), OWN).program
            written = {i.text for i in program.instructions if i.name == "kiln.store"}
            assert written == {f"{t.name}:out" for t in op.outputs if t.name not in ship.absent}
            assert not any(
                i.name in ("math.exp", "math.tanh", "math.erf", "kiln.logistic") for i in program.instructions
            )


def test_a_body_that_does_not_type_check_is_refused() -> None:
    bad = Op("bad", "F", (X, OUT), body=lambda x: x + x)
    with pytest.raises((TypeCheckError, RuntimeError), match="cannot add bf16 and bf16"):
        lower(Request(bad, BF), {"bad": bad})


def test_a_recipe_of_an_op_that_is_not_in_the_catalog_is_refused() -> None:
    with pytest.raises(Exception, match=r"kiln\.share"):
        lower(Request(CHAIN, BF), {n: op for n, op in OPS.items() if n != "share"})
