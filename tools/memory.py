"""The memory of a test call: all operands in one poisoned block with red zones, so that one comparison of
bytes tells whether anything else was written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import numpy as np

from kiln.runtime.arrays import View, aligned_bytes
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.device import Device
from kiln.runtime.dtypes import DTYPES, NUMPY_NAMES, numpy_dtype
from kiln.tools.cases import PAGE, Case, Slot

Array: TypeAlias = np.ndarray[Any, Any]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

POISONS = (0xFF, 0x3C)
"""What memory holds before the first and the second run: NaN in every float type, then a small number, so
that an output that is never written cannot pass for an expected NaN."""


def typed(block: Bytes, slot: Slot, dtype: str | None = None) -> Array:
    """An operand inside a block."""
    kind = numpy_dtype(dtype or slot.dtype)
    steps = tuple(s * kind.itemsize for s in slot.strides)
    return np.ndarray(slot.shape, kind, block.data, slot.offset, steps)


def staged(case: Case, inputs: Mapping[str, Array], poison: int) -> Bytes:
    """The block before the call."""
    block = np.full(case.bytes, poison, np.uint8)
    for s in case.slots:
        if s.tensor.role != "out":
            typed(block, s)[...] = inputs[s.tensor.name]
    return block


def written_mask(case: Case) -> Bytes:
    """1 for every byte that the call may write."""
    mask = np.zeros(case.bytes, np.uint8)
    for s in case.slots:
        if s.tensor.role != "in" and 0 not in s.shape:
            size = DTYPES[s.dtype]
            shape, steps = (*s.shape, size), (*(n * size for n in s.strides), 1)
            np.ndarray(shape, np.uint8, mask.data, s.offset, steps)[...] = 1
    return mask


class Rig(Protocol):
    """A place for the memory of calls on a device."""

    kind: str
    """What operands are."""

    def put(self, case: Case, block: Bytes) -> dict[str, Any]:
        """Copy a block to the device; its operands by name."""

    def get(self, size: int) -> Bytes:
        """The block as the device left it."""


class HostRig:
    """Operands as NumPy arrays."""

    kind = "NumPy arrays"

    def __init__(self, margin: int = 0) -> None:
        """`margin`: bytes on both sides that stray writes may hit without harm to the process."""
        self._block = np.empty(0, np.uint8)
        self._margin = (margin + PAGE - 1) // PAGE * PAGE

    def put(self, case: Case, block: Bytes) -> dict[str, Any]:
        """See Rig.put."""
        raw = aligned_bytes(case.bytes + PAGE + 2 * self._margin)
        start = self._margin + -raw.ctypes.data % PAGE
        self._block = raw[start : start + case.bytes]
        self._block[:] = block
        return {s.tensor.name: typed(self._block, s) for s in case.slots}

    def get(self, size: int) -> Bytes:
        """See Rig.get."""
        return self._block


class DriverRig:
    """Operands as views of memory from the driver, where PyTorch is not installed."""

    kind = "device memory"

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pointer = self._size = 0

    def put(self, case: Case, block: Bytes) -> dict[str, Any]:
        """See Rig.put."""
        call = self._device.driver.call
        with self._device.current():
            if case.bytes > self._size:
                if self._pointer:
                    call("cuMemFree", self._pointer)
                self._size = case.bytes
                self._pointer = int(call("cuMemAlloc", self._size))
            call("cuMemcpyHtoD", self._pointer, block.ctypes.data, case.bytes)
        return {s.tensor.name: self._view(s) for s in case.slots}

    def _view(self, s: Slot) -> View:
        return View(self._pointer + s.offset, s.shape, s.strides, s.dtype, self._device.ordinal, False, self)

    def get(self, size: int) -> Bytes:
        """See Rig.get."""
        block = np.empty(size, np.uint8)
        with self._device.current():
            self._device.driver.call("cuMemcpyDtoH", block.ctypes.data, self._pointer, size)
        return block


class TorchRig:
    """Operands as PyTorch tensors."""

    kind = "torch tensors"

    def __init__(self, torch: Any, ordinal: int) -> None:
        self._torch = torch
        self._device = torch.device("cuda", ordinal)
        self._block: Any = None

    def put(self, case: Case, block: Bytes) -> dict[str, Any]:
        """See Rig.put."""
        self._block = self._torch.from_numpy(block).to(self._device)
        return {s.tensor.name: self._tensor(s) for s in case.slots}

    def _tensor(self, s: Slot) -> Any:
        name = next(n for n, kiln in NUMPY_NAMES.items() if kiln == s.dtype)
        raw = self._block[s.offset : s.offset + s.extent].view(getattr(self._torch, name))
        return self._torch.as_strided(raw, s.shape, s.strides)

    def get(self, size: int) -> Bytes:
        """See Rig.get."""
        found: Bytes = self._block.cpu().numpy()
        return found


def rig_for(device: Device) -> Rig:
    """Torch tensors where PyTorch can be imported, else the driver's memory; NumPy arrays on the CPU."""
    if not isinstance(device, CudaDevice):
        return HostRig()
    try:
        torch = import_module("torch")
    except ImportError:
        return DriverRig(device)
    if not torch.cuda.is_available():
        return DriverRig(device)
    return TorchRig(torch, device.ordinal)
