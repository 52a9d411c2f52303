"""The tensor language that op bodies and recipes are written in.

A body is a Python function over `Value`s of one row: it is run once by a *machine*, which decides what the
operations mean. `kiln.ir.interpret` computes them with NumPy, `kiln.ir.trace` builds MLIR from them. Every
value has one of four shapes:

* scalar: one number per row (or per call);
* vector: the row, or a fixed fraction of it (`fraction`: 1, 1/2 after packing pairs, 1/16 after reducing
  groups of 16, 2 for a gate|up row);
* grouped: the vector cut into groups of `inner` neighbours.

Rounding is explicit: arithmetic is f32 (or i32), `to(BF16)` rounds once, to nearest even. Nothing is
contracted or reassociated; sums have the pair-tree order of DESIGN §9.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from kiln.ir.diagnostics import TypeCheckError
from kiln.ir.dtypes import BF16, BOOL, F16, F32, I32, I64, U8, DType
from kiln.ir.spec import Op

ARITHMETIC = (F32, I32)


@dataclass(frozen=True)
class Shape:
    """Shape of a value within one row: see the module docstring."""

    fraction: Fraction | None = None
    inner: int = 1

    @property
    def is_scalar(self) -> bool:
        """Whether there is one number per row."""
        return self.fraction is None


SCALAR = Shape()
ROW = Shape(Fraction(1))
FOREIGN = Shape(Fraction(0))
"""A row of a width of its own, which combines with nothing: primitive ops alone read it."""


class Machine(Protocol):
    """What gives operations their meaning."""

    def emit(self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, **attrs: Any) -> Value:
        """Perform the operation `name` (an MLIR operation's name) and return its value."""
        ...

    def constant(self, value: float | int, dtype: DType) -> Value:
        """A scalar known when the body is run."""
        ...

    def call(self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]) -> Any:
        """Apply another op of the catalog."""
        ...


