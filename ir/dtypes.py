"""One table of element types: the names every part of Kiln uses for them.

A row gives the storage type of an operand. `f8e4m3` and `f4e2m1x2` are *codes*: arrays hold them as raw
bytes (`u8`), arithmetic never sees them.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """An element type and its name in each language it is written in."""

    name: str
    bits: int
    c: str
    triton: str
    mlir: str
    numpy: np.dtype
    epsilon: float | None = None
    """Distance from 1.0 to the next value; None for integers."""

    @property
    def is_float(self) -> bool:
        """Whether values are IEEE-like floating point numbers."""
        return self.epsilon is not None

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return self.bits // 8

    def __repr__(self) -> str:
        return self.name


F64 = DType("f64", 64, "double", "fp64", "f64", np.dtype(np.float64), 2.0**-52)
F32 = DType("f32", 32, "float", "fp32", "f32", np.dtype(np.float32), 2.0**-23)
F16 = DType("f16", 16, "uint16_t", "fp16", "f16", np.dtype(np.float16), 2.0**-10)
BF16 = DType("bf16", 16, "uint16_t", "bf16", "bf16", np.dtype(ml_dtypes.bfloat16), 2.0**-7)
F8E4M3 = DType("f8e4m3", 8, "uint8_t", "fp8e4nv", "f8E4M3FN", np.dtype(ml_dtypes.float8_e4m3fn), 2.0**-3)
U8 = DType("u8", 8, "uint8_t", "u8", "i8", np.dtype(np.uint8))
I8 = DType("i8", 8, "int8_t", "i8", "i8", np.dtype(np.int8))
I32 = DType("i32", 32, "int32_t", "i32", "i32", np.dtype(np.int32))
I64 = DType("i64", 64, "int64_t", "i64", "i64", np.dtype(np.int64))
BOOL = DType("bool", 8, "uint8_t", "i1", "i1", np.dtype(np.bool_))

DTYPES = {d.name: d for d in (F64, F32, F16, BF16, F8E4M3, U8, I8, I32, I64, BOOL)}
"""Every element type by its Kiln name."""


def dtype_of(array_dtype: np.dtype) -> DType:
    """The Kiln type of a NumPy dtype; KeyError names a dtype that has none."""
    for d in DTYPES.values():
        if d.numpy == array_dtype:
            return d
    raise KeyError(f"no Kiln element type for NumPy dtype {array_dtype}; known: {', '.join(DTYPES)}")
