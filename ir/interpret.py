"""Op bodies run in NumPy: `exact` with every f32 rounding of the contract, `ideal` in float64 with no
rounding but the final codes.

Values are arrays over all rows: scalars (M, 1), vectors (M, n) or (1, n), grouped (M, n, G).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kiln.ir import signature
from kiln.ir.diagnostics import TypeCheckError
from kiln.ir.dtypes import F32, I32, DType
from kiln.ir.functions import FUNCTIONS
from kiln.ir.language import FOREIGN, SCALAR, Shape, Value
from kiln.ir.spec import Op

Array = np.ndarray


def fma32(a: Array, b: Array, c: Array) -> Array:
    """f32 a*b + c rounded once: the product is exact in f64, the sum is rounded to odd there, then to f32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    other = total - product
    error = (product - (total - other)) + (addend - other)
    bits = np.array(total, np.float64).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    away = (error > 0) == (total > 0)
    odd = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    return odd.view(np.float64).astype(np.float32)


def pair_sum(x: Array) -> Array:
    """Sum over the last axis in the canonical order: padded with +0 to a power of two, neighbours added
    until one is left, then +0.

    The last +0 turns a sum of -0 alone into +0, so that wider padding gives the same bits.
    """
    n = x.shape[-1]
    width = 1 << max(0, (n - 1).bit_length())
    if width != n:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], width - n), x.dtype)], axis=-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    total: Array = x[..., 0] + x.dtype.type(0.0)
    return total


def _max_number(x: Array) -> Array:
    largest: Array = np.fmax.reduce(x, axis=-1, initial=-np.inf)
    return largest


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "uno": lambda a,
    b: np.isnan(a) | np.isnan(b),
}  # fmt: skip

_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "arith.negf": np.negative,
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.maxsi": np.maximum,
    "arith.divsi": np.floor_divide, "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift, "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum, "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.select": np.where, "math.absf": np.abs, "math.sqrt": np.sqrt,
}  # fmt: skip


class NumpyMachine:
    """Runs bodies on arrays. `ideal=True` computes floats in float64 and calls NumPy's functions: the
    oracle.
    """

    def __init__(self, rows: int, width: int, ideal: bool) -> None:
        self.rows, self.width, self.ideal = rows, width, ideal
        self.float = np.dtype(np.float64) if ideal else np.dtype(np.float32)

    def storage(self, dtype: DType) -> np.dtype:
        """The NumPy type that values of `dtype` are held in."""
        return self.float if dtype.is_float and (self.ideal or dtype is F32) else dtype.numpy

    def value(self, array: Any, shape: Shape, dtype: DType) -> Value:
        """An operand as a value."""
        return Value(self, np.asarray(array).astype(self.storage(dtype), copy=False), shape, dtype)

    def constant(self, value: float | int, dtype: DType) -> Value:
        """A scalar (1, 1)."""
        if dtype is I32 and isinstance(value, int):
            value = (value + 2**31) % 2**32 - 2**31
        return Value(self, np.full((1, 1), value, self.storage(dtype)), SCALAR, dtype)

    def emit(self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, **attrs: Any) -> Value:
        """See Machine.emit."""
        with np.errstate(all="ignore"):
            data = self._compute(name, args, shape, dtype, attrs)
        return Value(self, data, shape, dtype)

    def _compute(
        self, name: str, args: Sequence[Value], shape: Shape, dtype: DType, attrs: dict[str, Any]
    ) -> Array:
        if name in FUNCTIONS:
            return self._function(name, args[0], dtype)
        arrays = [self._aligned(a, shape) for a in args]
        if name in _ELEMENTWISE:
            return _ELEMENTWISE[name](*arrays)
        if name == "math.fma":
            return arrays[0] * arrays[1] + arrays[2] if self.ideal else fma32(*arrays)
        if name in ("arith.cmpf", "arith.cmpi"):
            return _COMPARE[attrs["predicate"]](*arrays)
        if name in ("arith.extf", "arith.truncf", "arith.sitofp", "arith.trunci", "arith.extui"):
            return arrays[0].astype(self.storage(dtype))
        if name == "arith.bitcast":
            source = np.ascontiguousarray(arrays[0].astype(args[0].dtype.numpy, copy=False))
            pattern: Array = source.view(dtype.numpy).astype(self.storage(dtype), copy=False)
            return pattern
        if name.startswith("kiln."):
            taken: Array = self._memory(name, arrays, attrs)
            return taken
        return self._structural(name, args[0], shape, attrs)

    def _function(self, name: str, x: Value, dtype: DType) -> Array:
        function = FUNCTIONS[name]
        if self.ideal:
            result: Array = function.ideal(x.data).astype(self.storage(dtype))
            return result
        return np.asarray(function.exact(x).data)

    def _aligned(self, a: Value, shape: Shape) -> Array:
        """Scalars against grouped values need one more axis."""
        data: Array = a.data
        return data[..., None] if a.shape.is_scalar and shape.inner > 1 else data

    def _structural(self, name: str, x: Value, shape: Shape, attrs: dict[str, Any]) -> Array:
        data: Array = x.data
        match name:
            case "linalg.reduce":
                reduced = pair_sum(data) if attrs["combiner"] == "arith.addf" else _max_number(data)
                return reduced[..., None] if shape.is_scalar else reduced
            case "tensor.expand_shape":
                return data.reshape(data.shape[0], -1, shape.inner)
            case "tensor.collapse_shape":
                return data.reshape(data.shape[0], -1)
            case "linalg.broadcast":
                return np.repeat(data[..., None], shape.inner, axis=-1)
            case "tensor.extract_slice":
                return data[..., attrs["offset"]]
        raise KeyError(f"operation {name} has no NumPy meaning")

    def _memory(self, name: str, arrays: Sequence[Array], attrs: dict[str, Any]) -> Any:
        """Views, tables and indices."""
        match name:
            case "kiln.half":
                n = arrays[0].shape[-1] // 2
                return arrays[0][..., attrs["index"] * n : (attrs["index"] + 1) * n]
            case "kiln.width":
                return np.full((1, 1), self.width, self.float)
            case "kiln.columns":
                return np.arange(self.width, dtype=np.int32)[None, :]
            case "kiln.row":
                return np.arange(self.rows, dtype=np.int32)[:, None]
            case "kiln.take_row":
                return arrays[0][arrays[1].reshape(-1)]
            case "kiln.take_element":
                return arrays[0].reshape(-1)[arrays[1]]
            case "kiln.take_columns":
                return arrays[0][arrays[1], arrays[2]]
            case "kiln.permute":
                return arrays[0][:, arrays[1][0]]
        raise KeyError(f"operation {name} has no NumPy meaning")

    def call(self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]) -> Any:
        """Run the other op's body, or a primitive's reference, on these arrays."""
        if op.body is None:
            return self._primitive(op, args, dtypes, attrs)
        return signature.apply_body(op, args, dtypes, attrs)

    def _primitive(
        self, op: Op, args: dict[str, Any], dtypes: dict[str, DType], attrs: dict[str, Any]
    ) -> list[Value]:
        if op.reference is None:
            raise TypeCheckError(f"{op.name} has neither a body nor a reference to run")
        types = signature.bind_types(op, args, dtypes)
        given = {t.name: args[t.name].data for t in op.inputs if args.get(t.name) is not None}
        numbers = {s.name: args.get(s.name, s.default) for s in op.scalars}
        given |= {n: v.data.item() if isinstance(v, Value) else v for n, v in numbers.items()}
        results = op.reference(**given, **attrs)
        return [
            self.value(r, signature.operand_shape(op, t, attrs), signature.resolve(op, t, types))
            for t, r in zip(op.outputs, results, strict=True)
        ]