def where(depth: int = 2) -> str:
    """file:line of the body's source that is being run."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _merge(a: Shape, b: Shape) -> Shape:
    if a.is_scalar:
        return b
    if b.is_scalar or a == b:
        return a
    raise TypeCheckError(f"shapes {a} and {b} do not combine; group or ungroup one of them", where())


class Value:
    """A number, vector or grouped vector of the row that is being computed."""

    __slots__ = ("data", "dtype", "machine", "shape")
    __hash__ = object.__hash__

    def __init__(self, machine: Machine, data: Any, shape: Shape, dtype: DType) -> None:
        self.machine, self.data, self.shape, self.dtype = machine, data, shape, dtype

    def _wrap(self, other: Value | float | int) -> Value:
        if isinstance(other, Value):
            return other
        return self.machine.constant(other, self.dtype)

    def _binary(self, stem: str, other: Value | float | int, swap: bool = False) -> Value:
        b = self._wrap(other)
        if self.dtype is not b.dtype or self.dtype not in ARITHMETIC:
            raise TypeCheckError(
                f"cannot {stem} {self.dtype} and {b.dtype}; arithmetic is on f32 or i32, convert with "
                ".to(F32) first",
                where(),
            )
        name = f"arith.{stem}{'f' if self.dtype is F32 else 'i'}"
        args = (b, self) if swap else (self, b)
        return self.machine.emit(name, args, _merge(self.shape, b.shape), self.dtype)

    def __add__(self, o: Value | float | int) -> Value:
        return self._binary("add", o)

    def __radd__(self, o: float | int) -> Value:
        return self._binary("add", o, swap=True)

    def __sub__(self, o: Value | float | int) -> Value:
        return self._binary("sub", o)

    def __rsub__(self, o: float | int) -> Value:
        return self._binary("sub", o, swap=True)

    def __mul__(self, o: Value | float | int) -> Value:
        return self._binary("mul", o)

    def __rmul__(self, o: float | int) -> Value:
        return self._binary("mul", o, swap=True)

    def __truediv__(self, o: Value | float) -> Value:
        _require(self, F32, "/", "divide() is for i32")
        return self._binary("div", o)

    def __rtruediv__(self, o: float) -> Value:
        _require(self, F32, "/", "divide() is for i32")
        return self._binary("div", o, swap=True)

    def __neg__(self) -> Value:
        if self.dtype is I32:
            return 0 - self
        _require(self, F32, "-")
        return self.machine.emit("arith.negf", (self,), self.shape, F32)

    def __bool__(self) -> bool:
        raise TypeCheckError(
            "a value of the row is not known while the body is run; use select() instead of if", where()
        )

    def __eq__(self, o: object) -> bool:
        raise TypeCheckError("values of the row have no ==; compare with < and <=, or use is_nan()", where())

    def _integer(self, name: str, o: Value | int) -> Value:
        b = self._wrap(o)
        for value in (self, b):
            _require(value, I32, name.removeprefix("arith."), "take .bits() of an f32 first")
        return self.machine.emit(name, (self, b), _merge(self.shape, b.shape), self.dtype)

    def __lshift__(self, o: int) -> Value:
        return self._integer("arith.shli", o)

    def __rshift__(self, o: int) -> Value:
        return self._integer("arith.shrsi", o)

    def __and__(self, o: Value | int) -> Value:
        return self._integer("arith.andi", o)

    def __or__(self, o: Value | int) -> Value:
        return self._integer("arith.ori", o)

    def _compare(self, predicate: str, o: Value | float | int) -> Value:
        b = self._wrap(o)
        name = "arith.cmpf" if self.dtype is F32 else "arith.cmpi"
        if self.dtype is not b.dtype or self.dtype not in ARITHMETIC:
            raise TypeCheckError(
                f"cannot compare {self.dtype} with {b.dtype}; convert with .to(F32) first", where()
            )
        return self.machine.emit(name, (self, b), _merge(self.shape, b.shape), BOOL, predicate=predicate)

    def __lt__(self, o: Value | float | int) -> Value:
        return self._compare("lt", o)

    def __le__(self, o: Value | float | int) -> Value:
        return self._compare("le", o)

    def __gt__(self, o: Value | float | int) -> Value:
        return self._compare("gt", o)

    def __ge__(self, o: Value | float | int) -> Value:
        return self._compare("ge", o)

    def to(self, dtype: DType) -> Value:
        """Convert, rounding once to nearest even where the type is narrower. f16 and bf16 meet in f32."""
        if dtype is self.dtype:
            return self
        pair = (self.dtype, dtype)
        if pair in ((BF16, F16), (F16, BF16)):
            return self.to(F32).to(dtype)
        names = {
            (BF16, F32): "arith.extf", (F16, F32): "arith.extf", (F32, BF16): "arith.truncf",
            (F32, F16): "arith.truncf",
            (I32, F32): "arith.sitofp", (I32, U8): "arith.trunci", (U8, I32): "arith.extui",
            (I64, I32): "arith.trunci",
        }  # fmt: skip
        if pair not in names:
            raise TypeCheckError(f"no conversion from {self.dtype} to {dtype}", where())
        return self.machine.emit(names[pair], (self,), self.shape, dtype)

    def bits(self) -> Value:
        """The f32 bit pattern as i32."""
        _require(self, F32, "bits")
        return self.machine.emit("arith.bitcast", (self,), self.shape, I32)

    def as_f32(self) -> Value:
        """The i32 bit pattern as f32."""
        _require(self, I32, "as_f32", "only an i32 holds a bit pattern")
        return self.machine.emit("arith.bitcast", (self,), self.shape, F32)


def _require(x: Value, dtype: DType, what: str, hint: str = "convert with .to(F32) first") -> None:
    if x.dtype is not dtype:
        raise TypeCheckError(f"{what} takes {dtype}, not {x.dtype}; {hint}", where())


def _unary(name: str, x: Value, dtype: DType = F32) -> Value:
    _require(x, F32, name)
    return x.machine.emit(name, (x,), x.shape, dtype)


def absolute(x: Value) -> Value:
    """|x|, NaN kept."""
    return _unary("math.absf", x)


def sqrt(x: Value) -> Value:
    """Correctly rounded square root."""
    return _unary("math.sqrt", x)


def exp(x: Value) -> Value:
    """e**x within 2 ulp, the same bits everywhere (see kiln.ir.functions)."""
    return _unary("math.exp", x)


def logistic(x: Value) -> Value:
    """1 / (1 + exp(-x)) within 4 ulp, 0 below -86.6."""
    return _unary("kiln.logistic", x)


def tanh(x: Value) -> Value:
    """Hyperbolic tangent within 2 ulp."""
    return _unary("math.tanh", x)


def erf(x: Value) -> Value:
    """Error function within 2 ulp."""
    return _unary("math.erf", x)


def to_e4m3(x: Value) -> Value:
    """float8 e4m3fn code of x as u8: to nearest even, saturating at 448, NaN -> 0x7f."""
    return _unary("kiln.to_e4m3", x, U8)


def to_e2m1(x: Value) -> Value:
    """float4 e2m1 code of x in the low four bits of an i32: to nearest even, saturating at 6, the sign of
    zero kept, NaN -> 7.
    """
    return _unary("kiln.to_e2m1", x, I32)


def pack_e2m1(x: Value) -> Value:
    """float4 e2m1 codes of neighbours as u8 pairs, the first in the low nibble: half as many as x. Rounding
    as in to_e2m1.
    """
    _require(x, F32, "pack_e2m1")
    if x.shape.fraction is None or x.shape.inner != 1:
        raise TypeCheckError(f"pack_e2m1 takes a row, not {x.shape}; ungroup() it", where())
    return x.machine.emit("kiln.pack_e2m1", (x,), Shape(x.shape.fraction / 2), U8)


def from_e4m3(code: Value) -> Value:
    """The f32 value of a non-negative e4m3fn code (u8)."""
    _require(code, U8, "from_e4m3", "make the code with to_e4m3()")
    return code.machine.emit("kiln.from_e4m3", (code,), code.shape, F32)


def fma(a: Value, b: Value | float, c: Value | float) -> Value:
    """a*b + c rounded once."""
    b, c = a._wrap(b), a._wrap(c)
    for value in (a, b, c):
        _require(value, F32, "fma")
    return a.machine.emit("math.fma", (a, b, c), _merge(_merge(a.shape, b.shape), c.shape), F32)


def maximum(a: Value, b: Value | float) -> Value:
    """Larger of two; NaN if either is NaN."""
    return _pick("arith.maximumf", a, b)


def minimum(a: Value, b: Value | float) -> Value:
    """Smaller of two; NaN if either is NaN."""
    return _pick("arith.minimumf", a, b)


def max_number(a: Value, b: Value | float) -> Value:
    """Larger of two; a NaN loses against a number."""
    return _pick("arith.maxnumf", a, b)


def min_number(a: Value, b: Value | float) -> Value:
    """Smaller of two; a NaN loses against a number."""
    return _pick("arith.minnumf", a, b)


def max_integer(a: Value, b: Value | int) -> Value:
    """Larger of two i32."""
    return a._integer("arith.maxsi", b)


def _pick(name: str, a: Value, b: Value | float) -> Value:
    w = a._wrap(b)
    for value in (a, w):
        _require(value, F32, name)
    return a.machine.emit(name, (a, w), _merge(a.shape, w.shape), F32)


def select(condition: Value, a: Value, b: Value | float | int) -> Value:
    """a where the condition holds, else b."""
    _require(condition, BOOL, "select's condition", "compare two values")
    w = a._wrap(b)
    if a.dtype is not w.dtype:
        raise TypeCheckError(f"select takes two values of one type, not {a.dtype} and {w.dtype}", where())
    shape = _merge(_merge(condition.shape, a.shape), w.shape)
    return a.machine.emit("arith.select", (condition, a, w), shape, a.dtype)


def is_nan(x: Value) -> Value:
    """Whether x is NaN."""
    _require(x, F32, "is_nan")
    return x.machine.emit("arith.cmpf", (x, x), x.shape, BOOL, predicate="uno")


def row_sum(x: Value) -> Value:
    """Sum over the row in the pair-tree order: one f32 scalar."""
    return _reduce("arith.addf", x, SCALAR)


def row_max(x: Value) -> Value:
    """Largest number of the row (NaN ignored; -inf for a row of NaN): one f32 scalar."""
    return _reduce("arith.maxnumf", x, SCALAR)


def group_max(x: Value) -> Value:
    """Largest number of each group (NaN ignored): a vector with one f32 per group."""
    if x.shape.inner == 1:
        raise TypeCheckError(
            f"group_max takes a grouped row, not {x.shape}; group() it, or take row_max()", where()
        )
    return _reduce("arith.maxnumf", x, Shape(x.shape.fraction))


def _reduce(combiner: str, x: Value, shape: Shape) -> Value:
    _require(x, F32, "a reduction")
    if shape.is_scalar and (x.shape.is_scalar or x.shape.inner != 1):
        raise TypeCheckError(
            f"a reduction over the row takes a row, not {x.shape}; ungroup() it first", where()
        )
    return x.machine.emit("linalg.reduce", (x,), shape, F32, combiner=combiner)


def group(x: Value, size: int) -> Value:
    """Cut the row into groups of `size` neighbours."""
    if x.shape.fraction is None or x.shape.inner != 1:
        raise TypeCheckError(f"group takes a row, not {x.shape}", where())
    return x.machine.emit("tensor.expand_shape", (x,), Shape(x.shape.fraction / size, size), x.dtype)


def ungroup(x: Value) -> Value:
    """The row again, from groups."""
    if x.shape.fraction is None or x.shape.inner == 1:
        raise TypeCheckError(f"ungroup takes a grouped row, not {x.shape}", where())
    return x.machine.emit("tensor.collapse_shape", (x,), Shape(x.shape.fraction * x.shape.inner), x.dtype)


def spread(x: Value, size: int) -> Value:
    """Repeat each element of a per-group vector `size` times: a grouped value."""
    if x.shape.is_scalar or x.shape.inner != 1:
        raise TypeCheckError(f"spread takes a vector with one element a group, not {x.shape}", where())
    return x.machine.emit("linalg.broadcast", (x,), Shape(x.shape.fraction, size), x.dtype)


def pick(x: Value, index: int) -> Value:
    """Element `index` of every group of two: a vector."""
    if x.shape.inner != 2 or index not in (0, 1):
        raise TypeCheckError(f"pick takes element 0 or 1 of groups of two, not {index} of {x.shape}", where())
    return x.machine.emit("tensor.extract_slice", (x,), Shape(x.shape.fraction), x.dtype, offset=index)


def halves(x: Value) -> tuple[Value, Value]:
    """The two halves of a row twice as wide as the op's width (gate first)."""
    if x.shape.fraction != 2:
        raise TypeCheckError(f"halves takes a row of width 2N, not {x.shape}", where())
    first, second = (x.machine.emit("kiln.half", (x,), ROW, x.dtype, index=i) for i in (0, 1))
    return first, second


