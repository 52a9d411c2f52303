"""Arrays between two pages that may not be touched, flush with one of them: a byte read or written outside
ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory for one array of `rows` rows, `stride` elements apart (the gaps are red zones), flush with the
    end or the start of its pages."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], stride: int = 0, *, at_end: bool = True
    ) -> None:
        self.width = shape[-1] if len(shape) == 2 else int(np.prod(shape))
        self.rows = shape[0] if len(shape) == 2 else 1
        self.stride = max(stride, self.width)
        count = (self.rows - 1) * self.stride + self.width
        size = -(-max(count * dtype.itemsize, 1) // PAGE) * PAGE
        self._map = mmap.mmap(-1, size + 2 * PAGE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (self._base, self._base + PAGE + size):
            if _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        offset = PAGE + (size - count * dtype.itemsize if at_end else 0)
        self.flat: Array = np.ndarray((count,), dtype, buffer=self._map, offset=offset)
        steps = (self.stride * dtype.itemsize, dtype.itemsize)
        view: Array = np.lib.stride_tricks.as_strided(self.flat, (self.rows, self.width), steps)
        self.view: Array = view if len(shape) == 2 else view.reshape(shape)
        self.address = self._base + offset

    def poison(self, byte: int = 0xFF) -> None:
        """Fill everything, gaps too: 0xff bytes are NaN in every float type."""
        self.flat.view(np.uint8)[:] = byte

    def gaps_are(self, byte: int = 0xFF) -> bool:
        """Whether the red zones between the rows are as `poison` left them."""
        inside = np.zeros(self.flat.shape, bool)
        for r in range(self.rows):
            inside[r * self.stride : r * self.stride + self.width] = True
        raw = self.flat.view(np.uint8).reshape(len(self.flat), -1)
        return bool((raw[~inside] == byte).all())
