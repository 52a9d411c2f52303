"""One instruction as a C expression: tables from operation to text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kiln.backends.cpu.schedule import Space
from kiln.compiler.rowprogram import Instruction
from kiln.ir.diagnostics import LegalityError
from kiln.ir.dtypes import F32, I64, DType

Render = Callable[[int], str]

OPERATORS = {
    "arith.addf": "{0} + {1}", "arith.subf": "{0} - {1}", "arith.mulf": "{0} * {1}", "arith.divf": "{0} / {1}", "arith.negf": "-{0}",
    "arith.andi": "{0} & {1}", "arith.ori": "{0} | {1}", "arith.shrsi": "{0} >> {1}",
}  # fmt: skip
"""The same text for vectors and for numbers; C takes a number for a vector operand."""
VECTOR = {
    "arith.addi": "vi_add({0}, {1})", "arith.subi": "vi_sub({0}, {1})", "arith.muli": "vi_mul({0}, {1})", "arith.shli": "vi_shl({0}, {1})",
    "arith.maxsi": "vi_max({0}, {1})",
    "arith.maximumf": "vf_maximum({0}, {1})", "arith.minimumf": "vf_minimum({0}, {1})",
    "arith.maxnumf": "vf_maxnum({0}, {1})", "arith.minnumf": "vf_minnum({0}, {1})", "math.absf": "vf_abs({0})",
    "math.sqrt": "__builtin_elementwise_sqrt({0})", "math.fma": "vf_fma({0}, {1}, {2})",
    "arith.sitofp": "__builtin_convertvector({0}, vf)", "arith.trunci": "{0} & 255", "arith.extui": "{0}",
}  # fmt: skip
NUMBER = {
    "arith.addi": "(int32_t)((uint32_t){0} + (uint32_t){1})", "arith.subi": "(int32_t)((uint32_t){0} - (uint32_t){1})",
    "arith.muli": "(int32_t)((uint32_t){0} * (uint32_t){1})", "arith.shli": "(int32_t)((uint32_t){0} << {1})",
    "arith.maxsi": "{0} > {1} ? {0} : {1}",
    "arith.maximumf": "f_maximum({0}, {1})", "arith.minimumf": "f_minimum({0}, {1})",
    "arith.maxnumf": "f_maxnum({0}, {1})", "arith.minnumf": "f_minnum({0}, {1})", "math.absf": "f_abs({0})",
    "math.sqrt": "__builtin_elementwise_sqrt({0})", "math.fma": "f_fma({0}, {1}, {2})",
    "arith.sitofp": "(float){0}", "arith.extui": "{0}", "arith.select": "{0} ? {1} : {2}", "arith.index_cast": "(int32_t)n",
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


def c_type(dtype: DType, space: Space) -> str:
    """The C type that a value is held in: floats as f32, bytes and truth values in 32-bit lanes."""
    if space is Space.SCALAR:
        return "float" if dtype.is_float else "int64_t" if dtype is I64 else "int32_t"
    if space is Space.PAIR:
        if dtype.is_float:
            raise LegalityError(f"{dtype} values of pairs have no CPU form; convert to i32 codes first", "row program")
        return "vi8"
    return "vf" if dtype.is_float else "vi"


def expression(i: Instruction, space: Space, render: Render) -> str:
    """The right-hand side of an instruction that touches no memory. `render` gives the text of an operand."""
    args = [render(a) for a in i.args]
    if i.name in ("arith.cmpf", "arith.cmpi"):
        text = "{0} != {0} || {1} != {1}" if space is Space.SCALAR else "({0} != {0}) | ({1} != {1})"
        if i.text == "uno" and args[0] == args[1]:
            text = "{0} != {0}"
        return COMPARE.get(i.text, text).format(*args)
    if i.name == "arith.select" and space is not Space.SCALAR:
        return f"{c_type(i.dtype, space)}_select({', '.join(args)})"
    if i.name == "arith.bitcast":
        scalar = "f_bits" if i.dtype is not F32 else "i_float"
        return f"{scalar}({args[0]})" if space is Space.SCALAR else f"({c_type(i.dtype, space)}){args[0]}"
    if i.name == "arith.truncf":
        return f"{i.dtype}_round({args[0]})" if space is not Space.SCALAR else f"{i.dtype}_round(vf_all({args[0]}))[0]"
    if i.name == "arith.trunci" and space is Space.SCALAR:
        return f"(int32_t){args[0]}" + ("" if i.dtype.bits == 32 else " & 255")
    if i.name == "tensor.extract_slice":
        return f"vi_pick{i.index}({args[0]})"
    text = OPERATORS.get(i.name) or (NUMBER if space is Space.SCALAR else VECTOR).get(i.name, "")
    if space is Space.PAIR and i.name == "arith.shli":
        text = "{0} << {1}"
    if not text:
        raise LegalityError(f"{i.name} has no CPU form", "row program")
    return text.format(*args)


def splat(i: Instruction, space: Space, text: str) -> str:
    """A number as a vector."""
    kind = c_type(i.dtype, Space.ROW if space is Space.GROUP else space)
    return f"{kind}_all({text})"