def take_row(table: Value, index: Value) -> Value:
    """Row `index` (i32 or i64 scalar) of a table operand. The emitters clamp the index into the table and
    report one that was outside.
    """
    return table.machine.emit("kiln.take_row", (table, index), ROW, table.dtype)


def columns(like: Value) -> Value:
    """Column numbers 0 .. N-1 as a vector of i32."""
    return like.machine.emit("kiln.columns", (), ROW, I32)


def row_number(like: Value) -> Value:
    """The number of this row as an i32 scalar."""
    return like.machine.emit("kiln.row", (), SCALAR, I32)


def divide(a: Value, b: Value) -> Value:
    """Whole quotient of two non-negative i32."""
    return a._integer("arith.divsi", b)


def take_element(vector: Value, index: Value) -> Value:
    """Element `index` of a one-dimensional table operand: a scalar."""
    return vector.machine.emit("kiln.take_element", (vector, index), SCALAR, vector.dtype)


def take_columns(table: Value, index: Value, cols: Value) -> Value:
    """Elements `cols` (a vector of i32, all inside the table's width) of row `index` of a table operand."""
    return table.machine.emit("kiln.take_columns", (table, index, cols), ROW, table.dtype)


def permute(x: Value, cols: Value) -> Value:
    """The row with its columns in another order: element j is x[cols[j]]."""
    if x.shape != ROW:
        raise TypeCheckError(f"permute takes a row, not {x.shape}", where())
    return x.machine.emit("kiln.permute", (x, cols), ROW, x.dtype)


