"""An epilogue as a Triton function on a tile of a matrix product: the row program of what follows it,
element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kiln.backends.cuda import contract
from kiln.backends.cuda.hosted import Hosted
from kiln.backends.cuda.triton_emitter import Emitter, Parameter
from kiln.compiler.epilogue import TOTAL
from kiln.compiler.lower import Request, lower
from kiln.compiler.rowprogram import Instruction, RowProgram
from kiln.ir.spec import Op

FUNCTION = "epilogue"
HEADER = """import triton
import triton.language as tl
"""
LIBDEVICE = "from triton.language.extra import libdevice\n"


@dataclass(frozen=True)
class TritonEpilogue:
    """Generated source of `epilogue(total, rows, cols, M, N, *extra)`: see `kernels/gemm_finish.py`."""

    source: str
    extra: tuple[Parameter, ...]
    """Pointers, strides and numbers beyond those of the kernel."""


class _TileEmitter(Emitter):
    """Rows and columns are the tile's; the kernel has the result and stores it."""

    def __init__(self, program: RowProgram, op: Op, attrs: Mapping[str, Any]) -> None:
        super().__init__(program, op, dict(attrs), fast=False)
        self.columns[Fraction(1)] = "cols"

    def emit(self, i: Instruction) -> None:
        if i.name == "kiln.columns":
            self.set(i, "cols.to(tl.int32)")
        else:
            super().emit(i)

    def load(self, i: Instruction) -> None:
        if i.text == TOTAL:
            self.names[i.result] = TOTAL
        else:
            super().load(i)

    def store(self, i: Instruction) -> None:
        self.line(f"return {self.arg(i.args[0])}")

    def function(self) -> TritonEpilogue:
        written = f"{self.op.outputs[0].name}:out"
        extra = tuple(p for p in self.parameters() if p.operand not in ("", TOTAL, written))
        for i in self.program.instructions:
            self.emit(i)
        arguments = ", ".join((TOTAL, "rows", "cols", "M", "N", *(p.name for p in extra)))
        body = "\n".join(self.lines)
        imports = HEADER + (LIBDEVICE if self.libdevice else "")
        doc = f'    """{self.op.doc}"""'
        head = f"@triton.jit\ndef {FUNCTION}({arguments}):"
        return TritonEpilogue(f"{imports}\n\n{head}\n{doc}\n{body}\n", extra)


def epilogue_source(pair: Hosted, ops: Mapping[str, Op], features: frozenset[str]) -> TritonEpilogue:
    """The Triton source of a recipe's epilogue."""
    op, ship = pair.epilogue.op, pair.ship
    lowered = lower(Request(op, ship.dtypes, ship.attrs, ship.absent, features), ops)
    return _TileEmitter(lowered.program, op, ship.attrs).function()


def extra_params(pair: Hosted, made: TritonEpilogue) -> tuple[dict[str, Any], ...]:
    """What the epilogue reads, with the hints of its host: a kernel for aligned operands asks for more."""
    op, ship = pair.epilogue.op, pair.ship
    aligned = any(p.hinted for p in pair.row.params)
    return tuple(
        contract.parameter_json(op, p, ship.dtypes, aligned and contract.is_hinted(op, p, ship.attrs))
        for p in made.extra
    )
