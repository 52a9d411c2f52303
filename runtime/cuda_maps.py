"""Tensor maps of a launch, encoded by the host where the kernel takes them: once for an address.

The driver's function is called by its address, which takes 4.4 us of CPU time (on a driver that does
nothing). Through cuda.bindings it took 1.5, with all its arguments ready, but the map lay where Python's
allocator had put it, at multiples of 16 bytes, where the driver's documentation asks for 64. So maps are
kept: to find the three of a matrix product takes 2.1 us, to see that all addresses are the last call's 0.23.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kiln.runtime.entities import Kernel
from kiln.runtime.tensor_map import ALIGN, BYTES, SMALL_FIXED_IN, Tiled

if TYPE_CHECKING:
    from kiln.runtime.cuda import CudaDevice
    from kiln.runtime.cuda_launch import Record

_INVALID_CONTEXT = 201
_NOT_LARGE = ~(1 << 21)
"""What is kept of the second word of a small tensor's map: see SMALL."""
MAX_KEPT = 4096
"""Maps that a parameter keeps, of 128 bytes each; a workload with more addresses starts over."""

_Room = ctypes.c_char * (BYTES + ALIGN)

PROTOTYPE = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint,
    *(5 * [ctypes.c_void_p]),
    *(4 * [ctypes.c_int]),
)
"""cuTensorMapEncodeTiled: map, type, rank, address, extents, pitches, box, steps, interleave, swizzle,
promotion, fill. It computes, so that the interpreter's lock is kept."""


class _Made(NamedTuple):
    """A map: where it is, and the memory around it. Nobody writes it again."""

    where: int
    memory: Any


class _Map(NamedTuple):
    """A parameter that is a map, and those that were made for it, by address."""

    place: int
    """Where the record's table tells of it."""
    before: tuple[int, int]
    behind: tuple[int, ...]
    """What the driver is given before and behind the address."""
    small: bool
    arrays: tuple[Any, ...]
    """What `behind` points to."""
    kept: dict[int, _Made]


class Maps:
    """The tensor maps of a launcher."""

    def __init__(self, device: "CudaDevice", kernel: Kernel, maps: Sequence[tuple[int, int, Tiled]]) -> None:
        self._device, self._kernel = device, kernel
        self._maps = [_prepared(at, t) for at, _, t in maps]
        self._indices = [index for _, index, _ in maps]
        self._pick = _picker(self._indices)
        self._mend = device.driver_version <= SMALL_FIXED_IN
        self._lasting = self._mend or not any(m.small for m in self._maps)
        """Later drivers make a small tensor's map for the allocation that the address is in."""

    def via(self, order: Sequence[int]) -> "Maps":
        """The same for addresses that are still to be brought in order."""
        other = object.__new__(Maps)
        other.__dict__.update(self.__dict__, _pick=_picker([order[i] for i in self._indices]))
        return other

    def point(self, record: "Record", pointers: Sequence[int]) -> None:
        """Let a record's table lead to the maps of these addresses.

        Raises:
            DriverError: the driver refuses.
        """
        addresses = self._pick(pointers)
        if addresses == record.mapped and self._lasting:
            return
        made = list(map(self._map_of, self._maps, addresses))
        for m, there in zip(self._maps, made, strict=True):
            _pack_address(record.buffer, m.place, there.where)
        record.mapped, record.maps = addresses, made

    def _map_of(self, m: _Map, address: int) -> _Made:
        found = m.kept.get(address)
        if found is None:
            found = self._make(m, address)
            if self._mend or not m.small:
                if len(m.kept) >= MAX_KEPT:
                    m.kept.clear()
                m.kept[address] = found
        return found

    def _make(self, m: _Map, address: int) -> _Made:
        memory = _Room()
        where = -(-ctypes.addressof(memory) // ALIGN) * ALIGN
        driver = self._device.driver
        encode: Callable[..., int] | None = driver.encode
        assert encode is not None, "CudaDevice.refusal"
        status = encode(where, *m.before, address, *m.behind)
        if status == _INVALID_CONTEXT:
            with self._device.current():
                status = encode(where, *m.before, address, *m.behind)
        if status:
            who = f"{self._kernel.op}.{self._kernel.variant}"
            driver.refuse(f"{who}: cuTensorMapEncodeTiled", driver.module.CUresult(status))
        if m.small and self._mend:
            word = ctypes.c_int64.from_address(where + 8)
            word.value &= _NOT_LARGE
        return _Made(where, memory)


_pack_address = struct.Struct("=Q").pack_into


def _picker(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    # A single index gives an item.
    return itemgetter(*indices) if len(indices) > 1 else lambda pointers: (pointers[indices[0]],)


def _prepared(at: int, t: Tiled) -> _Map:
    rank = len(t.extents)
    arrays = (
        (ctypes.c_uint64 * rank)(*t.extents), (ctypes.c_uint64 * rank)(*t.pitches),
        (ctypes.c_uint32 * rank)(*t.box), (ctypes.c_uint32 * rank)(*(rank * [1])),
    )  # fmt: skip
    behind = (*(ctypes.addressof(a) for a in arrays), t.interleave, t.swizzle, t.promotion, t.fill)
    return _Map(8 * at, (t.element, rank), behind, t.small, arrays, {})