def _operand_value(machine: NumpyMachine, op: Op, name: str, array: Array) -> Value:
    tensor = next(t for t in op.tensors if t.name == name)
    dtype = signature.array_dtype(tensor, array)
    if signature.operand_shape(op, tensor) == FOREIGN:
        rows = int(np.prod(array.shape[:-1]))
        return machine.value(array.reshape(rows, array.shape[-1]), FOREIGN, dtype)
    kind = signature.row_kind(op, tensor)
    if kind.table:
        return machine.value(array, kind.shape, dtype)
    if kind.shape.is_scalar:
        return machine.value(array.reshape(-1, 1), SCALAR, dtype)
    data = array.reshape(1, -1) if not kind.per_row else array.reshape(-1, array.shape[-1])
    return machine.value(data, kind.shape, dtype)


def run(
    op: Op,
    arrays: Mapping[str, Any],
    *,
    attrs: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, DType] | None = None,
    ideal: bool = False,
) -> tuple[Array | None, ...]:
    """Outputs of an expressible op on NumPy operands (tensors and scalars by name), in return order.

    `exact` (default) gives the contract's bits in the storage types; `ideal=True` gives float64 values
    (codes stay u8). Swizzled scale outputs come in the linear layout (M, groups).
    """
    if op.steps is not None:
        return _run_pipeline(op, arrays, attrs or {}, dtypes or {}, ideal)
    sizes = signature.bind_sizes(
        op, {k: v.shape for k, v in arrays.items() if hasattr(v, "shape") and np.ndim(v)}
    )
    rows, width = sizes.get(op.rows, 1), sizes[op.width]
    machine = NumpyMachine(rows, width, ideal)
    values: dict[str, Any] = {}
    for t in op.inputs:
        array = arrays.get(t.name)
        values[t.name] = None if array is None else _operand_value(machine, op, t.name, np.asarray(array))
    for s in op.scalars:
        values[s.name] = machine.constant(arrays.get(s.name, s.default), s.dtype)
    results = signature.apply_body(op, values, dict(dtypes or {}), dict(attrs or {}))
    return tuple(_finish(r, rows) for r in results)


def _run_pipeline(
    op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any], dtypes: Mapping[str, DType], ideal: bool
) -> tuple[Array | None, ...]:
    """A pipeline's steps one after another."""
    chosen = {a.name: attrs.get(a.name, a.default) for a in op.attrs}
    held = dict(arrays)
    for step in op.steps(chosen) if op.steps is not None else ():
        given = {name: None if source is None else held.get(source) for name, source in step.bind.items()}
        numbers = {name: held[source] for name, source in step.scalars.items() if source in held}
        results = run(step.op, {**given, **numbers}, attrs=step.attrs, dtypes=dtypes, ideal=ideal)
        for tensor, result in zip(step.op.outputs, results, strict=True):
            target = step.bind.get(tensor.name)
            if target is not None:
                held[target] = result
    return tuple(held[t.name] for t in op.outputs)


def _finish(value: Value | None, rows: int) -> Array | None:
    if value is None:
        return None
    data = np.asarray(value.data)
    if value.shape.is_scalar:
        return np.broadcast_to(data, (rows, 1)).reshape(rows).copy()
    return np.broadcast_to(data, (rows, *data.shape[1:])).copy()
