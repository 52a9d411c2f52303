"""Reading DLPack capsules, bf16 and FP8 included, which NumPy's own importer refuses."""

import ctypes
from typing import Any, ClassVar

from kiln.runtime.arrays import CPU, View, contiguous, immutable
from kiln.runtime.errors import ContractError


class DLTensor(ctypes.Structure):
    """DLTensor: the leading part of a DLManagedTensor."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, of DLPack 1.0 and later."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


_TYPES = {
    (0, 8): "i8", (0, 16): "i16", (0, 32): "i32", (0, 64): "i64",
    (1, 8): "u8", (1, 32): "u32",
    (2, 16): "f16", (2, 32): "f32", (2, 64): "f64",
    (4, 16): "bf16", (6, 8): "bool", (10, 8): "f8e4m3", (12, 8): "f8e5m2",
}  # fmt: skip
"""(DLDataTypeCode, bits) -> Kiln element type."""

_CPU_KINDS = (1, 3)
_CUDA_KINDS = (2, 13)
_DEFAULT_STREAM = 1
"""What DLPack calls the legacy default stream: the exporter makes its pending work visible there."""

_MAX_VERSION = (1, 1)
_READ_ONLY = 1
"""A flag of a versioned export."""

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def read_capsule(x: Any) -> View:
    """The view of an object with `__dlpack__`; it owns the capsule, which frees the export when it goes.

    Raises:
        ContractError: a device or element type no kernel takes, or an export that its framework refuses.
    """
    kind, ordinal = x.__dlpack_device__()
    if kind not in _CPU_KINDS + _CUDA_KINDS:
        raise ContractError(f"found a DLPack array on device type {kind}, expected CPU or CUDA memory.")
    capsule = _export(x, {"stream": _DEFAULT_STREAM} if kind in _CUDA_KINDS else {})
    t, readonly = _tensor(capsule)
    dtype = _TYPES.get((t.code, t.bits))
    if dtype is None or t.lanes != 1:
        raise ContractError(
            f"found a DLPack array of type code {t.code}, {t.bits} bits, {t.lanes} lanes; "
            f"expected one of {', '.join(sorted(set(_TYPES.values())))}."
        )
    shape = tuple(t.shape[: t.ndim])
    strides = tuple(t.strides[: t.ndim]) if t.strides else contiguous(shape)
    where = ordinal if kind in _CUDA_KINDS else CPU
    readonly = readonly or immutable(x)
    return View((t.data or 0) + t.byte_offset, shape, strides, dtype, int(where), readonly, (x, capsule))


def _export(x: Any, options: dict[str, Any]) -> Any:
    try:
        try:
            return x.__dlpack__(max_version=_MAX_VERSION, **options)
        except TypeError:
            # Written before DLPack 1.0.
            return x.__dlpack__(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise ContractError(
            f"found a {type(x).__name__} that cannot be exported through DLPack ({e}); pass a plain array."
        ) from e


def _tensor(capsule: Any) -> tuple[DLTensor, bool]:
    """The tensor of an export, and whether it must not be written."""
    if not _is_valid(capsule, b"dltensor_versioned"):
        return DLTensor.from_address(_pointer(capsule, b"dltensor")), False
    whole = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
    if whole.major > _MAX_VERSION[0]:
        raise ContractError(
            f"found a DLPack export of version {whole.major}, expected at most {_MAX_VERSION[0]}."
        )
    return whole.tensor, bool(whole.flags & _READ_ONLY)
