"""rows: the recipe graph over whole tensors becomes one row program inside `scf.forall` over rows, with
explicit loads and stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlir import ir

from kiln.ir import signature
from kiln.ir.dtypes import DType
from kiln.ir.spec import Op, Tensor
from kiln.ir.trace import attribute, element_type, value_type


@dataclass(frozen=True)
class Rows:
    """Options of the pass: the declaration that the graph was traced from."""

    op: Op
    types: Mapping[str, DType]
    attrs: Mapping[str, bool | int | str]
    absent: tuple[str, ...]

    name = "rows"

    def run(self, module: ir.Module) -> ir.Module:
        """A new module; the graph stays as it was."""
        graph = module.body.operations[0]
        with graph.location:
            made = ir.Module.create()
            with ir.InsertionPoint(made.body):
                func = self._function()
            block = func.regions[0].blocks[0]
            with ir.InsertionPoint(block):
                self._forall(graph.regions[0].blocks[0], block)
                ir.Operation.create("func.return")
        return made

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Memory arguments: inputs, then written operands; an in/out operand has both sides."""
        read = [(t.name, t) for t in self.op.inputs if t.name not in self.absent]
        written = [(f"{t.name}:out", t) for t in self.op.outputs if t.name not in self.absent]
        return read + written

    def _function(self) -> ir.Operation:
        arguments, names = [], []
        for name, t in self._tensors():
            kind = signature.row_kind(self.op, t, self.attrs)
            dims = "?x?x" if len(t.dims) == 2 and (kind.table or not kind.shape.is_scalar) else "?x"
            arguments.append(ir.Type.parse(f"memref<{dims}{signature.resolve(self.op, t, self.types).mlir}>"))
            names.append(name)
        for s in self.op.scalars:
            arguments.append(element_type(s.dtype))
            names.append(s.name)
        arguments += [ir.IndexType.get(), ir.IndexType.get()]
        names += ["%rows", "%width"]
        func = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get(self.op.name),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(arguments, [])),
                "kiln.args": ir.ArrayAttr.get([ir.StringAttr.get(n) for n in names]),
            },
            regions=1,
        )
        func.regions[0].blocks.append(*arguments)
        return func

    def _forall(self, graph: ir.Block, block: ir.Block) -> None:
        rows = list(block.arguments)[-2]
        forall = ir.Operation.create(
            "scf.forall",
            operands=[rows],
            attributes={
                "staticLowerBound": ir.DenseI64ArrayAttr.get([0]),
                "staticUpperBound": ir.DenseI64ArrayAttr.get([ir.ShapedType.get_dynamic_size()]),
                "staticStep": ir.DenseI64ArrayAttr.get([1]),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, 1, 0, 0]),
            },
            regions=1,
        )
        body = forall.regions[0].blocks.append(ir.IndexType.get())
        with ir.InsertionPoint(body):
            self._body(graph, list(block.arguments), body.arguments[0])
            end = ir.Operation.create("scf.forall.in_parallel", regions=1)
            end.regions[0].blocks.append()

    def _body(self, graph: ir.Block, arguments: list[ir.Value], row: ir.Value) -> None:
        tensors = self._tensors()
        inputs = sum(1 for n, _ in tensors if not n.endswith(":out"))
        mapping: dict[ir.Value, ir.Value] = {}
        for (_, t), old, memory in zip(tensors[:inputs], graph.arguments, arguments, strict=False):
            mapping[old] = self._load(t, memory, row)
        scalars = zip(list(graph.arguments)[inputs:], arguments[len(tensors) : -2], strict=True)
        mapping |= dict(scalars)
        for operation in graph.operations:
            if operation.operation.name == "func.return":
                for (_, t), memory, value in zip(
                    tensors[inputs:], arguments[inputs:], operation.operation.operands, strict=False
                ):
                    self._store(t, mapping[value], memory, row)
            else:
                self._clone(operation.operation, mapping)

    def _load(self, t: Tensor, memory: ir.Value, row: ir.Value) -> ir.Value:
        kind = signature.row_kind(self.op, t, self.attrs)
        if kind.table:
            return memory
        result = value_type(kind.shape, signature.resolve(self.op, t, self.types))
        operands = [memory, row] if kind.per_row else [memory]
        loaded: ir.Value = ir.Operation.create("kiln.load", results=[result], operands=operands).result
        return loaded

    def _store(self, t: Tensor, value: ir.Value, memory: ir.Value, row: ir.Value) -> None:
        ir.Operation.create(
            "kiln.store", operands=[value, memory, row], attributes={"layout": attribute(t.layout)}
        )

    def _clone(self, operation: ir.Operation, mapping: dict[ir.Value, ir.Value]) -> None:
        """The same operation one level down: whole-tensor types become row types."""
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        with operation.location:
            made = ir.Operation.create(
                operation.name,
                results=[_row_level(r.type) for r in operation.results],
                operands=[mapping[o] for o in operation.operands],
                attributes=attributes,
            )
        mapping |= dict(zip(operation.results, made.results, strict=True))


def _row_level(kind: ir.Type) -> ir.Type:
    if not isinstance(kind, ir.RankedTensorType):
        return kind
    ranked = ir.RankedTensorType(kind)
    if ranked.rank == 1:
        return ranked.element_type
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ranked.element_type)
