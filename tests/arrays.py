"""Short names for arrays of literals."""

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


def f32(values: Any) -> Array:
    """An array of f32."""
    return np.array(values, np.float32)


def i32(values: Any) -> Array:
    """An array of i32."""
    return np.array(values, np.int32)