def width_of(x: Value) -> Value:
    """Number of elements in the row as an f32 scalar (exact below 2**24)."""
    return x.machine.emit("kiln.width", (x,), SCALAR, F32)


def call(op: Op, *args: Any, dtypes: dict[str, DType] | None = None, **kwargs: Any) -> list[Value]:
    """Apply `op` in a body. Operands in declared order or by name; attributes by name; `dtypes` fixes type
    variables that only outputs have.
    """
    names = [o.name for o in op.operands if getattr(o, "role", "in") != "out"]
    if len(args) > len(names):
        raise TypeCheckError(
            f"{op.name} takes {len(names)} operands ({', '.join(names)}), got {len(args)}", where()
        )
    given = dict(zip(names, args, strict=False))
    attrs = {a.name: kwargs.pop(a.name, a.default) for a in op.attrs}
    for name, value in kwargs.items():
        if name not in names or name in given:
            legal = ", ".join([*names, *attrs])
            raise TypeCheckError(
                f"{op.name} has no free operand or attribute {name!r}; it takes {legal}", where()
            )
        given[name] = value
    missing = [t.name for t in op.inputs if t.name not in given and not t.optional]
    missing += [s.name for s in op.scalars if s.name not in given and s.default is None]
    if missing:
        raise TypeCheckError(
            f"{op.name} needs operand {', '.join(missing)}; it takes {', '.join(names)}", where()
        )
    machine = next((v.machine for v in given.values() if isinstance(v, Value)), None)
    if machine is None:
        raise TypeCheckError(f"{op.name} was called without any value of the row", where())
    results: list[Value] = machine.call(op, given, dict(dtypes or {}), attrs)
    return results
