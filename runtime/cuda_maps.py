"""Tensor maps of a launch, encoded by the host where the kernel takes them: in a record's own memory, again
only where an address has changed.

The driver's function is called by its address. Through cuda.bindings a map took ENC_B us of CPU time instead
of ENC_A (on a driver that does nothing), and lay where Python's allocator had put it: at multiples of 16
bytes, where the driver's documentation asks for 64. The driver's own part is arithmetic on 128 bytes.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kiln.runtime.entities import Kernel
from kiln.runtime.tensor_map import ALIGN, BYTES, SMALL_FIXED_IN, Tiled

if TYPE_CHECKING:
    from kiln.runtime.cuda import CudaDevice
    from kiln.runtime.cuda_launch import Record

_INVALID_CONTEXT = 201
_SMALL_BIT = ctypes.c_uint64(~(1 << 21)).value
"""What is kept of the second word of a small tensor's map: see SMALL."""

Encode = Callable[..., int]
PROTOTYPE = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *(5 * [ctypes.c_void_p]), *(4 * [ctypes.c_int])
)
"""cuTensorMapEncodeTiled: map, type, rank, address, extents, pitches, box, steps, interleave, swizzle,
promotion, fill. It computes, so that the interpreter's lock is kept."""


class _Map(NamedTuple):
    """A parameter's map: where its address is among the parameters and in a call's pointers, and what the
    driver is given before and behind the address."""

    at: int
    index: int
    before: tuple[int, int]
    behind: tuple[int, ...]
    mend: bool
    kept: tuple[Any, ...]
    """The arrays that `behind` points to."""


class Maps:
    """The tensor maps of a launcher."""

    def __init__(self, device: "CudaDevice", kernel: Kernel, maps: Sequence[tuple[int, int, Tiled]]) -> None:
        mend = device.driver_version <= SMALL_FIXED_IN
        self._device, self._kernel = device, kernel
        self._maps = [_prepared(at, index, t, mend and t.small) for at, index, t in maps]

    def via(self, order: Sequence[int]) -> "Maps":
        """The same for addresses that are still to be brought in order."""
        other = Maps(self._device, self._kernel, ())
        other._maps = [m._replace(index=order[m.index]) for m in self._maps]
        return other

    def place(self, record: "Record") -> None:
        """Give a record memory for its maps, and tell its table where they are."""
        room = (ctypes.c_char * (BYTES * len(self._maps) + ALIGN))()
        first = -(-ctypes.addressof(room) // ALIGN) * ALIGN
        table = (ctypes.c_uint64 * len(record.values)).from_buffer(record.buffer)
        for i, m in enumerate(self._maps):
            table[m.at] = first + BYTES * i
        record.maps = room, table

    def encode(self, record: "Record", pointers: Sequence[int]) -> None:
        """Bring the record's maps to these addresses.

        Raises:
            DriverError: the driver refuses.
        """
        values = record.values
        for m in self._maps:
            address = pointers[m.index]
            # The place of the parameter's value, which the map is not in, holds the address it was made for.
            if values[m.at] != address:
                values[m.at] = 0
                self._encode(m, record.maps[1][m.at], address)
                values[m.at] = address

    def _encode(self, m: _Map, where: int, address: int) -> None:
        encode: Any = self._device.driver.encode
        status = encode(where, *m.before, address, *m.behind)
        if status == _INVALID_CONTEXT:
            with self._device.current():
                status = encode(where, *m.before, address, *m.behind)
        if status:
            driver, k = self._device.driver, self._kernel
            driver.refuse(
                f"{k.op}.{k.variant}: cuTensorMapEncodeTiled", driver.module.CUresult(status)
            )
        if m.mend:
            word = ctypes.c_uint64.from_address(where + 8)
            word.value &= _SMALL_BIT


def _prepared(at: int, index: int, t: Tiled, mend: bool) -> _Map:
    rank = len(t.extents)
    arrays = (
        (ctypes.c_uint64 * rank)(*t.extents), (ctypes.c_uint64 * rank)(*t.pitches),
        (ctypes.c_uint32 * rank)(*t.box), (ctypes.c_uint32 * rank)(*(rank * [1])),
    )  # fmt: skip
    how = (t.interleave, t.swizzle, t.promotion, t.fill)
    return _Map(at, index, (t.element, rank), (*map(ctypes.addressof, arrays), *how), mend, arrays)
