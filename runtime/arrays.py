"""Arrays of any framework as one small view: where the data is, its shape, strides, element type and device.

NumPy arrays, torch tensors, `__cuda_array_interface__` and DLPack are understood, by what an object offers
and not by
importing its framework. Nothing is copied and nothing is synchronized: work on other streams is the caller's
to order.
"""

import sys
from collections.abc import Callable
from math import prod
from operator import methodcaller
from typing import Any, NamedTuple, cast

import numpy as np

from kiln.runtime.dtypes import DTYPES, NUMPY_NAMES
from kiln.runtime.errors import ContractError

CPU = -1
"""The `device` of memory that the CPU owns; CUDA devices are their ordinals."""
ANY_CUDA = -2
"""A CUDA array that does not tell its device."""

TORCH_TYPES: set[type] = set()
"""The types seen so far that quack like torch tensors; a subclass such as Parameter is a type of its own."""


class View(NamedTuple):
    """An array as kernels see it.

    Attributes:
        ptr: address of the first element.
        shape: extents.
        strides: in elements, one per extent.
        dtype: Kiln's name of the element type.
        device: CPU, ANY_CUDA or a CUDA ordinal.
        readonly: whether writing is forbidden.
        owner: what keeps the memory alive.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    readonly: bool
    owner: object


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def described(shape: tuple[int, ...], dtype: str, device: int = CPU) -> View:
    """A view of no memory: dense, aligned, good for asking what a call would do."""
    if dtype not in DTYPES:
        raise ContractError(f"found the element type {dtype!r}, expected one of {', '.join(DTYPES)}.")
    return View(0, shape, contiguous(shape), dtype, device, False, None)


def view(x: Any) -> View:
    """The view of an array object.

    Raises:
        ContractError: no array that this runtime understands, or a type, byte order or layout no kernel
            takes.
    """
    adapter = _ADAPTERS.get(type(x))
    if adapter is None:
        adapter = _ADAPTERS[type(x)] = _adapter(x)
        if adapter is _torch:
            TORCH_TYPES.add(type(x))
    return adapter(x)


def is_torch(x: Any) -> bool:
    """Whether `x` quacks like a torch tensor."""
    return type(x) in TORCH_TYPES


def _adapter(x: Any) -> Callable[[Any], View]:
    if isinstance(x, View):
        return lambda v: cast(View, v)
    if isinstance(x, np.ndarray):
        return _numpy
    kind = type(x)
    if all(
        hasattr(x, name)
        for name in ("data_ptr", "stride", "is_contiguous", "is_cuda", "is_cpu", "get_device", "new_empty")
    ):
        return _torch
    if hasattr(x, "__kiln_view__"):
        return lambda v: cast(View, v.__kiln_view__())
    if hasattr(kind, "__cuda_array_interface__") or hasattr(x, "__cuda_array_interface__"):
        return _cuda_interface
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _dlpack
    raise ContractError(
        f"found an object of type {kind.__name__}, expected an array: NumPy, torch, DLPack or "
        "__cuda_array_interface__."
    )


_np_types: dict[Any, str] = {}


def _np_type(dtype: "np.dtype[Any]") -> str:
    found = NUMPY_NAMES.get(dtype.name)
    if found is None or not dtype.isnative:
        order = "" if dtype.isnative else " of the other byte order"
        raise ContractError(
            f"found an array of {dtype.name}{order}, expected one of {', '.join(NUMPY_NAMES)} in "
            "native byte order."
        )
    _np_types[dtype] = found
    return found


def _numpy(x: "np.ndarray[Any, Any]") -> View:
    dtype = x.dtype
    name = _np_types.get(dtype) or _np_type(dtype)
    ptr, readonly = x.__array_interface__["data"]
    return View(ptr, x.shape, _in_elements(x.strides, dtype.itemsize), name, CPU, readonly, x)


_steps: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}


def _in_elements(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    found = _steps.get((strides, size))
    if found is not None:
        return found
    if any(s % size for s in strides):
        raise ContractError(
            f"found strides of {strides} bytes, expected multiples of the element's {size}; copy the array."
        )
    if len(_steps) >= 4096:
        _steps.clear()
    found = _steps[strides, size] = tuple(s // size for s in strides)
    return found


_torch_types: dict[Any, str] = {}


def _torch_type(dtype: Any) -> str:
    found = NUMPY_NAMES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ContractError(f"found a tensor of {dtype}, expected one of {', '.join(NUMPY_NAMES)}.")
    _torch_types[dtype] = found
    return found


def _torch(x: Any) -> View:
    dtype = x.dtype
    name = _torch_types.get(dtype) or _torch_type(dtype)
    if x.is_cuda:
        where = x.get_device()
    elif x.is_cpu:
        where = CPU
    else:
        raise ContractError(f"found a tensor on device {x.device}, expected cpu or cuda; move it there.")
    try:
        return View(x.data_ptr(), tuple(x.shape), x.stride(), name, where, False, x)
    except RuntimeError as e:
        # Sparse, nested, or inside of a transformation such as vmap.
        raise ContractError(
            f"found a tensor without plain memory ({str(e).partition(chr(10))[0]}), expected a dense one; "
            "convert it, or call outside of transformations."
        ) from None


def _cuda_interface(x: Any) -> View:
    face = getattr(x, "__cuda_array_interface__", None)
    if face is None:
        # JAX offers the interface for the types that it can name, DLPack for all.
        return _dlpack(x)
    if face.get("mask") is not None:
        raise ContractError("found a masked array, expected a plain one; fill the mask first.")
    try:
        dtype = np.dtype(face["typestr"])
    except TypeError:
        raise ContractError(f"found the element type {face['typestr']!r}, expected a numeric one.") from None
    name = _np_types.get(dtype) or _np_type(dtype)
    shape = tuple(face["shape"])
    strides = face.get("strides")
    steps = contiguous(shape) if strides is None else _in_elements(tuple(strides), dtype.itemsize)
    ptr, readonly = face["data"]
    where = getattr(getattr(x, "device", None), "id", ANY_CUDA)
    where = where if type(where) is int else ANY_CUDA
    return View(ptr or 0, shape, steps, name, where, readonly or immutable(x), x)


def immutable(x: Any) -> bool:
    """Whether an array is JAX's, which never change: others may share their memory, and its exports do not
    say that it is read-only."""
    return type(x).__module__.partition(".")[0] == "jaxlib"


def _dlpack(x: Any) -> View:
    if not hasattr(x, "__dlpack__"):
        raise ContractError(
            f"found a {type(x).__name__} that offers no memory, expected an array on this device."
        )
    from kiln.runtime.dlpack import read_capsule

    return read_capsule(x)


_ADAPTERS: dict[type, Callable[[Any], View]] = {np.ndarray: _numpy, View: lambda v: cast(View, v)}


def torch_maker(example: Any, shape: tuple[int, ...], dtype: str) -> Callable[[Any], Any]:
    """A function that makes uninitialized torch tensors beside others like `example`."""
    torch = sys.modules["torch"]
    kind = getattr(torch, next(n for n, kiln in NUMPY_NAMES.items() if kiln == dtype))
    if example.dtype != kind:
        return methodcaller("new_empty", shape, dtype=kind)
    if (tuple(example.shape), tuple(example.stride())) != (shape, contiguous(shape)):
        return methodcaller("new_empty", shape)
    # Half the time of new_empty: nothing is parsed.
    made: Callable[[Any], Any] = torch.empty_like
    return made


def writable_bytes(x: Any, device: int) -> tuple[int, int]:
    """(address, bytes) of a dense array on a device that may be written.

    Raises:
        ContractError: it is not.
    """
    v = view(x)
    if v.device != device or v.strides != contiguous(v.shape) or v.readonly:
        raise ContractError(
            f"found an array with shape {v.shape}, strides {v.strides} on device {v.device}"
            f"{', read-only' if v.readonly else ''}; expected a dense one on device {device} to write to."
        )
    return v.ptr, prod(v.shape) * DTYPES[v.dtype]


_ALIGN = 64


def aligned_bytes(count: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Uninitialized CPU memory that starts on a cache line."""
    raw = np.empty(count + _ALIGN, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGN
    return raw[start : start + count]
