"""functions: exp and its like are spelled out, unless the target has them natively or the fast mode is
asked for.
"""

from __future__ import annotations

import pytest
from mlir import ir

from kiln.compiler.legality import check_stage
from kiln.compiler.passes.functions import Functions
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dialect import context, verify
from kiln.tests.compiler.lowering import GROW, LEVELS, OPS, lowered, names

E4M3 = frozenset({"e4m3"})


def test_exp_is_spelled_out() -> None:
    with lowered(GROW, "functions") as module:
        verify(module)
        check_stage(module, "functions")
        found = names(module)
    assert "math.exp" not in found
    assert found.count("math.fma") == 9  # one for the range, two for the remainder, six for the polynomial


def test_the_fast_mode_keeps_native_functions() -> None:
    with lowered(GROW, "functions", fast=True) as module:
        assert "math.exp" in names(module)
        assert "math.fma" not in names(module)


def test_codes_are_spelled_out_where_the_target_lacks_them() -> None:
    with lowered(LEVELS, "functions") as module:
        verify(module)
        assert "kiln.to_e4m3" not in names(module)
        assert "arith.bitcast" in names(module)


def test_codes_are_left_to_the_target_that_has_them() -> None:
    with lowered(LEVELS, "functions", features=E4M3) as module:
        assert "kiln.to_e4m3" in names(module)
        assert "arith.bitcast" not in names(module)


def test_a_function_of_groups_keeps_its_shape() -> None:
    with lowered(LEVELS, "functions") as module:
        assert "tensor<?x4xi8>" in str(module)


def _cosine() -> ir.Module:
    text = (
        "func.func @f(%x: f32, %m: memref<?xf32>, %r: index, %w: index) {\n"
        "  %y = math.cos %x : f32\n"
        '  "kiln.store"(%y, %m, %r) {layout = "rows"} : (f32, memref<?xf32>, index) -> ()\n'
        "  return\n}"
    )
    return ir.Module.parse(text)


def test_a_function_without_expansion_is_refused() -> None:
    with context(OPS.values()):
        module = Functions(frozenset()).run(_cosine())
        with pytest.raises(LegalityError, match=r"math\.cos is not legal after stage functions"):
            check_stage(module, "functions")
