"""The `kiln` dialect: one MLIR operation per declared op, registered with IRDL from the declarations.

Every operation exists at two levels: over whole tensors (`tensor<?x?xbf16>`, the recipe graph) and over one
row (`tensor<?xbf16>`, scalars). An absent optional operand is a value of type `none`. MLIR's verifier then
refuses bad IR with the file and line of the body's statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlir import ir
from mlir.dialects import irdl

from kiln.ir.diagnostics import LegalityError
from kiln.ir.dtypes import DType
from kiln.ir.record import expressible
from kiln.ir.signature import row_kind
from kiln.ir.spec import DTypeVar, Op, Tensor
from kiln.ir.structural import STRUCTURAL


def tensor_type(op: Op, tensor: Tensor, dtype: DType) -> str:
    """The operand's type in the recipe graph."""
    return f"tensor<{'?x' * len(tensor.dims)}{dtype.mlir}>"


def row_type(op: Op, tensor: Tensor, dtype: DType) -> str:
    """The operand's type inside a row program."""
    kind = row_kind(op, tensor)
    if kind.table:
        return f"memref<{'?x' * len(tensor.dims)}{dtype.mlir}>"
    return dtype.mlir if kind.shape.is_scalar else f"tensor<?x{dtype.mlir}>"


class _OpText:
    """The IRDL text of one declared op."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.lines = ["%none = irdl.is none", "%f32 = irdl.is f32", "%i32 = irdl.is i32"]
        self.names: dict[tuple[str, ...], str] = {}

    def constraint(self, tensor: Tensor) -> str:
        """An SSA constraint: equal constraints are one value, so that operands sharing a type variable and
        a shape share the type.
        """
        choices = tensor.dtype.choices if isinstance(tensor.dtype, DTypeVar) else (tensor.dtype,)
        types = sorted({f(self.op, tensor, d) for d in choices for f in (tensor_type, row_type)})
        key = (tensor.dtype.name, *types)
        if key not in self.names:
            parts = [self._is(t) for t in types]
            self.names[key] = f"%v{len(self.names)}"
            self.lines.append(f"{self.names[key]} = irdl.any_of({', '.join(parts)})")
        return self.names[key]

    def _is(self, text: str) -> str:
        key = ("is", text)
        if key not in self.names:
            self.names[key] = f"%t{len(self.names)}"
            self.lines.append(f"{self.names[key]} = irdl.is {text}")
        return self.names[key]

    def _optional(self, constraint: str) -> str:
        name = f"{constraint}_or_none"
        line = f"{name} = irdl.any_of({constraint}, %none)"
        if line not in self.lines:
            self.lines.append(line)
        return name

    def text(self) -> str:
        """The whole operation."""
        operands = []
        for t in self.op.inputs:
            constraint = self.constraint(t)
            operands.append(f"{t.name}_: {self._optional(constraint) if t.optional else constraint}")
        operands += [f"{s.name}_: %{s.dtype.mlir}" for s in self.op.scalars]
        results = []
        for t in self.op.outputs:
            constraint = self.constraint(t)
            results.append(f"{t.name}_out: {self._optional(constraint) if t.optional else constraint}")
        attributes = ", ".join(f'"{a.name}" = %any_{a.name}' for a in self.op.attrs)
        self.lines += [f"%any_{a.name} = irdl.any" for a in self.op.attrs]
        body = [*self.lines, f"irdl.operands({', '.join(operands)})", f"irdl.results({', '.join(results)})"]
        if attributes:
            body.append(f"irdl.attributes {{{attributes}}}")
        return f"irdl.operation @{self.op.name} {{\n  " + "\n  ".join(body) + "\n}"


def _structural_text(name: str, operands: tuple[tuple[str, str], ...]) -> str:
    # One `irdl.any` each: values of one constraint would have to have one type.
    lines = [f"%{n} = irdl.any" for n, _ in operands] + ["%result = irdl.any"]
    listed = ", ".join(f"{n}_: {'variadic ' if kind == 'variadic' else ''}%{n}" for n, kind in operands)
    if listed:
        lines.append(f"irdl.operands({listed})")
    if name != "store":
        lines.append("irdl.results(out: %result)")
    return f"irdl.operation @{name} {{\n  " + "\n  ".join(lines) + "\n}"


def dialect_text(ops: Iterable[Op]) -> str:
    """The dialect as IRDL source: what is registered, and what `kiln show --ir` can print."""
    texts = [_structural_text(n, o) for n, o in STRUCTURAL.items()]
    texts += [_OpText(op).text() for op in ops if expressible(op)]
    return "irdl.dialect @kiln {\n" + "\n".join(texts) + "\n}\n"


def context(ops: Iterable[Op]) -> ir.Context:
    """A fresh MLIR context that knows the dialect and refuses any unregistered operation."""
    return context_of(dialect_text(ops))


def context_of(text: str) -> ir.Context:
    """The context of a dialect's IRDL source."""
    ctx = ir.Context()
    ctx.allow_unregistered_dialects = False
    with ctx, ir.Location.unknown():
        irdl.load_dialects(ir.Module.parse(text))
    return ctx


def verify(module: ir.Module) -> None:
    """MLIR's verifier, with its first complaint as a LegalityError at file:line."""
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        text = str(error)
        found = re.search(r'"([^"]+)":(\d+):(\d+): (.*)', text)
        where = ":".join(found.group(1, 2, 3)) if found else ""
        raise LegalityError(found.group(4) if found else text, where) from error
