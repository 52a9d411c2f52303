"""rows: whole tensors become one row inside a parallel loop, with explicit loads and stores."""

import pytest

from kiln.compiler.legality import check_stage
from kiln.compiler.passes.rows import Rows
from kiln.ir import trace
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dialect import context, verify
from kiln.ir.dtypes import F32
from kiln.tests.compiler.lowering import BF, CHAIN, GROW, JOIN, LEVELS, OPS, lowered, names


def test_a_recipe_becomes_one_row() -> None:
    with lowered(CHAIN, "rows") as module:
        verify(module)
        check_stage(module, "rows")
        assert names(module) == [
            "func.func", "scf.forall", "kiln.load", "kiln.load", "kiln.absent", "kiln.join", "kiln.grow",
            "kiln.share",
            "kiln.store", "kiln.store", "scf.forall.in_parallel", "func.return",
        ]  # fmt: skip


def test_memory_has_both_sides_of_an_in_out_operand() -> None:
    with lowered(CHAIN, "rows") as module:
        assert '["x", "acc", "out:out", "acc:out", "k", "%rows", "%width"]' in str(module)


def test_an_absent_operand_has_no_memory() -> None:
    with lowered(JOIN, "rows", absent=("y",)) as module:
        assert '["x", "out:out", "%rows", "%width"]' in str(module)
    with lowered(JOIN, "rows") as module:
        assert '["x", "y", "out:out", "%rows", "%width"]' in str(module)


def test_a_row_operand_is_loaded_once_for_all_rows() -> None:
    with lowered(JOIN, "rows") as module:
        assert '"kiln.load"(%arg1) : (memref<?xbf16>) -> tensor<?xbf16>' in str(module)
        assert '"kiln.load"(%arg0, %arg5)' in str(module)


def test_stores_carry_the_layout() -> None:
    with lowered(LEVELS, "rows") as module:
        assert 'layout = "strided"' in str(module)
        assert 'layout = "rows"' in str(module)


def test_attributes_and_locations_are_kept() -> None:
    with lowered(GROW, "rows", attrs={"twice": True}) as module:
        assert '"kiln.grow"(%0, %arg2) {twice = true}' in str(module)


def test_other_types_than_the_graphs_are_refused() -> None:
    with context(OPS.values()):
        graph = trace.graph(GROW, BF, {})
        module = Rows(GROW, {"T": F32}, {}, ()).run(graph)
        with pytest.raises(LegalityError, match="expected 'tensor<\\?xf32>' but got 'tensor<\\?xbf16>'"):
            verify(module)
