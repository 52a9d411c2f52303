"""NumPy arrays as the arguments of Triton's interpreter, without PyTorch, and repairs: it then computes what
a device computes.

The interpreter copies each tensor argument to the host, runs the grid on raw addresses and copies back;
`ArrayArgument` offers the ten methods it uses for that, on one NumPy array whose memory is read and written
in place.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class View:
    """The part of a contiguous array from one of its elements on; strides are the kernel's own arguments."""

    array: Array
    first: int


Argument: TypeAlias = Array | View | int | float | None
Constant: TypeAlias = int | bool | str | None

TRITON_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "int8": "i8",
    "uint32": "u32",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
}


class ArrayArgument:
    """The tensor protocol of Triton's interpreter over one NumPy array; nothing is copied."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.dtype = TRITON_NAMES[array.dtype.name]

    def data_ptr(self) -> int:
        """Address of the first element."""
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.array.itemsize

    def untyped_storage(self) -> ArrayArgument:
        """The memory behind the tensor: this object stands for it."""
        return self

    def cpu(self) -> ArrayArgument:
        """The host copy: host memory already."""
        return self

    def new_empty(self, *_shape: object, **_options: object) -> ArrayArgument:
        """A tensor that `set_` points at the memory."""
        return ArrayArgument(self.array)

    def set_(self, storage: ArrayArgument, *_view: object) -> None:
        """Point at a storage."""
        self.array = storage.array

    def copy_(self, _other: ArrayArgument) -> None:
        """The copy back: the kernel wrote in place."""

    def storage_offset(self) -> int:
        """Elements from the storage's start."""
        return 0

    def size(self) -> tuple[int, ...]:
        """The shape."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(s // self.array.itemsize for s in self.array.strides)


class Address:
    """The tensor protocol over memory that someone else holds: an address and an element type."""

    def __init__(self, pointer: int, dtype: str) -> None:
        """`dtype` as Triton calls it: bf16, fp32, u8."""
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.pointer

    def untyped_storage(self) -> Address:
        """The memory behind the tensor: this object stands for it."""
        return self

    def cpu(self) -> Address:
        """The host copy: host memory already."""
        return self

    def new_empty(self, *_shape: object, **_options: object) -> Address:
        """A tensor that `set_` points at the memory."""
        return Address(self.pointer, self.dtype)

    def set_(self, storage: Address, *_view: object) -> None:
        """Point at a storage."""
        self.pointer = storage.pointer

    def copy_(self, _other: Address) -> None:
        """The copy back: the kernel wrote in place."""

    def storage_offset(self) -> int:
        """Elements from the storage's start."""
        return 0

    def size(self) -> tuple[int, ...]:
        """No shape: kernels have strides of their own."""
        return ()

    def stride(self) -> tuple[int, ...]:
        """No strides."""
        return ()


def enter() -> None:
    """Make this process's Triton interpret, as the device computes; before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    _repair_casts()
    _repair_nan()
    _repair_splat()
    _repair_libdevice()


def number(value: float) -> Any:
    """An f32 argument. A plain Python float would be computed with in double precision."""
    from triton.runtime import interpreter

    return _tensor(np.array([value], np.float32), interpreter.tl.float32)


def _tensor(data: Array, dtype: Any) -> Any:
    from triton.runtime import interpreter

    tl = interpreter.tl
    kind = tl.block_type(dtype, list(data.shape)) if data.shape not in ((), (1,)) else dtype
    return tl.tensor(interpreter.TensorHandle(data, dtype), kind)


def _widen(codes: Array) -> Array:
    """f32 values of bf16 codes."""
    wide: Array = (codes.astype(np.uint32) << 16).view(np.float32)
    return wide


def _to_e4m3(data: Array) -> Array:
    """Codes as the device's saturating conversion gives them: nearest even, at most 448, one NaN."""
    with np.errstate(all="ignore"):
        codes = np.clip(data.astype(np.float32), -448.0, 448.0).astype(float8_e4m3fn).view(np.uint8)
    codes[np.isnan(data)] = 0x7F
    return codes


