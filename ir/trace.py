"""Bodies run into MLIR: recipes as a graph of `kiln` operations, bodies as arith/math/linalg on one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mlir import ir

from kiln.ir import signature
from kiln.ir.diagnostics import TypeCheckError
from kiln.ir.dialect import tensor_type, verify
from kiln.ir.dtypes import F32, I32, DType
from kiln.ir.language import SCALAR, Shape, Value, where
from kiln.ir.spec import Op, Scalar, Tensor

CMPF = {"gt": 2, "ge": 3, "lt": 4, "le": 5, "uno": 14}
CMPI = {"lt": 2, "le": 3, "gt": 4, "ge": 5}
DYNAMIC = ir.ShapedType.get_dynamic_size()


def location(text: str) -> ir.Location:
    """A file:line location."""
    file, _, line = text.rpartition(":")
    return ir.Location.file(file, int(line), 1)


def element_type(dtype: DType) -> ir.Type:
    """The MLIR element type."""
    return ir.Type.parse(dtype.mlir)


def value_type(shape: Shape, dtype: DType) -> ir.Type:
    """The MLIR type of a row value."""
    if shape.is_scalar:
        return element_type(dtype)
    inner = f"{shape.inner}x" if shape.inner > 1 else ""
    return ir.Type.parse(f"tensor<?x{inner}{dtype.mlir}>")


def attribute(value: bool | int | str) -> ir.Attribute:
    """An op attribute."""
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    return (
        ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        if isinstance(value, int)
        else ir.StringAttr.get(value)
    )


def number(value: float | int, dtype: DType) -> ir.Attribute:
    """A constant's attribute; integers wrap to 32 bits."""
    if dtype.is_float:
        return ir.FloatAttr.get(element_type(dtype), value)
    return ir.IntegerAttr.get(element_type(dtype), (int(value) + 2**31) % 2**32 - 2**31)


def plain(attr: ir.Attribute) -> bool | int | str:
    """The value of an op attribute."""
    for kind in (ir.BoolAttr, ir.IntegerAttr, ir.StringAttr):
        if isinstance(attr, kind):
            return kind(attr).value  # type: ignore[no-any-return]
    raise TypeError(f"attribute {attr} is neither bool, integer nor string")


class GraphMachine:
    """Runs a recipe: calls of ops become `kiln.<op>` operations over whole tensors. Anything else belongs
    into an op's body.
    """

    def __init__(self) -> None:
        self.absent: ir.Value | None = None

    def constant(self, value: float | int, dtype: DType) -> Value:
        """A scalar constant."""
        op = ir.Operation.create(
            "arith.constant", results=[element_type(dtype)], attributes={"value": number(value, dtype)}
        )
        return Value(self, op.result, SCALAR, dtype)

    def emit(self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, **attrs: Any) -> Value:
        """Refused: a recipe is made of ops."""
        raise TypeCheckError(f"a recipe calls ops; {name} belongs into an op's body", where(3))

    def none(self) -> ir.Value:
        """The absent operand."""
        if self.absent is None:
            self.absent = ir.Operation.create("kiln.absent", results=[ir.NoneType.get()]).result
        return self.absent

    def call(
        self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]
    ) -> list[Value | None]:
        """One `kiln.<op>` operation, verified at once so that the error points at the recipe's line."""
        at = where(3)
        try:
            types = signature.bind_types(op, args, dtypes)
            resolved = {t.name: signature.resolve(op, t, types) for t in op.outputs}
        except TypeCheckError as error:
            raise TypeCheckError(error.message, at) from None
        with location(at):
            operands = [self.none() if args.get(t.name) is None else args[t.name].data for t in op.inputs]
            operands += [self._scalar(s, args.get(s.name, s.default)) for s in op.scalars]
            present = [args.get(t.name) is not None or not t.optional or t.role == "out" for t in op.outputs]
            results = [
                ir.Type.parse(tensor_type(op, t, resolved[t.name])) if p else ir.NoneType.get()
                for t, p in zip(op.outputs, present, strict=True)
            ]
            made = ir.Operation.create(
                f"kiln.{op.name}",
                results=results,
                operands=operands,
                attributes={k: attribute(v) for k, v in attrs.items()},
            )
        outs: list[Value | None] = []
        for t, r, p in zip(op.outputs, made.results, present, strict=True):
            outs.append(
                Value(self, r, signature.row_kind(op, t, attrs).shape, resolved[t.name]) if p else None
            )
        return outs

    def _scalar(self, scalar: Scalar, value: Any) -> ir.Value:
        data: ir.Value = value.data if isinstance(value, Value) else self.constant(value, scalar.dtype).data
        return data


