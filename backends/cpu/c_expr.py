"""One instruction as a C expression: tables from operation to text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kiln.backends.cpu.schedule import Space
from kiln.compiler.rowprogram import Instruction
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dtypes import BF16, F32, I64, DType

Render = Callable[[int], str]

OPERATORS = {
    "arith.addf": "{0} + {1}", "arith.subf": "{0} - {1}", "arith.mulf": "{0} * {1}",
    "arith.divf": "{0} / {1}", "arith.negf": "-{0}",
    "arith.andi": "{0} & {1}", "arith.ori": "{0} | {1}", "arith.shrsi": "{0} >> {1}",
}  # fmt: skip
"""The same text for vectors and for numbers; C takes a number for a vector operand."""
VECTOR = {
    "arith.addi": "{i}_add({0}, {1})", "arith.subi": "{i}_sub({0}, {1})", "arith.muli": "{i}_mul({0}, {1})",
    "arith.shli": "{i}_shl({0}, {1})", "arith.maxsi": "{i}_max({0}, {1})", "arith.divsi": "{0} / {1}",
    "arith.maximumf": "{f}_maximum({0}, {1})", "arith.minimumf": "{f}_minimum({0}, {1})",
    "arith.maxnumf": "{f}_maxnum({0}, {1})", "arith.minnumf": "{f}_minnum({0}, {1})",
    "math.absf": "{f}_abs({0})", "math.sqrt": "__builtin_elementwise_sqrt({0})",
    "math.fma": "{f}_fma({0}, {1}, {2})",
    "arith.sitofp": "__builtin_convertvector({0}, {f})", "arith.trunci": "{0} & 255", "arith.extui": "{0}",
    "kiln.columns": "{i}_columns(i)",
}  # fmt: skip
"""`{f}` and `{i}` are the vector types."""
NUMBER = {
    "arith.addi": "(int32_t)((uint32_t){0} + (uint32_t){1})",
    "arith.subi": "(int32_t)((uint32_t){0} - (uint32_t){1})",
    "arith.muli": "(int32_t)((uint32_t){0} * (uint32_t){1})", "arith.shli": "(int32_t)((uint32_t){0} << {1})",
    "arith.maxsi": "{0} > {1} ? {0} : {1}", "arith.divsi": "{0} / {1}", "kiln.row": "(int32_t)m",
    "arith.maximumf": "f_maximum({0}, {1})", "arith.minimumf": "f_minimum({0}, {1})",
    "arith.maxnumf": "f_maxnum({0}, {1})", "arith.minnumf": "f_minnum({0}, {1})", "math.absf": "f_abs({0})",
    "math.sqrt": "__builtin_elementwise_sqrt({0})", "math.fma": "f_fma({0}, {1}, {2})",
    "arith.sitofp": "(float){0}", "arith.extui": "{0}", "arith.select": "{0} ? {1} : {2}",
    "arith.index_cast": "(int32_t)n",
}  # fmt: skip
COMPARE = {">": "{0} > {1}", ">=": "{0} >= {1}", "<": "{0} < {1}", "<=": "{0} <= {1}"}
BARE = frozenset({*OPERATORS, "arith.cmpf", "arith.cmpi"})
"""Operations whose text takes a number where the other operand is a vector."""


def literal(value: float | int) -> str:
    """A C literal of exactly this f32 or i32."""
    if isinstance(value, int):
        return "(-2147483647 - 1)" if value == -(2**31) else str(value)
    if value in (float("inf"), float("-inf")):
        return f"{'-' if value < 0 else ''}__builtin_inff()"
    return f"{np.float32(value)!s}f"


@dataclass(frozen=True)
class Lanes:
    """How many elements of a row a vector holds, and what its types and functions are called."""

    count: int
    f: str
    i: str
    pair: str
    """The type of packed pairs."""
    suffix: str
    """Ending of loads and stores."""


NARROW = Lanes(16, "vf", "vi", "vi8", "")
WIDE = Lanes(32, "wf", "wi", "vi", "2")
"""Even elements, then odd ones: see kiln_vec.h."""


def c_type(dtype: DType, space: Space, lanes: Lanes = NARROW) -> str:
    """The C type that a value is held in: floats as f32, bytes and truth values in 32-bit lanes."""
    if space is Space.SCALAR:
        return "float" if dtype.is_float else "int64_t" if dtype is I64 else "int32_t"
    if space is Space.PAIR:
        if dtype.is_float:
            raise LegalityError(
                f"{dtype} values of pairs have no CPU form; convert to i32 codes first", "row program"
            )
        return lanes.pair
    return lanes.f if dtype.is_float else lanes.i


def expression(
    i: Instruction, space: Space, render: Render, lanes: Lanes = NARROW, *, clean: bool = False
) -> str:
    """The right-hand side of an instruction that touches no memory. `render` gives the text of an operand;
    `clean` says that NaN among the operands has no low bits, so that rounding may carry into it."""
    args = [render(a) for a in i.args]
    kind = c_type(i.dtype, space, lanes)
    if space is Space.SCALAR:
        return _number(i, args)
    match i.name:
        case "arith.cmpf" | "arith.cmpi":
            unordered = "{0} != {0}" if args[0] == args[1] else "({0} != {0}) | ({1} != {1})"
            return COMPARE.get(i.text, unordered).format(*args)
        case "arith.select":
            return f"{kind}_select({', '.join(args)})"
        case "arith.bitcast":
            return f"({kind}){args[0]}"
        case "arith.truncf":
            return f"{kind}_round_{i.dtype}{'_clean' if clean and i.dtype is BF16 else ''}({args[0]})"
        case "tensor.extract_slice":
            return f"{lanes.i}_pick{i.index}({args[0]})"
        case "arith.shli" if space is Space.PAIR:
            return f"{args[0]} << {args[1]}"
    text = OPERATORS.get(i.name) or VECTOR.get(i.name, "")
    return _known(i, text).format(*args, f=lanes.f, i=lanes.i)


def _number(i: Instruction, args: list[str]) -> str:
    match i.name:
        case "arith.cmpf" | "arith.cmpi":
            return COMPARE.get(i.text, "{0} != {0} || {1} != {1}").format(*args)
        case "arith.bitcast":
            return f"{'i_float' if i.dtype is F32 else 'f_bits'}({args[0]})"
        case "arith.truncf":
            return f"vf_round_{i.dtype}(vf_all({args[0]}))[0]"
        case "arith.trunci":
            return f"(int32_t){args[0]}" + ("" if i.dtype.bits == 32 else " & 255")
    return _known(i, OPERATORS.get(i.name) or NUMBER.get(i.name, "")).format(*args)


def _known(i: Instruction, text: str) -> str:
    if not text:
        raise LegalityError(f"{i.name} has no CPU form", "row program")
    return text


def splat(i: Instruction, space: Space, text: str, lanes: Lanes = NARROW) -> str:
    """A number as a vector."""
    return f"{c_type(i.dtype, Space.ROW if space is Space.GROUP else space, lanes)}_all({text})"
