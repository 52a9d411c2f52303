"""A row program as both emitters read it: the final IR of an op, one instruction after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from mlir import ir

from kiln.ir.dtypes import BF16, BOOL, F16, F32, I32, I64, U8, DType
from kiln.ir.language import SCALAR, Shape

BY_MLIR = {d.mlir: d for d in (BF16, BOOL, F16, F32, I32, I64, U8)}
CMP_NAMES = {
    "arith.cmpf": {2: ">", 3: ">=", 4: "<", 5: "<=", 14: "uno"},
    "arith.cmpi": {2: "<", 3: "<=", 4: ">", 5: ">="},
}
VIEWS = frozenset({"tensor.extract"})
"""Operations that only pass their operand on."""
SKIPPED = frozenset({"tensor.empty", "scf.forall.in_parallel", "kiln.absent"})


@dataclass(frozen=True)
class Instruction:
    """One operation: `result` and `args` are value numbers; `text` is a predicate, a combiner, a layout or
    a memory operand's name.
    """

    name: str
    result: int
    args: tuple[int, ...]
    shape: Shape
    dtype: DType
    text: str = ""
    constant: float | int = 0
    index: int = 0


@dataclass(frozen=True)
class RowProgram:
    """The instructions of one row, and the memory operands they touch."""

    name: str
    arguments: tuple[str, ...]
    """Operand names in order: inputs, `name:out` for written ones, scalars."""
    instructions: tuple[Instruction, ...]

    def by_result(self) -> dict[int, Instruction]:
        """Defining instruction of each value."""
        return {i.result: i for i in self.instructions if i.result >= 0}

    @property
    def reduces_rows(self) -> bool:
        """Whether a reduction needs the whole row at once."""
        return any(i.name == "linalg.reduce" and i.shape.is_scalar for i in self.instructions)


def _extent_fraction(value: ir.Value, width: ir.Value) -> Fraction:
    """The index value as a multiple of the width."""
    if value == width:
        return Fraction(1)
    owner = value.owner
    operation = owner.operation if hasattr(owner, "operation") else owner
    constant: int = ir.IntegerAttr(operation.operands[1].owner.attributes["value"]).value
    base = _extent_fraction(operation.operands[0], width)
    return base * constant if operation.name == "arith.muli" else base / constant


def shape_of(value: ir.Value, width: ir.Value) -> Shape:
    """The language's shape of a row-level value, recovered from how it was made."""
    if not isinstance(value.type, ir.RankedTensorType):
        return SCALAR
    kind = ir.RankedTensorType(value.type)
    if kind.rank == 0:
        return SCALAR
    inner = kind.shape[1] if kind.rank == 2 else 1
    operation = value.owner
    name = operation.name
    operands = list(operation.operands)
    match name:
        case "tensor.splat" | "tensor.empty":
            return Shape(_extent_fraction(operands[-1], width), inner)
        case "tensor.expand_shape":
            return Shape(_extent_fraction(operands[1], width), inner)
        case "tensor.collapse_shape":
            source = shape_of(operands[0], width)
            return Shape((source.fraction or Fraction(1)) * source.inner)
        case "tensor.extract_slice":
            return Shape(shape_of(operands[0], width).fraction)
        case "linalg.reduce" | "linalg.broadcast":
            return shape_of(operands[1], width)
        case "kiln.half" | "kiln.take_row" | "kiln.take_columns" | "kiln.permute" | "kiln.columns":
            return Shape(Fraction(1))
        case "kiln.pack_e2m1":
            return Shape((shape_of(operands[0], width).fraction or Fraction(1)) / 2)
        case "kiln.load":
            return Shape(_load_fraction(operation))
    for o in operands:
        if isinstance(o.type, ir.RankedTensorType):
            return shape_of(o, width)
    return Shape(Fraction(1))


def _load_fraction(operation: ir.Operation) -> Fraction:
    uses = [u.owner.name for u in operation.result.uses]
    return Fraction(2) if "kiln.half" in uses else Fraction(1)


def _dtype(kind: ir.Type) -> DType:
    if isinstance(kind, ir.RankedTensorType) or isinstance(kind, ir.MemRefType):
        kind = ir.ShapedType(kind).element_type
    return BY_MLIR[str(kind)]


