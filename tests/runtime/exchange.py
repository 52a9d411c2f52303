"""Stand-ins for torch tensors whose type offers DLPack's table of C functions, made with ctypes."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from kiln.runtime.dlpack import DLTensor
from kiln.tests.runtime.test_cuda import Tensor

STREAM = 0x77
"""The stream that is current."""


Read = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
Stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))


class Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("managed", ctypes.c_void_p * 3),
        ("read", Read),
        ("stream", Stream),
    ]


class Hooks:
    """What tests put between a call and its arrays."""

    before_read: Callable[[], Any] | None = None
    fails = False


def _read(x: Any, into: Any) -> int:
    if Hooks.before_read is not None:
        Hooks.before_read()
    if Hooks.fails:
        return -1
    t = into.contents
    rank = len(x.shape)
    x.kept = ((ctypes.c_int64 * rank)(*x.shape), (ctypes.c_int64 * rank)(*x.stride()))
    t.data, t.byte_offset, t.ndim = x.data_ptr() - 16 if x.data_ptr() else 0, 16 if x.data_ptr() else 0, rank
    t.device_type, t.device_id, t.lanes = 1 if x.is_cpu else 2, 0, 1
    t.code, t.bits = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32)}[x.dtype]
    t.shape, t.strides = x.kept
    return 0


def _stream(kind: int, ordinal: int, into: Any) -> int:
    into[0] = STREAM + ordinal
    return 0


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
NAME = b"dlpack_exchange_api"
TABLE = Exchange(1, 2, None, (ctypes.c_void_p * 3)(), Read(_read), Stream(_stream))


def capsule(table: Exchange) -> Any:
    """What a type offers; the table must live as long as the process."""
    return new_capsule(ctypes.addressof(table), NAME, None)


class Exchanged(Tensor):
    """A tensor that C reads."""

    __dlpack_c_exchange_api__ = capsule(TABLE)

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> "Exchanged":
        return Exchanged(shape, dtype, ptr=2 << 20)


class Wide(Exchanged):
    """A tensor whose rows are part of wider ones, `step` elements apart; of a table of its own."""

    __dlpack_c_exchange_api__ = capsule(TABLE)

    def __init__(self, shape: tuple[int, ...], step: int, ptr: int = 1 << 20) -> None:
        super().__init__(shape, ptr=ptr)
        self._step = step

    def stride(self) -> tuple[int, ...]:
        return (self._step, 1)

    def is_contiguous(self) -> bool:
        return self._step == self.shape[-1]


class Strided(Exchanged):
    """A type that derives from one C reads, which says nothing of how it is read itself."""

    def stride(self) -> tuple[int, ...]:
        return (2 * self.shape[-1], 1)

    def is_contiguous(self) -> bool:
        return False


def stand_in() -> Any:
    """Something that passes for the package torch."""
    return SimpleNamespace(
        bfloat16="bfloat16",
        float32="float32",
        empty_like=lambda x: x.new_empty(x.shape, x.dtype),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda d: STREAM + d),
    )
