"""expand: every declared op is replaced by its body."""

import re

import pytest
from mlir import ir

from kiln.compiler.legality import check_stage
from kiln.compiler.passes.expand import Expand, dtype_of
from kiln.ir.diagnostics import LegalityError, TypeCheckError
from kiln.ir.dialect import context, verify
from kiln.ir.dtypes import BF16, F32
from kiln.ir.spec import Op
from kiln.tests.compiler.lowering import BF, CHAIN, JOIN, LEVELS, OPS, OUT, X, body_file, lowered, names


def test_no_declared_op_is_left() -> None:
    with lowered(CHAIN, "expand") as module:
        verify(module)
        check_stage(module, "expand")
        found = names(module)
    assert not {"kiln.join", "kiln.grow", "kiln.share"} & set(found)
    assert found.count("math.exp") == 1
    assert found.count("linalg.reduce") == 1


def test_each_rounding_is_there() -> None:
    """The ops' outputs are bf16: three conversions down, one for each op."""
    with lowered(CHAIN, "expand") as module:
        assert names(module).count("arith.truncf") == 3


def test_an_absent_operand_takes_the_other_branch() -> None:
    with lowered(JOIN, "expand", absent=("y",)) as module:
        assert "arith.addf" not in names(module)
    with lowered(JOIN, "expand") as module:
        assert "arith.addf" in names(module)


def test_groups_have_a_static_inner_size() -> None:
    with lowered(LEVELS, "expand") as module:
        assert "tensor<?x4xf32>" in str(module)
        assert names(module).count("tensor.expand_shape") == 1
        assert names(module).count("tensor.collapse_shape") == 1


def test_operations_point_at_the_bodys_line() -> None:
    with lowered(JOIN, "expand") as module:
        text = module.operation.get_asm(enable_debug_info=True)
    assert f'loc("{body_file()}":' in text


def test_what_is_not_expanded_is_refused() -> None:
    with lowered(CHAIN, "rows") as module:
        without = {n: op for n, op in OPS.items() if n != "grow"}
        module = Expand(without).run(module)
        with pytest.raises(
            LegalityError, match=re.escape("kiln.grow is not legal after stage expand")
        ) as caught:
            check_stage(module, "expand")
    assert body_file() in caught.value.location


def test_a_body_that_does_not_type_check_is_refused_at_its_line() -> None:
    bad = Op("bad", "F", (X, OUT), body=lambda x: x + x)
    with context([bad]):
        from kiln.compiler.passes.rows import Rows
        from kiln.ir import trace

        module = Rows(bad, BF, {}, ()).run(trace.graph(bad, BF, {}))
        with pytest.raises((TypeCheckError, ir.MLIRError, RuntimeError), match="cannot add bf16 and bf16"):
            Expand({"bad": bad}).run(module)


def test_element_types_are_read_from_any_shape() -> None:
    with ir.Context(), ir.Location.unknown():
        for text, want in (
            ("f32", F32),
            ("tensor<?xbf16>", BF16),
            ("memref<?x?xf32>", F32),
            ("tensor<?x4xbf16>", BF16),
        ):
            assert dtype_of(ir.Type.parse(text)) is want
