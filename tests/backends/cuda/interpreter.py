"""NumPy arrays as the arguments of Triton's interpreter, without PyTorch.

The interpreter copies each tensor argument to the host, runs the grid on raw addresses and copies back; `ArrayArgument` offers the ten
methods it uses for that, on one NumPy array whose memory is read and written in place.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Argument: TypeAlias = Array | int | float

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
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(s // self.array.itemsize for s in self.array.strides)


def _enter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


@cache
def _worker() -> ProcessPoolExecutor:
    """One process whose Triton interprets: the setting counts when Triton is imported, so it cannot be this process."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_enter)


def _run(kernel: str, grid: tuple[int, ...], arguments: tuple[Argument, ...], constants: dict[str, int | bool]) -> list[Array]:
    module, _, name = kernel.partition(":")
    call = [ArrayArgument(a) if isinstance(a, np.ndarray) else a for a in arguments]
    getattr(import_module(module), name)[grid](*call, **constants)
    return [a for a in arguments if isinstance(a, np.ndarray)]


def interpret(kernel: str, grid: tuple[int, ...], *arguments: Argument, **constants: int | bool) -> list[Array]:
    """Run the kernel `module:function` over `grid` and return the array arguments as it left them; `constants` are its constexprs."""
    return _worker().submit(_run, kernel, grid, arguments, constants).result()
