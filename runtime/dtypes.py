"""Element types as the runtime sees them: a name, a size, and the NumPy dtype to allocate with.

`f8e4m3`, `f8e5m2` and packed four-bit codes are raw bytes to most kernels: a `u8` operand takes them as they
are.
"""

import numpy as np

DTYPES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
    "u8": 1,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "u32": 4,
    "i64": 8,
    "bool": 1,
}
"""Kiln element type -> bytes per element."""

NUMPY_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "bool": "bool",
}
"""Name of a NumPy, ml_dtypes or torch dtype -> Kiln element type."""

CODES = frozenset({"f8e4m3", "f8e5m2"})
"""Types that a `u8` operand accepts as raw bytes."""

_EXTENDED = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_numpy: dict[str, np.dtype] = {}


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a Kiln element type; ml_dtypes is imported only for the types that need it."""
    found = _numpy.get(name)
    if found is None:
        if name in _EXTENDED:
            import ml_dtypes

            found = np.dtype(getattr(ml_dtypes, _EXTENDED[name]))
        else:
            found = np.dtype(next(n for n, kiln in NUMPY_NAMES.items() if kiln == name))
        _numpy[name] = found
    return found
