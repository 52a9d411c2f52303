"""The kiln dialect: every declared op is registered, and MLIR's verifier refuses what its declaration does
not allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mlir import ir

from kiln.compiler.catalog import load_catalogs
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dialect import context, dialect_text, row_type, tensor_type, verify
from kiln.ir.dtypes import BF16, F32, I64, U8
from kiln.ir.record import expressible
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Tensor
from kiln.ir.structural import STRUCTURAL

OPS = load_catalogs(("kiln.recipes",))
T = DTypeVar("T", (BF16, F32))
SAMPLE = Op(
    "sample",
    "F",
    (
        Tensor("x", T, ("M", "N")), Tensor("w", T, ("N",), optional=True), Scalar("eps", F32),
        Tensor("ids", I64, ("M",)),
        Tensor("out", T, ("M", "N"), "out"), Tensor("codes", U8, ("M", ["floordiv", ["dim", "N"], 2]), "out"),
    ),
    attrs=(Attr("gemma", (False, True), False),),
    body=lambda **_: None,
)  # fmt: skip
TYPES = {
    "x": "tensor<?x?xbf16>", "y": "tensor<?x?xf32>", "w": "tensor<?xbf16>", "v": "tensor<?xf32>",
    "eps": "f32", "ids": "tensor<?xi64>",
}  # fmt: skip


@pytest.fixture(scope="module")
def registered() -> Iterator[ir.Context]:
    """A context with the sample op."""
    with context([SAMPLE]) as made:
        yield made


def _module(
    operands: str, results: str = "tensor<?x?xbf16>, tensor<?x?xi8>", absent: bool = False
) -> ir.Module:
    """`kiln.sample` on named arguments, built without verification, as if written in line 7 of body.py."""
    with ir.Location.file("body.py", 7, 3):
        types = [ir.Type.parse(t) for t in TYPES.values()]
        module = ir.Module.create()
        function = ir.FunctionType.get(types, [])
        with ir.InsertionPoint(module.body):
            attributes = {"sym_name": ir.StringAttr.get("f"), "function_type": ir.TypeAttr.get(function)}
            func = ir.Operation.create("func.func", attributes=attributes, regions=1)
        block = func.regions[0].blocks.append(*types)
        named = dict(zip(TYPES, block.arguments, strict=True))
        with ir.InsertionPoint(block):
            none = ir.Operation.create("kiln.absent", results=[ir.NoneType.get()]).result
            given = [none if n == "none" else named[n] for n in operands.split()]
            made = [ir.Type.parse(t.strip()) for t in results.split(", ")]
            gemma = {} if absent else {"gemma": ir.BoolAttr.get(True)}
            ir.Operation.create("kiln.sample", results=made, operands=given, attributes=gemma)
            ir.Operation.create("func.return")
    return module


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("operands", "results"),
    [
        ("x w ids eps", "tensor<?x?xbf16>, tensor<?x?xi8>"),
        ("x none ids eps", "tensor<?x?xbf16>, tensor<?x?xi8>"),
        ("y v ids eps", "tensor<?x?xf32>, tensor<?x?xi8>"),
    ],
)
def test_what_the_declaration_allows(operands: str, results: str) -> None:
    verify(_module(operands, results))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("operands", "results", "message"),
    [
        ("x w ids", "tensor<?x?xbf16>, tensor<?x?xi8>", "op expects exactly 4 operands, but got 3"),
        ("x w ids eps eps", "tensor<?x?xbf16>, tensor<?x?xi8>", "op expects exactly 4 operands, but got 5"),
        ("none w ids eps", "tensor<?x?xbf16>, tensor<?x?xi8>", "'none' does not satisfy the constraint"),
        ("ids w ids eps", "tensor<?x?xbf16>, tensor<?x?xi8>", "does not satisfy the constraint"),
        ("x w ids w", "tensor<?x?xbf16>, tensor<?x?xi8>", "expected 'f32' but got 'tensor<?xbf16>'"),
        ("x w x eps", "tensor<?x?xbf16>, tensor<?x?xi8>", "does not satisfy the constraint"),
        (
            "x w ids eps",
            "tensor<?x?xf32>, tensor<?x?xi8>",
            "expected 'tensor<?x?xbf16>' but got 'tensor<?x?xf32>'",
        ),
        ("x w ids eps", "tensor<?x?xbf16>", "op expects exactly 2 results, but got 1"),
    ],
)
def test_what_it_does_not_allow(operands: str, results: str, message: str) -> None:
    with pytest.raises(LegalityError, match=re.escape(message)) as caught:
        verify(_module(operands, results))
    assert caught.value.location == "body.py:7:3"


@pytest.mark.usefixtures("registered")
def test_an_attribute_is_needed() -> None:
    with pytest.raises(LegalityError, match='attribute "gemma" is expected'):
        verify(_module("x w ids eps", absent=True))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["kiln.other", "mine.op"])
def test_an_unknown_operation_is_refused(name: str) -> None:
    text = f'func.func @f(%x: f32) {{\n  "{name}"(%x) : (f32) -> ()\n  return\n}}'
    with pytest.raises(ir.MLIRError, match=r"unregistered|not registered|unknown"):
        ir.Module.parse(text)


def test_every_declared_op_registers() -> None:
    in_rows = [op for op in OPS.values() if expressible(op)]
    text = dialect_text(OPS.values())
    names = re.findall(r"irdl\.operation @(\w+)", text)
    assert names == [*STRUCTURAL, *(op.name for op in in_rows)]
    assert len(set(names)) == len(names)
    with context(OPS.values()) as made:
        assert all(made.is_registered_operation(f"kiln.{op.name}") for op in in_rows)
        assert not made.is_registered_operation("kiln.matmul_bt")
        assert not made.is_registered_operation("kiln.linear")


@pytest.mark.parametrize(
    ("tensor", "dtype", "graph", "row"),
    [
        (Tensor("x", T, ("M", "N")), BF16, "tensor<?x?xbf16>", "tensor<?xbf16>"),
        (Tensor("w", T, ("N",)), F32, "tensor<?xf32>", "tensor<?xf32>"),
        (Tensor("s", F32, ("M",)), F32, "tensor<?xf32>", "f32"),
        (Tensor("t", T, ("V", "N")), F32, "tensor<?x?xf32>", "memref<?x?xf32>"),
        (Tensor("c", U8, ("M", "N")), U8, "tensor<?x?xi8>", "tensor<?xi8>"),
    ],
)
def test_types_at_both_levels(tensor: Tensor, dtype: object, graph: str, row: str) -> None:
    assert isinstance(dtype, type(F32))
    assert (tensor_type(SAMPLE, tensor, dtype), row_type(SAMPLE, tensor, dtype)) == (graph, row)
