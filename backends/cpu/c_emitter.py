"""A row program as readable C: one entry per variant in the CPU ABI, with no library and no intrinsics, the
same text for every ISA tier.

Rows may be of any width, unless they are permuted. What is beyond the first `BUFFERED` elements of a row is
computed again where nearer elements are buffered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kiln.backends.cpu.abi import Abi, Memory, abi_of
from kiln.backends.cpu.c_body import operand_text
from kiln.backends.cpu.c_expr import c_type, expression
from kiln.backends.cpu.c_loops import BUFFERED, Loops, indented
from kiln.backends.cpu.prelude import prelude
from kiln.backends.cpu.schedule import Schedule, Space
from kiln.compiler.rowprogram import Instruction, RowProgram
from kiln.ir.dtypes import DType
from kiln.ir.spec import Op

PARAMETERS = "void *const *ptrs, const int64_t *ints, const double *floats, int64_t begin, int64_t end"
COPIED = frozenset({"kiln.load", "kiln.half", "kiln.take_row"})


@dataclass(frozen=True)
class CEntry:
    """A generated entry: its symbol, text (functions, then the entry) and parameters."""

    symbol: str
    text: str
    abi: Abi
    widest: int = 0
    """The longest row that it takes; 0 where any does."""


def translation_unit(title: str, texts: Iterable[str]) -> str:
    """One C file that needs no other: what its texts use of the vector headers, then the texts."""
    body = "\n".join(texts)
    return "\n".join([f"/* {title} */", prelude(body), body])


def emit(
    op: Op, program: RowProgram, types: Mapping[str, DType], attrs: Mapping[str, Any], symbol: str
) -> CEntry:
    """The C of one variant of an op.

    Raises:
        LegalityError: the program has a form that this backend cannot write; the message says which.
    """
    abi = abi_of(op, program, types, attrs)
    return _Writer(Schedule(program), abi, symbol).entry()


class _Writer:
    def __init__(self, schedule: Schedule, abi: Abi, symbol: str) -> None:
        self.schedule, self.abi, self.symbol = schedule, abi, symbol
        self.functions: list[str] = []

    def entry(self) -> CEntry:
        body = self._copies() or self._stages()
        swizzled = [m.name for m in self.abi.memories if m.layout == "nvfp4_128x4"]
        pad = "".join(f"nvfp4_clear({name}, m, n / 16); " for name in swizzled)
        pad = f"if (m >= rows) {{ {pad}continue; }}\n" if pad else ""
        pointers = "".join(
            self._pointer(at, m)
            for at, m in enumerate(self.abi.memories)
            if not m.table and _uses(pad + body, m.name)
        )
        row = pointers + pad + body
        head = self._uniforms() + self._buffers()
        integers = [(name, at) for at, (name, _) in enumerate(self.abi.integers) if _uses(head + row, name)]
        head = "".join(f"const int64_t {name} = ints[{at}];\n" for name, at in integers) + head
        head += "".join(f"(void){name};\n" for name in ("ints", "floats") if not _uses(head, name))
        signature = f"int64_t {self.symbol}({PARAMETERS})"
        loop = f"for (int64_t m = begin; m < end; ++m) {{\n{indented(row, 1)}}}\nreturn 0;\n"
        text = f"{signature};\n{signature}\n{{\n{indented(head + loop, 1)}}}\n"
        widest = BUFFERED if self.schedule.permuted else 0
        return CEntry(self.symbol, "\n".join([*self.functions, text]), self.abi, widest)

    def _pointer(self, at: int, memory: Memory) -> str:
        kind = f"{'' if memory.written else 'const '}{memory.dtype.c} *"
        offset = f" + m * {memory.stride}" if memory.stride else ""
        return f"{kind}{memory.name} = ({kind})ptrs[{at}]{offset};\n"

    def _uniforms(self) -> str:
        """Scalars that are the same for all rows."""
        values = [
            v
            for v in self.schedule.defined
            if self.schedule.space(v) is Space.SCALAR and self.schedule.uniform(v)
        ]
        return "".join(self._scalar(v) for v in values)

    def _buffers(self) -> str:
        return "".join(f"float v{c.value}_kept[{BUFFERED}];\n" for c in self.schedule.row_buffers())

    def _stages(self) -> str:
        text = self._row_scalars(0)
        for stage in range(self.schedule.last + 1):
            loops = Loops(self.schedule, self.abi, self.symbol, stage)
            text += loops.text() + self._row_scalars(stage + 1)
            self.functions += loops.functions
        return text

    def _row_scalars(self, stage: int) -> str:
        """Scalars of the row that are known once `stage` reductions are done, and outputs that hold them."""
        text = ""
        for i in self.schedule.instructions:
            if i.name in ("kiln.take_row", "kiln.take_columns") and self.schedule.stage[i.args[0]] == stage:
                text += self._table_row(i)
            value = i.result if i.result >= 0 else i.args[0]
            if self.schedule.space(value) is not Space.SCALAR or self.schedule.stage[value] != stage:
                continue
            if i.result < 0 and self.abi.memory(i.text).space is Space.SCALAR:
                text += self._scalar_store(i.text, operand_text(self.schedule, i, Space.SCALAR, value))
            elif i.result >= 0 and i.name != "linalg.reduce" and not self.schedule.uniform(value):
                text += self._scalar(value)
        return text

    def _scalar(self, value: int) -> str:
        i = self.schedule.defined[value]
        kind = c_type(i.dtype, Space.SCALAR)
        if i.name == "arith.constant":
            return ""
        if i.name == "kiln.argument":
            number = (
                f"f_argument({self._argument(i.text)})"
                if i.dtype.is_float
                else f"({kind}){self._argument(i.text)}"
            )
            return f"const {kind} v{value} = {number}; /* {i.text} */\n"
        if i.name == "kiln.take_element":
            at = self._at_table(i.text)
            return (
                f"{self._inside(i)}const {kind} v{value} = ((const {i.dtype.c} *)ptrs[{at}])[v{i.args[0]}];\n"
            )
        if i.name == "kiln.load":
            return f"const {kind} v{value} = {self._scalar_load(i.text)};\n"
        text = expression(i, Space.SCALAR, lambda a: operand_text(self.schedule, i, Space.SCALAR, a))
        return f"const {kind} v{value} = {text};\n"

    def _argument(self, operand: str) -> str:
        integers, floats = len(self.abi.integers), 0
        for _, name, dtype in self.abi.numbers:
            if name == operand:
                return f"floats[{floats}]" if dtype == "f32" else f"ints[{integers}]"
            integers, floats = (integers, floats + 1) if dtype == "f32" else (integers + 1, floats)
        raise KeyError(operand)

    def _at(self, key: str) -> str:
        memory = self.abi.memory(key)
        return memory.name if memory.stride else f"{memory.name} + m"

    def _scalar_load(self, key: str) -> str:
        dtype = self.abi.memory(key).dtype
        at = self._at(key)
        return f"{dtype}_load({at}, 1)[0]" if dtype.bits < 32 else f"*({at})"

    def _scalar_store(self, key: str, value: str) -> str:
        dtype = self.abi.memory(key).dtype
        at = self._at(key)
        return (
            f"{dtype}_store({at}, vf_all({value}), 1);\n"
            if dtype.bits == 16
            else f"*({at}) = ({dtype.c}){value};\n"
        )

    def _copies(self) -> str:
        """Rows that are copied as they are; empty if anything is computed."""
        text = ""
        for store in self.schedule.stores:
            source = self.schedule.defined[store.args[0]]
            if (
                source.name not in COPIED
                or source.dtype is not store.dtype
                or self.schedule.space(source.result) is not Space.ROW
            ):
                return ""
            start = self.abi.memory(source.text).name + (
                " + n" if source.name == "kiln.half" and source.index else ""
            )
            start = f"v{source.result}_row" if source.name == "kiln.take_row" else start
            text += f"row_copy({self.abi.memory(store.text).name}, {start}, n * {store.dtype.bytes});\n"
        return self._row_scalars(0) + text

    def _table_row(self, take: Instruction) -> str:
        """The row of a table that an index names; an index outside the table ends the call."""
        table = self.abi.memory(take.text)
        kind = f"const {table.dtype.c} *"
        row = f"({kind})ptrs[{self._at_table(take.text)}] + v{take.args[0]} * {table.operand}_stride"
        return f"{self._inside(take)}{kind}v{take.result}_row = {row};\n"

    def _at_table(self, key: str) -> int:
        return self.abi.memories.index(self.abi.memory(key))

    def _inside(self, take: Instruction) -> str:
        """An index outside its table ends the call."""
        index = f"v{take.args[0]}"
        return f"if ({index} < 0 || {index} >= {self.abi.memory(take.text).operand}_rows) return m + 1;\n"


def _uses(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None
