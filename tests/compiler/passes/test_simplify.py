"""simplify: equal operations are merged and dead ones dropped; no value changes."""

from __future__ import annotations

import pytest
from mlir import ir

from kiln.compiler.legality import check_stage
from kiln.compiler.passes.simplify import Simplify
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dialect import context, verify
from kiln.tests.compiler.lowering import CHAIN, JOIN, OPS, SHARE, lowered, names


def _module(body: str) -> ir.Module:
    text = f"func.func @f(%x: f32, %m: memref<?xf32>, %r: index, %w: index) {{\n{body}\n  return\n}}"
    return ir.Module.parse(text)


def _simplified(body: str) -> list[str]:
    with context(OPS.values()):
        module = Simplify().run(_module(body))
        verify(module)
        check_stage(module, "simplify")
        return names(module)


STORE = '"kiln.store"(%y, %m, %r) {layout = "rows"} : (f32, memref<?xf32>, index) -> ()'


def test_equal_operations_are_merged() -> None:
    body = (
        f"%a = arith.mulf %x, %x : f32\n%b = arith.mulf %x, %x : f32\n%y = arith.addf %a, %b : f32\n{STORE}"
    )
    assert _simplified(body) == ["func.func", "arith.mulf", "arith.addf", "kiln.store", "func.return"]


def test_what_nothing_reads_is_dropped() -> None:
    body = f"%a = math.sqrt %x : f32\n%b = arith.mulf %a, %a : f32\n%y = arith.negf %x : f32\n{STORE}"
    assert _simplified(body) == ["func.func", "arith.negf", "kiln.store", "func.return"]


def test_loads_that_nothing_reads_are_dropped() -> None:
    with lowered(CHAIN, "expand") as module:
        assert names(module).count("kiln.load") == 2
    with lowered(CHAIN, "simplify") as module:
        assert names(module).count("kiln.load") == 1  # the stream's old value is not read


@pytest.mark.parametrize("operation", ["arith.mulf", "arith.addf", "arith.subf", "arith.divf"])
@pytest.mark.parametrize("constant", ["0.0", "-0.0", "1.0"])
def test_no_arithmetic_is_folded(operation: str, constant: str) -> None:
    """x * 1 keeps a signalling NaN's quietening, x + 0 turns -0 into +0: nothing is folded."""
    body = f"%c = arith.constant {constant} : f32\n%y = {operation} %x, %c : f32\n{STORE}"
    assert operation in _simplified(body)


def test_constants_are_not_combined() -> None:
    body = (
        f"%a = arith.constant 1.0 : f32\n%b = arith.constant 3.0 : f32\n%y = arith.divf %a, %b : f32\n{STORE}"
    )
    assert "arith.divf" in _simplified(body)


def test_regions_of_reductions_stay() -> None:
    with lowered(SHARE, "simplify") as module:
        verify(module)
        assert names(module).count("linalg.yield") == 1


def test_a_second_run_changes_nothing() -> None:
    with lowered(JOIN, "simplify") as module:
        once = str(module)
        assert str(Simplify().run(module)) == once


def test_what_it_may_not_leave_is_refused() -> None:
    with context(OPS.values()):
        module = Simplify().run(_module(f"%y = math.cos %x : f32\n{STORE}"))
        with pytest.raises(LegalityError, match="math\\.cos is not legal after stage simplify"):
            check_stage(module, "simplify")