class _Reader:
    def __init__(self, function: ir.Operation) -> None:
        block = function.regions[0].blocks[0]
        names = [ir.StringAttr(a).value for a in ir.ArrayAttr(function.attributes["kiln.args"])]
        self.width: ir.Value = list(block.arguments)[-1]
        self.numbers: dict[ir.Value, int] = {}
        self.memory = dict(zip(block.arguments, names, strict=True))
        self.arguments = tuple(n for n in names if not n.startswith("%"))
        self.block = block

    def number(self, value: ir.Value) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def scalars(self) -> Iterator[Instruction]:
        """Scalar arguments as instructions."""
        for value, name in self.memory.items():
            if not isinstance(value.type, ir.MemRefType) and not name.startswith("%"):
                yield Instruction(
                    "kiln.argument", self.number(value), (), SCALAR, _dtype(value.type), text=name
                )

    def walk(self, block: ir.Block) -> Iterator[Instruction]:
        for child in block.operations:
            operation = child.operation
            if operation.name == "scf.forall":
                yield from self.walk(operation.regions[0].blocks[0])
            elif operation.name not in SKIPPED and operation.name != "func.return":
                made = self.instruction(operation)
                if made is not None:
                    yield made

    def instruction(self, operation: ir.Operation) -> Instruction | None:
        name = operation.name
        operands = list(operation.operands)
        if name == "kiln.store":
            value, memory = operands[0], operands[1]
            layout = ir.StringAttr(operation.attributes["layout"]).value
            shape = shape_of(value, self.width)
            return Instruction(
                name,
                -1,
                (self.number(value),),
                shape,
                _dtype(value.type),
                text=self.memory[memory],
                index=layout == "nvfp4_128x4",
            )
        result = operation.results[0]
        if isinstance(result.type, ir.IndexType):
            return None
        if name in VIEWS:
            self.numbers[result] = self.number(operands[0])
            return None
        if name == "linalg.broadcast" or name == "linalg.reduce":
            operands = operands[:1]
        operands = [o for o in operands if not isinstance(o.type, ir.IndexType)]
        text, constant, index = self._details(operation)
        args = tuple(self.number(o) for o in operands if not isinstance(o.type, ir.MemRefType))
        shape = shape_of(result, self.width)
        if name == "linalg.reduce" and ir.RankedTensorType(result.type).rank == 0:
            shape = SCALAR
        return Instruction(name, self.number(result), args, shape, _dtype(result.type), text, constant, index)

    def _details(self, operation: ir.Operation) -> tuple[str, float | int, int]:
        name, attributes = operation.name, operation.attributes
        match name:
            case "arith.constant":
                attr = attributes["value"]
                number = (
                    ir.FloatAttr(attr).value if isinstance(attr, ir.FloatAttr) else ir.IntegerAttr(attr).value
                )
                return "", number, 0
            case "arith.cmpf" | "arith.cmpi":
                return CMP_NAMES[name][ir.IntegerAttr(attributes["predicate"]).value], 0, 0
            case "linalg.reduce":
                combiner = operation.regions[0].blocks[0].operations[0].operation.name
                return combiner, 0, 0
            case "kiln.load" | "kiln.take_row" | "kiln.take_element" | "kiln.take_columns":
                return self.memory[operation.operands[0]], 0, int(len(operation.operands) > 1)
            case "kiln.half":
                return "", 0, ir.IntegerAttr(attributes["index"]).value
            case "tensor.extract_slice":
                return "", 0, list(ir.DenseI64ArrayAttr(attributes["static_offsets"]))[1]
        return "", 0, 0


def read(module: ir.Module) -> RowProgram:
    """The row program of a lowered module."""
    function = module.body.operations[0].operation
    reader = _Reader(function)
    scalars = list(reader.scalars())
    instructions = [*scalars, *reader.walk(reader.block)]
    used = {a for i in instructions for a in i.args}
    kept = tuple(i for i in instructions if i.result < 0 or i.result in used)
    return RowProgram(ir.StringAttr(function.attributes["sym_name"]).value, reader.arguments, kept)