class RowMachine:
    """Runs a body inside a row program: arith, math and linalg on scalars and one-dimensional tensors."""

    def __init__(self, width: ir.Value) -> None:
        self.width = width
        self.extents: dict[Fraction, ir.Value] = {}

    def constant(self, value: float | int, dtype: DType) -> Value:
        """A scalar constant."""
        return Value(
            self,
            self._op("arith.constant", [], element_type(dtype), value=number(value, dtype)),
            SCALAR,
            dtype,
        )

    def _op(
        self, name: str, operands: Sequence[ir.Value], result: ir.Type, **attributes: ir.Attribute
    ) -> ir.Value:
        made = ir.Operation.create(name, results=[result], operands=list(operands), attributes=attributes)
        out: ir.Value = made.result
        return out

    def _index(self, value: int) -> ir.Value:
        index = ir.IndexType.get()
        return self._op("arith.constant", [], index, value=ir.IntegerAttr.get(index, value))

    def extent(self, fraction: Fraction) -> ir.Value:
        """Number of elements of a vector, as an index."""
        index = ir.IndexType.get()
        out = self.width
        if fraction.numerator != 1:
            out = self._op("arith.muli", [out, self._index(fraction.numerator)], index)
        if fraction.denominator != 1:
            out = self._op("arith.floordivsi", [out, self._index(fraction.denominator)], index)
        return out

    def _broadcast(self, a: Value, shape: Shape) -> ir.Value:
        data: ir.Value = a.data
        if a.shape == shape or shape.fraction is None:
            return data
        return self._op("tensor.splat", [data, self.extent(shape.fraction)], value_type(shape, a.dtype))

    def emit(self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, **attrs: Any) -> Value:
        """See Machine.emit."""
        with location(where(3)):
            return Value(self, self._emit(name, args, shape, dtype, attrs), shape, dtype)

    def _emit(
        self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, attrs: dict[str, Any]
    ) -> ir.Value:
        result = value_type(shape, dtype)
        match name:
            case "kiln.width":
                i = self._op("arith.index_cast", [self.width], element_type(I32))
                return self._op("arith.sitofp", [i], element_type(F32))
            case "linalg.reduce":
                return self._reduce(args[0], shape, str(attrs["combiner"]))
            case "linalg.broadcast":
                empty = self._op("tensor.empty", [self.extent(shape.fraction or Fraction(1))], result)
                return self._generic_broadcast(args[0].data, empty)
            case "tensor.expand_shape" | "tensor.collapse_shape":
                return self._reshape(name, args[0], shape, result)
            case "tensor.extract_slice":
                return self._pick(args[0], shape, result, int(attrs["offset"]))
            case (
                "kiln.half"
                | "kiln.take_row"
                | "kiln.take_element"
                | "kiln.take_columns"
                | "kiln.permute"
                | "kiln.columns"
                | "kiln.row"
                | "kiln.pack_e2m1"
            ):
                extra = {"index": attribute(attrs["index"])} if "index" in attrs else {}
                return self._op(name, [a.data for a in args], result, **extra)
        operands = [self._broadcast(a, shape) for a in args]
        if name in ("arith.cmpf", "arith.cmpi"):
            table = CMPF if name == "arith.cmpf" else CMPI
            i64 = ir.IntegerType.get_signless(64)
            return self._op(
                name, operands, result, predicate=ir.IntegerAttr.get(i64, table[attrs["predicate"]])
            )
        return self._op(name, operands, result)

    def _generic_broadcast(self, source: ir.Value, init: ir.Value) -> ir.Value:
        dims = ir.DenseI64ArrayAttr.get([1])
        made = ir.Operation.create(
            "linalg.broadcast",
            results=[init.type],
            operands=[source, init],
            attributes={"dimensions": dims},
            regions=1,
        )
        elements = [ir.RankedTensorType(v.type).element_type for v in (source, init)]
        block = made.regions[0].blocks.append(*elements)
        with ir.InsertionPoint(block):
            ir.Operation.create("linalg.yield", operands=[block.arguments[0]])
        out: ir.Value = made.result
        return out

    def _reduce(self, x: Value, shape: Shape, combiner: str) -> ir.Value:
        f32 = element_type(F32)
        identity = self.constant(0.0 if combiner == "arith.addf" else float("-inf"), F32).data
        result = ir.RankedTensorType.get([], f32) if shape.is_scalar else value_type(shape, F32)
        extents = [] if shape.fraction is None else [self.extent(shape.fraction)]
        init = self._op("tensor.splat", [identity, *extents], result)
        order = "pair_tree" if combiner == "arith.addf" else "any"
        attributes = {
            "dimensions": ir.DenseI64ArrayAttr.get([0 if shape.is_scalar else 1]),
            "kiln.order": ir.StringAttr.get(order),
        }
        made = ir.Operation.create(
            "linalg.reduce", results=[result], operands=[x.data, init], attributes=attributes, regions=1
        )
        block = made.regions[0].blocks.append(f32, f32)
        with ir.InsertionPoint(block):
            combined = self._op(combiner, [block.arguments[0], block.arguments[1]], f32)
            ir.Operation.create("linalg.yield", operands=[combined])
        out: ir.Value = made.result
        return self._op("tensor.extract", [out], f32) if shape.is_scalar else out

    def _reshape(self, name: str, x: Value, shape: Shape, result: ir.Type) -> ir.Value:
        i64 = ir.IntegerType.get_signless(64)
        pair = ir.ArrayAttr.get([ir.IntegerAttr.get(i64, 0), ir.IntegerAttr.get(i64, 1)])
        reassociation = ir.ArrayAttr.get([pair])
        if name == "tensor.collapse_shape":
            return self._op(name, [x.data], result, reassociation=reassociation)
        static = ir.DenseI64ArrayAttr.get([DYNAMIC, shape.inner])
        operands = [x.data, self.extent(shape.fraction or Fraction(1))]
        return self._op(name, operands, result, reassociation=reassociation, static_output_shape=static)

    def _pick(self, x: Value, shape: Shape, result: ir.Type, offset: int) -> ir.Value:
        arrays = {
            "static_offsets": [0, offset], "static_sizes": [DYNAMIC, 1], "static_strides": [1, 1],
            "operandSegmentSizes": [1, 0, 1, 0],
        }  # fmt: skip
        attributes: dict[str, ir.Attribute] = {k: ir.DenseI64ArrayAttr.get(v) for k, v in arrays.items()}
        attributes["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get(arrays["operandSegmentSizes"])
        return self._op(
            "tensor.extract_slice", [x.data, self.extent(shape.fraction or Fraction(1))], result, **attributes
        )

    def call(self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]) -> Any:
        """Inline another op's body."""
        return signature.apply_body(op, args, dtypes, attrs)


