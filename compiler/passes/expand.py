"""expand: every `kiln.<op>` of a row program is replaced by its body (a rewrite pattern per op)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.rewrite import PatternRewriter, RewritePatternSet, walk_and_apply_patterns

from kiln.ir import signature
from kiln.ir.dtypes import BF16, BOOL, F16, F32, I32, I64, U8, DType
from kiln.ir.language import SCALAR, Value
from kiln.ir.spec import Op
from kiln.ir.trace import RowMachine, plain

BY_MLIR = {d.mlir: d for d in (BF16, BOOL, F16, F32, I32, I64, U8)}


def dtype_of(kind: ir.Type) -> DType:
    """The Kiln type of a value's elements."""
    if isinstance(kind, ir.RankedTensorType) or isinstance(kind, ir.MemRefType):
        kind = ir.ShapedType(kind).element_type
    return BY_MLIR[str(kind)]


def width_argument(operation: ir.Operation) -> ir.Value:
    """The function's last argument: the row width."""
    parent = operation
    while parent.name != "func.func":
        parent = parent.parent.operation
    argument: ir.Value = list(parent.regions[0].blocks[0].arguments)[-1]
    return argument


@dataclass(frozen=True)
class Expand:
    """Options of the pass: the catalog's ops by name."""

    ops: Mapping[str, Op]

    name = "expand"

    def run(self, module: ir.Module) -> ir.Module:
        """Rewrites in place; a recipe's ops are all expanded in one walk, since bodies hold no further
        ops.
        """
        patterns = RewritePatternSet()
        for op in self.ops.values():
            if op.body is not None and not op.is_recipe:
                patterns.add(f"kiln.{op.name}", self._pattern(op))
        walk_and_apply_patterns(module.operation, patterns.freeze())
        return module

    def _pattern(self, op: Op) -> Any:
        def rewrite(operation: Any, rewriter: PatternRewriter) -> None:
            target = operation.operation
            with rewriter.ip, target.location:
                results = _inline(op, target)
            rewriter.replace_op(target, results)

        return rewrite


def _inline(op: Op, operation: ir.Operation) -> list[ir.Value]:
    machine = RowMachine(width_argument(operation))
    attrs = {name: plain(operation.attributes[name]) for name in operation.attributes}
    values: dict[str, Any] = {}
    operands = list(operation.operands)
    for t, operand in zip(op.inputs, operands, strict=False):
        absent = isinstance(operand.type, ir.NoneType)
        values[t.name] = (
            None
            if absent
            else Value(machine, operand, signature.row_kind(op, t, attrs).shape, dtype_of(operand.type))
        )
    for s, operand in zip(op.scalars, operands[len(op.inputs) :], strict=True):
        values[s.name] = Value(machine, operand, SCALAR, s.dtype)
    types = {
        t.dtype.name: dtype_of(r.type)
        for t, r in zip(op.outputs, operation.results, strict=True)
        if not isinstance(t.dtype, DType) and not isinstance(r.type, ir.NoneType)
    }
    results = signature.apply_body(op, values, types, attrs)
    none = next((o for o in operands if isinstance(o.type, ir.NoneType)), None)
    return [none if r is None else r.data for r in results]
