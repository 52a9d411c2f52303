"""The table of element types, against NumPy and ml_dtypes."""

import numpy as np
import pytest

from kiln.ir.dtypes import BOOL, DTYPES, F8E4M3, I64, U8, DType, dtype_of


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_sizes_and_epsilons_are_those_of_the_array_type(dtype: DType) -> None:
    assert dtype.numpy.itemsize == dtype.bytes == dtype.bits // 8
    assert dtype.is_float == (dtype.epsilon is not None)
    if dtype.is_float:
        one = np.ones(1, dtype.numpy)
        above = (one.view(f"u{dtype.bytes}") + 1).view(dtype.numpy)
        assert dtype.epsilon == float(above[0]) - 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_array_type_is_found_again(dtype: DType) -> None:
    assert dtype_of(np.zeros(1, dtype.numpy).dtype) is dtype


def test_an_array_type_without_a_row_is_refused() -> None:
    with pytest.raises(KeyError, match="no Kiln element type for NumPy dtype complex64; known: f64, f32"):
        dtype_of(np.dtype(np.complex64))


def test_names_are_unique_and_printed() -> None:
    assert list(DTYPES) == [repr(d) for d in DTYPES.values()]
    assert (F8E4M3.bytes, I64.bytes, BOOL.is_float, U8.c) == (1, 8, False, "uint8_t")