def graph(
    op: Op, types: Mapping[str, DType], attrs: Mapping[str, Any], absent: Sequence[str] = ()
) -> ir.Module:
    """The recipe graph of an op or recipe: `func.func @name` over whole tensors, verified. Needs a current
    context.
    """
    at = f"{op.body.__code__.co_filename}:{op.body.__code__.co_firstlineno}" if op.body else "declaration:1"
    with location(at):
        module = ir.Module.create()
        inputs = [t for t in op.inputs if t.name not in absent]
        arguments = [ir.Type.parse(tensor_type(op, t, signature.resolve(op, t, types))) for t in inputs]
        arguments += [element_type(s.dtype) for s in op.scalars]
        outputs = [t for t in op.outputs if t.name not in absent]
        results = [ir.Type.parse(tensor_type(op, t, signature.resolve(op, t, types))) for t in outputs]
        kind = ir.FunctionType.get(arguments, results)
        with ir.InsertionPoint(module.body):
            func = ir.Operation.create(
                "func.func",
                attributes={"sym_name": ir.StringAttr.get(op.name), "function_type": ir.TypeAttr.get(kind)},
                regions=1,
            )
        block = func.regions[0].blocks.append(*arguments)
        with ir.InsertionPoint(block):
            returned = _graph_body(op, inputs, block, types, attrs, absent)
            ir.Operation.create("func.return", operands=returned)
    verify(module)
    return module


def _graph_body(
    op: Op,
    inputs: list[Tensor],
    block: ir.Block,
    types: Mapping[str, DType],
    attrs: Mapping[str, Any],
    absent: Sequence[str],
) -> list[ir.Value]:
    machine = GraphMachine()
    values: dict[str, Any] = {
        t.name: Value(machine, a, signature.row_kind(op, t, attrs).shape, signature.resolve(op, t, types))
        for t, a in zip(inputs, block.arguments, strict=False)
    }
    for s, a in zip(op.scalars, list(block.arguments)[len(inputs) :], strict=True):
        values[s.name] = Value(machine, a, SCALAR, s.dtype)
    values |= {t.name: None for t in op.inputs if t.name in absent}
    chosen = {a.name: attrs.get(a.name, a.default) for a in op.attrs}
    results = (
        signature.apply_body(op, values, types, chosen)
        if op.is_recipe
        else machine.call(op, values, dict(types), chosen)
    )
    return [
        r.data for t, r in zip(op.outputs, results, strict=True) if t.name not in absent and r is not None
    ]
