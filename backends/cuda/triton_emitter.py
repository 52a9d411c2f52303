"""A row program as readable Triton source: one tile of R rows and P columns a program, no op known by name.

Values are tiles: vectors [R, P·fraction], grouped [R, P·fraction, inner], scalars [R, 1]. Sums go through
`pair_sum`, the canonical order of DESIGN §9: an axis of two is one add whatever the layout, so `reshape` and
`sum` fix the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kiln.backends.cuda.prelude import BYTES_OF, PACK_E2M1, PRELUDE
from kiln.compiler.rowprogram import Instruction, RowProgram
from kiln.ir.dtypes import BF16
from kiln.ir.language import Shape
from kiln.ir.signature import row_kind
from kiln.ir.spec import Op

TRITON_TYPE = {
    "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "u8": "tl.uint8", "i32": "tl.int32",
    "i64": "tl.int64", "bool": "tl.int1",
}  # fmt: skip

EXACT: dict[str, str] = {
    "arith.addf": "{0} + {1}", "arith.subf": "{0} - {1}", "arith.mulf": "{0} * {1}", "arith.negf": "-{0}",
    "arith.divf": "tl.div_rn({0}, {1})", "math.sqrt": "tl.sqrt_rn({0})", "math.absf": "tl.abs({0})",
    "math.fma": "tl.fma({0}, {1}, {2})",
    "arith.addi": "{0} + {1}", "arith.subi": "{0} - {1}", "arith.muli": "{0} * {1}",
    "arith.maxsi": "tl.maximum({0}, {1})", "arith.divsi": "{0} // {1}", "arith.shli": "{0} << {1}",
    "arith.shrsi": "{0} >> {1}",
    "arith.andi": "{0} & {1}", "arith.ori": "{0} | {1}", "arith.select": "tl.where({0}, {1}, {2})",
    "arith.maximumf": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "arith.minimumf": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "arith.maxnumf": "tl.maximum({0}, {1})", "arith.minnumf": "tl.minimum({0}, {1})",
    "kiln.to_e4m3": "{0}.to(tl.float8e4nv).to(tl.uint8, bitcast=True)",
    "kiln.from_e4m3": "{0}.to(tl.float8e4nv, bitcast=True).to(tl.float32)",
}  # fmt: skip
FAST = {
    **EXACT,
    "kiln.logistic": "1.0 / (1.0 + tl.exp(-{0}))",
    "arith.divf": "{0} / {1}",
    "math.sqrt": "tl.sqrt({0})",
    "math.exp": "tl.exp({0})",
}
CONVERSIONS = frozenset({"arith.extf", "arith.truncf", "arith.sitofp", "arith.trunci", "arith.extui"})


def literal(value: float | int) -> str:
    """A Python literal of exactly this f32 or i32."""
    if isinstance(value, int):
        return str(value)
    single = float(np.float32(value))
    if single in (float("inf"), float("-inf")):
        return "1e999" if single > 0 else "-1e999"
    return repr(single)


@dataclass(frozen=True)
class Parameter:
    """One runtime argument of the generated function."""

    name: str
    kind: str
    """`ptr`, `stride`, `colstride`, `rows` (of a table), `scalar`, `M` or `N`."""
    operand: str = ""


@dataclass(frozen=True)
class TritonKernel:
    """Generated source and what its launch needs."""

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    whole_rows: bool
    """Whether a program holds whole rows (P >= N); otherwise rows are cut into blocks of P columns."""
    padded_rows: bool
    """Whether rows up to the next multiple of 128 are visited (swizzled scales)."""


class Emitter:
    """Writes a program's instructions one after another."""

    def __init__(self, program: RowProgram, op: Op, attrs: dict[str, bool | int | str], fast: bool) -> None:
        self.program, self.op, self.attrs = program, op, attrs
        self.templates = FAST if fast else EXACT
        self.fast = fast
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.definitions = program.by_result()
        self.masks: dict[Shape, str] = {}
        self.columns: dict[Fraction, str] = {}
        self.halves: dict[int, tuple[str, str]] = {}
        self.tensors = {t.name: t for t in op.tensors}
        self.padded = any(i.name == "kiln.store" and i.index for i in program.instructions)
        self.libdevice = False
        self.permutes = any(i.name == "kiln.permute" for i in program.instructions)
        self.whole = program.reduces_rows or self.permutes
        self.words: set[int] = set()
        """Values held as 32-bit words of four bytes each."""
        self.packs = any(i.name == "kiln.pack_e2m1" for i in program.instructions)
        self.helpers: dict[str, None] = {}

    @property
    def unpacks(self) -> bool:
        """Whether bf16 is widened by a shift: one instruction instead of two, for more registers. NVFP4 of
        16384x5120 takes 66.2 us instead of 68.3, but norm and NVFP4 180 instead of 156.
        """
        return self.packs and not self.whole

    # -- names -----------------------------------------------------------------------------------------------
    # ----------------------------

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def set(self, i: Instruction, expression: str) -> None:
        self.names[i.result] = f"v{i.result}"
        self.line(f"v{i.result} = {expression}")

    def arg(self, number: int) -> str:
        return self.names[number]

    def pointer(self, memory: str) -> str:
        """The parameter of a memory operand; only an in/out operand has two sides to tell apart."""
        name = memory.removesuffix(":out")
        return f"{name}_out" if name != memory and self.tensors[name].role == "inout" else name

    def width(self, fraction: Fraction, base: str = "P") -> str:
        """A size as an expression of the block or row width."""
        text = base if fraction.numerator == 1 else f"{base} * {fraction.numerator}"
        return text if fraction.denominator == 1 else f"{text} // {fraction.denominator}"

    def cols(self, fraction: Fraction) -> str:
        """Column indices of a vector of this fraction."""
        if fraction not in self.columns:
            name = "cols" if fraction == 1 else f"cols_{fraction.denominator}"
            size = self.width(fraction)
            base = "" if self.whole else f"{self.width(fraction, 'base')} + "
            self.line(f"{name} = {base}tl.arange(0, {size})[None, :]")
            self.columns[fraction] = name
        return self.columns[fraction]

    def mask(self, fraction: Fraction, rows: bool = True) -> str:
        """Lanes inside the tensor."""
        shape = Shape(fraction, 1 if rows else 2)
        if shape not in self.masks:
            name = f"live{'' if rows else '_cols'}" + ("" if fraction == 1 else f"_{fraction.denominator}")
            cols = self.cols(fraction)
            row_test = "(rows < M) & " if rows else ""
            self.line(f"{name} = {row_test}({cols} < {self.width(fraction, 'N')})")
            self.masks[shape] = name
        return self.masks[shape]

    # -- memory ----------------------------------------------------------------------------------------------
    # ----------------------------

    def address(self, operand: str, fraction: Fraction, offset: str = "") -> str:
        return f"{operand} + rows * {operand}_stride + {offset}{self.cols(fraction)}"

    def load(self, i: Instruction) -> None:
        if i.shape.is_scalar:
            self.set(i, f"tl.load({i.text} + rows * {i.text}_stride, rows < M, other=0)")
        elif i.shape.fraction == 2:
            self.names[i.result] = f"@{i.text}"  # read by kiln.half
        elif i.index:
            mask = self.mask(i.shape.fraction or Fraction(1))
            self.set(
                i, f"tl.load({self.address(i.text, i.shape.fraction or Fraction(1))}, {mask}, other=0.0)"
            )
        else:
            fraction = i.shape.fraction or Fraction(1)
            self.set(
                i, f"tl.load({i.text} + {self.cols(fraction)}, {self.mask(fraction, rows=False)}, other=0.0)"
            )

    def half(self, i: Instruction) -> None:
        operand = self.arg(i.args[0])[1:]
        offset = "N + " if i.index else ""
        self.set(
            i, f"tl.load({self.address(operand, Fraction(1), offset)}, {self.mask(Fraction(1))}, other=0.0)"
        )

    def take_row(self, i: Instruction) -> None:
        clamped = f"tl.minimum(tl.maximum({self.arg(i.args[0])}, 0), {i.text}_rows - 1).to(tl.int64)"
        self.line(f"row{i.result} = {clamped}")
        self.set(
            i,
            f"tl.load({i.text} + row{i.result} * {i.text}_stride + {self.cols(Fraction(1))}, "
            f"{self.mask(Fraction(1))}, other=0.0)",
        )

    def take_element(self, i: Instruction) -> None:
        self.set(i, f"tl.load({i.text} + {self.arg(i.args[0])}, rows < M, other=0)")

    def take_columns(self, i: Instruction) -> None:
        index, cols = (self.arg(n) for n in i.args)
        self.line(f"row{i.result} = tl.minimum(tl.maximum({index}, 0), {i.text}_rows - 1).to(tl.int64)")
        self.set(
            i,
            f"tl.load({i.text} + row{i.result} * {i.text}_stride + {cols}, "
            f"{self.mask(Fraction(1))}, other=0.0)",
        )

    def permute(self, i: Instruction) -> None:
        """The value computed again at other columns: from its loads on, so that nothing moves between
        threads.
        """
        self.names[i.result] = self.at_columns(i.args[0], self.arg(i.args[1]), {})

    def at_columns(self, number: int, cols: str, done: dict[int, str]) -> str:
        i = self.definitions[number]
        if i.shape.is_scalar or i.name == "tensor.splat":
            return self.arg(number)
        if number in done:
            return done[number]
        name = f"{self.arg(number)}_at"
        if i.name in ("kiln.load", "kiln.half"):
            operand = i.text if i.name == "kiln.load" else self.arg(i.args[0])[1:]
            row = f"rows * {operand}_stride + " if i.name == "kiln.half" or i.index else ""
            half = "N + " if i.name == "kiln.half" and i.index else ""
            self.line(f"{name} = tl.load({operand} + {row}{half}{cols}, {self.mask(Fraction(1))}, other=0.0)")
        else:
            args = [self.at_columns(n, cols, done) for n in i.args]
            self.line(f"{name} = {self.expression(i, args)}")
        done[number] = name
        return name

    def expression(self, i: Instruction, args: list[str]) -> str:
        """An element-wise operation on named values."""
        if i.name == "arith.extf" and self.unpacks and self.definitions[i.args[0]].dtype is BF16:
            return f"({args[0]}.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)"
        if i.name in CONVERSIONS:
            return f"{args[0]}.to({TRITON_TYPE[i.dtype.name]})"
        if i.name == "arith.bitcast":
            return f"{args[0]}.to({TRITON_TYPE[i.dtype.name]}, bitcast=True)"
        if i.name in ("arith.cmpf", "arith.cmpi"):
            return f"{args[0]} != {args[1]}" if i.text == "uno" else f"{args[0]} {i.text} {args[1]}"
        if i.name == "arith.divf" and not self.fast and args[0] == "1.0":
            # The same result as the division. Even for one number a row it is worth its 1 KB: the division's
            # slow path costs registers (norm and static fp8, 16384x5120: 0.93 against 0.77 of the bandwidth).
            self.libdevice = True
            return f"libdevice.rcp_rn({args[1]})"
        return self.templates[i.name].format(*args)

    def store(self, i: Instruction) -> None:
        if self.permutes:
            self.line(
                "tl.debug_barrier()  # other threads read columns that this store may overwrite in place"
            )
            self.permutes = False
        operand = self.pointer(i.text)
        value = self.arg(i.args[0])
        if i.shape.is_scalar:
            self.line(f"tl.store({operand} + rows * {operand}_stride, {value}, rows < M)")
            return
        fraction = i.shape.fraction or Fraction(1)
        if i.index:
            self.store_swizzled(operand, value, fraction)
            return
        if i.args[0] in self.words:
            fraction /= 4
            words = f"{operand}.to(tl.pointer_type(tl.uint32)) + rows * ({operand}_stride // 4)"
            self.line(f"tl.store({words} + {self.cols(fraction)}, {value}, {self.mask(fraction)})")
            return
        tensor = self.tensors[i.text.removesuffix(":out")]
        address = self.address(operand, fraction)
        if tensor.layout == "strided":
            address = f"{operand} + rows * {operand}_stride + {self.cols(fraction)} * {operand}_colstride"
        self.line(f"tl.store({address}, {value}, {self.mask(fraction)})")

    def store_swizzled(self, operand: str, value: str, fraction: Fraction) -> None:
        """128x4 blocks of scales: rows and groups beyond the tensor are written 0."""
        k = self.cols(fraction)
        groups = self.width(fraction, "N")
        self.line(f"blocks_k = ({groups} + 3) // 4")
        self.line(f"tile = (rows // 128) * blocks_k + {k} // 4")
        self.line(f"offset = (tile * 32 + rows % 32) * 16 + (rows % 128) // 32 * 4 + {k} % 4")
        inside = f"(rows < M) & ({k} < {groups})"
        self.line(
            f"tl.store({operand} + offset, tl.where({inside}, {value}, 0), "
            f"(rows < (M + 127) // 128 * 128) & ({k} < blocks_k * 4))"
        )

    # -- computation -----------------------------------------------------------------------------------------
    # ----------------------------

    def is_zero(self, number: int) -> bool:
        """Whether lanes outside the tensor are surely 0: they need no mask before a sum or a maximum of
        magnitudes.
        """
        i = self.definitions[number]
        if i.name in ("kiln.load", "kiln.half", "kiln.take_row"):
            return not i.shape.is_scalar
        if i.name in CONVERSIONS or i.name in ("math.absf", "tensor.expand_shape", "tensor.collapse_shape"):
            return self.is_zero(i.args[0])
        if i.name in ("arith.mulf", "arith.addf", "arith.subf"):
            return self.is_zero(i.args[0]) and self.is_zero(i.args[1])
        return False

    def reduce(self, i: Instruction) -> None:
        source = self.arg(i.args[0])
        origin = self.definitions[i.args[0]]
        is_sum = i.text == "arith.addf"
        magnitude = not is_sum and origin.name == "math.absf"
        if i.shape.is_scalar and not ((is_sum or magnitude) and self.is_zero(i.args[0])):
            identity = "0.0" if is_sum else "-1e999"
            source = f"tl.where({self.mask(Fraction(1), rows=False)}, {source}, {identity})"
        if not i.shape.is_scalar:
            self.set(i, f"tl.max({source}, axis=2)")
        elif is_sum and not self.fast:
            self.set(i, f"pair_sum({source}, R, P, LEVELS)")
        else:
            self.set(i, f"tl.{'sum' if is_sum else 'max'}({source}, axis=1, keep_dims=True)")

    def reshape(self, i: Instruction) -> None:
        fraction = i.shape.fraction or Fraction(1)
        inner = f", {i.shape.inner}" if i.shape.inner > 1 else ""
        self.set(i, f"tl.reshape({self.arg(i.args[0])}, (R, {self.width(fraction)}{inner}))")

    def splat(self, i: Instruction) -> None:
        source = self.arg(i.args[0])
        constant = self.definitions[i.args[0]].name == "arith.constant"
        self.names[i.result] = f"{source}[:, :, None]" if i.shape.inner > 1 and not constant else source

    def broadcast(self, i: Instruction) -> None:
        size = self.width(i.shape.fraction or Fraction(1))
        self.set(i, f"tl.broadcast_to({self.arg(i.args[0])}[:, :, None], (R, {size}, {i.shape.inner}))")

    def pack(self, i: Instruction) -> None:
        """Codes stay words where all they do is go to memory."""
        fraction = i.shape.fraction or Fraction(1)
        packed = f"pack_e2m1({self.arg(i.args[0])}, R, {self.width(fraction * 2)})"
        self.helpers[PACK_E2M1] = None
        uses = [u for u in self.program.instructions if i.result in u.args]
        if all(
            u.name == "kiln.store" and self.tensors[u.text.removesuffix(":out")].layout == "rows"
            for u in uses
        ):
            self.words.add(i.result)
        else:
            self.helpers[BYTES_OF] = None
            packed = f"bytes_of({packed}, R, {self.width(fraction / 4)})"
        self.set(i, packed)

    def slice(self, i: Instruction) -> None:
        source = i.args[0]
        if source not in self.halves:
            self.halves[source] = (f"even{source}", f"odd{source}")
            self.line(f"even{source}, odd{source} = tl.split({self.arg(source)})")
        self.names[i.result] = self.halves[source][i.index]

    def emit(self, i: Instruction) -> None:
        special: dict[str, Callable[[Instruction], None]] = {
            "kiln.load": self.load, "kiln.half": self.half, "kiln.take_row": self.take_row,
            "kiln.store": self.store,
            "linalg.reduce": self.reduce, "linalg.broadcast": self.broadcast, "tensor.splat": self.splat,
            "tensor.expand_shape": self.reshape, "tensor.collapse_shape": self.reshape,
            "tensor.extract_slice": self.slice,
            "kiln.take_element": self.take_element, "kiln.take_columns": self.take_columns,
            "kiln.permute": self.permute, "kiln.pack_e2m1": self.pack,
        }  # fmt: skip
        if i.name == "kiln.argument":
            self.names[i.result] = i.text
        elif i.name == "arith.constant":
            self.names[i.result] = literal(i.constant)
        elif i.name == "arith.index_cast":
            self.names[i.result] = "N"
        elif i.name == "arith.sitofp" and self.arg(i.args[0]) == "N":
            self.names[i.result] = "(N * 1.0)"  # N may be a constant, which has no method `to`
        elif i.name == "kiln.columns":
            self.names[i.result] = self.cols(Fraction(1))
        elif i.name == "kiln.row":
            self.set(i, "rows.to(tl.int32)")
        elif i.name in special:
            special[i.name](i)
        else:
            self.set(i, self.expression(i, [self.arg(n) for n in i.args]))

    # -- the function ----------------------------------------------------------------------------------------
    # ----------------------------

    def parameters(self) -> tuple[Parameter, ...]:
        """Pointers, then strides and table sizes, then scalars, then M and N."""
        memory = [a for a in self.program.arguments if a.removesuffix(":out") in self.tensors]
        pointers = [Parameter(self.pointer(m), "ptr", m) for m in memory]
        sizes: list[Parameter] = []
        for m in memory:
            tensor = self.tensors[m.removesuffix(":out")]
            kind = row_kind(self.op, tensor, self.attrs)
            name = self.pointer(m)
            if (kind.per_row or (kind.table and len(tensor.dims) == 2)) and tensor.layout != "nvfp4_128x4":
                sizes.append(Parameter(f"{name}_stride", "stride", m))
            if tensor.layout == "strided":
                sizes.append(Parameter(f"{name}_colstride", "colstride", m))
            if kind.table and len(tensor.dims) == 2:
                sizes.append(Parameter(f"{name}_rows", "rows", m))
        scalars = [Parameter(s.name, "scalar", s.name) for s in self.op.scalars]
        return (*pointers, *sizes, *scalars, Parameter("M", "M"), Parameter("N", "N"))

    def kernel(self, name: str) -> TritonKernel:
        parameters = self.parameters()
        arguments = ", ".join(
            [*(p.name for p in parameters), "P: tl.constexpr", "R: tl.constexpr", "LEVELS: tl.constexpr"]
        )
        if self.whole:
            self.line("rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]")
        else:
            self.line("pid = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)")
            self.line("rows = pid * R + tl.arange(0, R)[:, None]")
            self.line("base = tl.program_id(0) * P")
        for i in self.program.instructions:
            self.emit(i)
        body = "\n".join(self.lines)
        imports = "from triton.language.extra import libdevice\n" if self.libdevice else ""
        prelude = PRELUDE.replace("{imports}", imports) + "".join(self.helpers)
        source = f'{prelude}\n\n@triton.jit\ndef {name}({arguments}):\n    """{self.op.doc}"""\n{body}\n'
        return TritonKernel(name, source, parameters, self.whole, self.padded)


def emit(
    program: RowProgram, op: Op, attrs: dict[str, bool | int | str], name: str, fast: bool = False
) -> TritonKernel:
    """The Triton source of a row program. `fast` uses native functions and free order (the op's `fast`
    mode).
    """
    return Emitter(program, op, attrs, fast).kernel(name)
