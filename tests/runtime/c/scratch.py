"""The scratch memory of a library that libkiln opened, with the calls of the Python runtime."""

import ctypes
from typing import Any

from kiln.runtime.scratch import Counters

COUNTED = ("blocks", "bytes", "hits", "growths", "fills")


class ScratchCounters(ctypes.Structure):
    """kiln_scratch_counters"""

    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTED)


class Scratch:
    """The scratch memory of a library."""

    def __init__(self, owner: Any, is_zeroed: bool = False) -> None:
        self.owner, self.is_zeroed = owner, is_zeroed

    @property
    def zeroed(self) -> "Scratch":
        """What is all zeros between launches."""
        return Scratch(self.owner, True)

    @property
    def counters(self) -> Counters:
        """kiln_scratch_stats of one kind."""
        found = ScratchCounters()
        self.owner.c.kiln_scratch_stats(self.owner.handle, self.is_zeroed, ctypes.byref(found))
        return Counters(**{name: int(getattr(found, name)) for name in COUNTED})

    def release(self, stream: int) -> None:
        """kiln_release_scratch"""
        self.owner.call("kiln_release_scratch", self.owner.handle, stream or None)