def _repair_casts() -> None:
    """Make the interpreter's bf16 and e4m3 real: Triton 3.9 multiplies 16-bit codes as integers in dot, and
    truncates where the device rounds to nearest even."""
    from triton.runtime import interpreter

    bf16, f32, e4m3 = interpreter.tl.bfloat16, interpreter.tl.float32, interpreter.tl.float8e4nv
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar == e4m3:
            return handle(operand.data.view(float8_e4m3fn).astype(np.float32), f32)
        return handle(_widen(operand.data), f32) if operand.dtype.scalar == bf16 else operand

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, operand: Any, to: Any) -> Any:
        if (operand.dtype.scalar, to.scalar) == (bf16, f32):
            return widened(operand)
        if (operand.dtype.scalar, to.scalar) == (f32, bf16):
            return handle(operand.data.astype(bfloat16).view(np.uint16), bf16)
        return cast(self, operand, to)

    def create_fp_to_fp(self: Any, operand: Any, to: Any, rounding: Any) -> Any:
        if (operand.dtype.scalar, to.scalar) == (f32, e4m3):
            return handle(_to_e4m3(operand.data), e4m3)
        if (operand.dtype.scalar, to.scalar) == (e4m3, f32):
            return handle(operand.data.view(float8_e4m3fn).astype(np.float32), f32)
        return convert(self, operand, to, rounding)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp


ARITHMETIC = (
    "create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_precise_divf", "create_fma",
    "create_precise_sqrt", "create_sqrt", "create_minimumf", "create_maximumf", "create_minnumf",
    "create_maxnumf",
)  # fmt: skip


def _repair_nan() -> None:
    """Let arithmetic give the device's one NaN, 0x7fffffff; a CPU keeps payloads and makes negative ones."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def canonical(operation: Any) -> Any:
        def run(self: Any, *operands: Any) -> Any:
            result = operation(self, *operands)
            if result.data.dtype == np.float32:
                data = np.array(result.data)
                data.view(np.uint32)[np.isnan(data)] = 0x7FFFFFFF
                result.data = data
            return result

        return run

    for name in ARITHMETIC:
        setattr(builder, name, canonical(getattr(builder, name)))


def _repair_splat() -> None:
    """Let a comparison of scalars stay boolean beside a tensor's: Triton 3.9 gives it its operands' type."""
    from triton.runtime import interpreter

    def create_splat(self: Any, to: Any, scalar: Any) -> Any:
        data = np.asarray(scalar.data).reshape(-1)[:1]
        return interpreter.TensorHandle(np.full(to.shape, data, data.dtype), scalar.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat


def _repair_libdevice() -> None:
    """The functions of libdevice that kernels use, which the interpreter lacks."""
    from triton.language.extra import libdevice

    def rcp_rn(x: Any) -> Any:
        with np.errstate(all="ignore"):
            data = np.asarray(np.float32(1.0) / x.handle.data, np.float32)
        return _tensor(np.where(np.isnan(data), np.float32(np.nan), data), x.dtype.scalar)

    libdevice.rcp_rn = rcp_rn


@cache
def _worker() -> ProcessPoolExecutor:
    """One process whose Triton interprets: the setting counts when Triton is imported, so it cannot be
    this process."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=enter)


def _argument(argument: Argument) -> ArrayArgument | int | float | None:
    if isinstance(argument, View):
        return ArrayArgument(argument.array.reshape(-1)[argument.first :])
    return ArrayArgument(argument) if isinstance(argument, np.ndarray) else argument


def _run(
    kernel: str,
    grid: tuple[int, ...],
    arguments: tuple[Argument, ...],
    constants: dict[str, Constant],
    path: list[str],
) -> list[Array]:
    sys.path[:] = path
    module, _, name = kernel.partition(":")
    getattr(import_module(module), name)[grid](*map(_argument, arguments), **constants)
    return [a.array if isinstance(a, View) else a for a in arguments if isinstance(a, np.ndarray | View)]


def interpret(kernel: str, grid: tuple[int, ...], *arguments: Argument, **constants: Constant) -> list[Array]:
    """Run the kernel `module:function` over `grid` and return the whole arrays of its arguments as it left
    them.

    `constants` are the kernel's constexprs. A strided view cannot be sent as itself: ValueError says to use
    `View`.
    """
    for position, argument in enumerate(arguments):
        array = argument.array if isinstance(argument, View) else argument
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            raise ValueError(
                f"argument {position} of {kernel} is a strided view: pass View(buffer, first element)"
            )
    return _worker().submit(_run, kernel, grid, arguments, constants, sys.path).result()
