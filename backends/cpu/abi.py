"""The parameters of a generated C entry: which pointers and numbers it takes, in which order, and what the
manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kiln.backends.cpu.schedule import Space, space_of
from kiln.compiler.rowprogram import RowProgram
from kiln.ir.dtypes import DType
from kiln.ir.signature import resolve, row_kind
from kiln.ir.spec import Op, Tensor

TAKEN = frozenset(
    "n m i j k g t rows begin end live near level rest ptrs ints floats auto break case char const "
    "continue default do double else enum extern float for goto if inline int long register restrict "
    "return short signed sizeof static struct switch typedef union unsigned void volatile while".split()
)
"""Names of a generated entry's own variables, and C's keywords."""


@dataclass(frozen=True)
class Memory:
    """A tensor operand as the entry sees it."""

    key: str
    """Its name in the row program: `residual`, or `residual:out` for the written side."""
    operand: str
    dtype: DType
    space: Space
    layout: str
    per_row: bool
    """Whether it moves with the row (weights don't)."""
    table: bool
    rank: int

    @property
    def name(self) -> str:
        """The C variable."""
        name = f"{self.operand}_out" if self.written and self.operand != "out" else self.operand
        return f"{name}_" if name in TAKEN else name

    @property
    def written(self) -> bool:
        """Whether the entry writes it."""
        return self.key.endswith(":out")

    @property
    def stride(self) -> str:
        """The C variable of its row stride; empty where rows are one element apart or the layout fixes
        them."""
        strided = self.rank == 2 and self.per_row and self.layout != "nvfp4_128x4"
        return f"{self.operand}_stride" if strided else ""

    @property
    def column_stride(self) -> str:
        """The C variable of its element stride; empty where elements are adjacent."""
        return f"{self.operand}_step" if self.layout == "strided" else ""


@dataclass(frozen=True)
class Abi:
    """Everything a call passes, in order."""

    memories: tuple[Memory, ...]
    integers: tuple[tuple[str, Any], ...]
    """(C variable, manifest expression); the row width comes first."""
    numbers: tuple[tuple[str, str, str], ...]
    """(C variable, scalar operand, dtype) of scalar operands."""
    rows: Any
    """grid[0]: how many rows a whole call has, padded ones included."""

    def memory(self, key: str) -> Memory:
        """The operand that the row program calls `key`."""
        return next(m for m in self.memories if m.key == key)

    def json_params(self) -> list[dict[str, Any]]:
        """The manifest's PARAM entries."""
        pointers = [
            {"name": m.name, "kind": "ptr", "dtype": m.dtype.name, "operand": m.operand,
            "access": "write" if m.written else "read",
             "align": m.dtype.bytes}
            for m in self.memories
        ]  # fmt: skip
        values = [(name, "i64", value) for name, value in self.integers]
        values += [
            (name, "f64" if dtype == "f32" else "i64", ["arg", operand])
            for name, operand, dtype in self.numbers
        ]
        scalars = [
            {"name": n, "kind": "scalar", "dtype": d, "value": v, "divisible_by": 1} for n, d, v in values
        ]
        return pointers + scalars


def _memory(op: Op, key: str, types: Mapping[str, DType], attrs: Mapping[str, Any]) -> Memory:
    name = key.removesuffix(":out")
    tensor = next(t for t in op.tensors if t.name == name)
    kind = row_kind(op, tensor, attrs)
    space = Space.ROW if kind.table else space_of(kind.shape)
    return Memory(
        key,
        name,
        resolve(op, tensor, types),
        space,
        tensor.layout,
        kind.per_row and not kind.table,
        kind.table,
        len(tensor.dims),
    )


def _integers(op: Op, memories: tuple[Memory, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"n": ["dim", op.width]}
    if any(m.layout == "nvfp4_128x4" for m in memories):
        found["rows"] = ["dim", op.rows]
    for m in memories:
        if m.table and m.rank == 2:
            found[f"{m.operand}_stride"] = ["stride", m.operand]
        if m.table:
            found[f"{m.operand}_rows"] = _tensor(op, m.operand).dims[0]
        if m.stride:
            found[m.stride] = ["stride", m.operand]
        if m.column_stride:
            found[m.column_stride] = ["colstride", m.operand]
    return found


def _tensor(op: Op, name: str) -> Tensor:
    return next(t for t in op.tensors if t.name == name)


def abi_of(op: Op, program: RowProgram, types: Mapping[str, DType], attrs: Mapping[str, Any]) -> Abi:
    """The parameters of the entry for one variant of `op`."""
    scalars = {s.name: s.dtype for s in op.scalars}
    memories = tuple(_memory(op, key, types, attrs) for key in program.arguments if key not in scalars)
    rows: Any = ["dim", op.rows]
    if any(m.layout == "nvfp4_128x4" for m in memories):
        rows = ["roundup", rows, 128]
    numbers = tuple((name, name, dtype.name) for name, dtype in scalars.items())
    return Abi(memories, tuple(_integers(op, memories).items()), numbers, rows)
