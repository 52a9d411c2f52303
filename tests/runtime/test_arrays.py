"""Views of arrays: NumPy, DLPack with types NumPy itself refuses, and bindings of every kind of shape."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import dlpack
from kiln.runtime.arrays import ANY_CUDA, CPU, View, contiguous, described, view
from kiln.runtime.bind import Binder, Geometry, flat_view
from kiln.runtime.cpu import CpuDevice
from kiln.runtime.errors import ContractError
from kiln.runtime.manifest import parse_signature
from kiln.tests.runtime.trees import dim, scalar, signature, tensor

TYPES = {
    np.float64: "f64", np.float32: "f32", np.float16: "f16", ml_dtypes.bfloat16: "bf16", np.int32: "i32",
    ml_dtypes.float8_e4m3fn: "f8e4m3", ml_dtypes.float8_e5m2: "f8e5m2", np.uint8: "u8", np.int8: "i8",
    np.int16: "i16", np.uint32: "u32", np.int64: "i64", np.bool_: "bool",
}  # fmt: skip


@pytest.mark.parametrize(("numpy_type", "name"), TYPES.items())
def test_numpy(numpy_type: Any, name: str) -> None:
    x = np.zeros((3, 4), numpy_type)[:, 1:]
    v = view(x)
    assert v == View(x.ctypes.data, (3, 3), (4, 1), name, CPU, False, x)
    assert view(x) is not v
    made = CpuDevice(1).maker(x, (2, 5), name)(x, 0)
    assert (made.shape, made.dtype) == ((2, 5), np.dtype(numpy_type))
    assert made.ctypes.data % 64 == 0


def test_subclasses_and_read_only() -> None:
    x = np.zeros(3, np.float32).view(np.matrix)
    assert view(x).dtype == "f32"
    x.flags.writeable = False
    assert view(x).readonly


class Exported:
    """Only DLPack."""

    def __init__(self, x: Any, device: tuple[int, int] | None = None) -> None:
        self._x, self._device = x, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device or self._x.__dlpack_device__()


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32, np.int64, np.uint8, np.float16, np.bool_])
def test_dlpack(kind: Any) -> None:
    x = np.arange(24).astype(kind).reshape(2, 3, 4)[:, ::2]
    v = view(Exported(x))
    plain = view(x)
    assert v[:6] == plain[:6]


def test_dlpack_devices() -> None:
    x = np.zeros(3, np.float32)
    assert view(Exported(x, (2, 1))).device == 1
    assert view(Exported(x, (3, 0))).device == CPU
    with pytest.raises(ContractError, match="device type 8"):
        view(Exported(x, (8, 0)))
    with pytest.raises(ContractError, match="128 bits"):
        view(Exported(np.zeros(3, np.complex128)))


class Frozen:
    """An array that must not be written, exported as DLPack 1.0 has it, or as those before."""

    def __init__(self, x: Any, versioned: bool) -> None:
        self._x = x.copy()
        self._x.flags.writeable = False
        self._versioned = versioned

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        return self._x.__dlpack__(max_version=max_version if self._versioned else None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Old(Exported):
    """An export from before versions: it takes no options."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self._x.__dlpack__()


class Future(Exported):
    """An export of a version that nobody knows yet."""

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._x.__dlpack__(max_version=(1, 0))
        address = dlpack._pointer(capsule, b"dltensor_versioned")
        dlpack._Versioned.from_address(address).major = 2
        return capsule


def test_dlpack_versions() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for made in (Old(x), Exported(x)):
        assert view(made)[:6] == view(x)[:6]
    frozen = view(Frozen(x, True))
    assert frozen.readonly
    assert frozen.shape == (2, 3)
    with pytest.raises(ContractError, match="a Frozen that cannot be exported through DLPack"):
        view(Frozen(x, False))
    with pytest.raises(ContractError, match="DLPack export of version 2, expected at most 1"):
        view(Future(x))


def test_calls_on_arrays_of_other_frameworks(tree: Path) -> None:
    """What JAX and CuPy offer, in a call: inputs, outputs, in/out operands, memory that is read-only."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    total, out = np.ones_like(x), np.zeros_like(x)
    with kiln.load(tree) as lib:
        for made in (Exported(x), Old(x), Frozen(x, True)):
            assert np.array_equal(lib.negate(made), -x)
        lib.negate(Exported(x), out=Exported(out))
        assert np.array_equal(out, -x)
        lib.accumulate(Exported(x), Exported(total))
        assert np.array_equal(total, x + 1)
        with pytest.raises(ContractError, match="out is written but its array is read-only"):
            lib.negate(x, out=Frozen(x, True))
        with pytest.raises(ContractError, match="x: found a Frozen that cannot be exported"):
            lib.negate(Frozen(x, False))


def test_described() -> None:
    assert described((2, 3), "bf16").strides == (3, 1)
    with pytest.raises(ContractError, match="bf17"):
        described((2, 3), "bf17")
    assert contiguous((2, 0, 3)) == (3, 3, 1)


def binder(*operands: Any, device: int = CPU) -> Binder:
    returns = [o["name"] for o in operands if o.get("role") in ("out", "inout")]
    return Binder("op", parse_signature(signature(list(operands), returns)), device)


MN = [dim("M"), dim("N")]


def bound(b: Binder, *shapes: Any, scalars: tuple[Any, ...] = ()) -> Any:
    """Bind views given as (shape, strides, dtype) or shapes, inputs only."""
    views: list[View | None] = []
    for s in shapes:
        shape, strides, dtype = s if s and isinstance(s[0], tuple) else (s, contiguous(s), "f32")
        views.append(View(64, shape, strides, dtype, b.device, False, None))
    outs = [None] * (len(b.tensors) - len(views))
    return b.bind([*views, *outs], [None] * len(b.tensors), scalars, {})


def test_rows_scales_take_leading_dims() -> None:
    b = binder(tensor("x", "in", MN), tensor("scale", "in", [dim("M")]), tensor("y", "out", [dim("M")]))
    for shape, lead in (((6, 4), (6,)), ((2, 3, 4), (2, 3))):
        for scale in ((6,), lead, (*lead, 1)):
            result = bound(b, shape, scale)
            assert result.env.dims == {"M": 6, "N": 4}
            assert result.outputs[2].shape == lead
    with pytest.raises(ContractError, match=r"scale has shape \(3, 2\), expected \[M\]"):
        bound(b, (2, 3, 4), (3, 2))
    with pytest.raises(ContractError, match="a row of scale are 4 apart"):
        bound(b, (2, 3, 4), ((2, 3), (12, 4), "f32"))


def test_derived_extents() -> None:
    half = ["mul", 2, dim("N")]
    b = binder(
        tensor("x", "in", [dim("M"), half]),
        tensor("scale", "in", [dim("M"), ["cdiv", dim("N"), 16]], optional=True),
        tensor("y", "out", MN),
    )
    result = bound(b, (3, 40), (3, 2))
    assert result.env.dims == {"M": 3, "N": 20}
    assert result.outputs[2].shape == (3, 20)
    with pytest.raises(ContractError, match=r"x has extent 41, expected \(2 \* N\): a multiple of 2"):
        bound(b, (3, 41), (3, 2))
    with pytest.raises(ContractError, match=r"axis 1 of scale has extent 3, expected cdiv\(N, 16\) = 2"):
        bound(b, (3, 40), (3, 3))


def test_three_dims_and_layouts() -> None:
    shape = [dim("B"), dim("H"), dim("N")]
    b = binder(tensor("x", "in", shape, layout="dense"), tensor("y", "out", shape))
    result = bound(b, (2, 5, 3, 4))
    assert result.env.dims == {"B": 10, "H": 3, "N": 4}
    assert result.geometry[0] == Geometry((10, 3, 4), 4, 1, 4)
    with pytest.raises(ContractError, match="rows of x are 8 elements apart, expected 4"):
        bound(b, ((5, 3, 4), (24, 8, 1), "f32"))
    with pytest.raises(ContractError, match=r"x has shape \(3, 4\)"):
        bound(b, (3, 4))
    strided = binder(tensor("x", "in", MN, layout="strided"), tensor("y", "out", MN))
    assert bound(strided, ((3, 4), (1, 3), "f32")).env.colstrides["x"] == 3


def test_size_one_strides_do_not_matter() -> None:
    b = binder(tensor("x", "in", MN), tensor("y", "out", MN))
    for shape, strides in (
        ((1, 4), (99, 1)),
        ((1, 1, 4), (7, 99, 1)),
        ((3, 1), (1, 5)),
        ((1, 3, 4), (1, 4, 1)),
    ):
        assert bound(b, (shape, strides, "f32")).geometry[0].col == 1
    assert bound(b, ((1, 4), (99, 1), "f32")).env.strides["x"] == 4


def test_byte_codes_and_type_variables() -> None:
    t = {"var": "T", "choices": ["bf16", "f32"]}
    b = binder(tensor("q", "in", MN, "u8"), tensor("x", "in", MN, t), tensor("y", "out", MN, t))
    q = ((3, 4), (4, 1), "f8e4m3")
    result = bound(b, q, ((3, 4), (4, 1), "bf16"))
    assert result.env.dtypes == {"q": "u8", "x": "bf16", "y": "bf16"}
    with pytest.raises(ContractError, match="x is f16, expected one of bf16, f32"):
        bound(b, q, ((3, 4), (4, 1), "f16"))
    with pytest.raises(ContractError, match="q is i8, expected u8"):
        bound(b, ((3, 4), (4, 1), "i8"), (3, 4))
    only_out = binder(tensor("x", "in", MN), tensor("y", "out", MN, t))
    with pytest.raises(ContractError, match="no operand fixes the type of y"):
        bound(only_out, (3, 4))


def test_flat_views() -> None:
    v = View(64, (2, 3, 4), (60, 20, 1), "f32", ANY_CUDA, False, None)
    assert flat_view(v, Geometry((6, 4), 20, 1, 4))[1:3] == ((6, 4), (20, 1))
    assert flat_view(v, Geometry((2, 3, 4), 20, 1, 4))[1:3] == ((2, 3, 4), (60, 20, 1))
    assert flat_view(v._replace(shape=(2, 3), strides=(3, 1)), Geometry((6,), 1, 1, 4))[1:3] == ((6,), (1,))


def test_integer_scalars_bind_dims() -> None:
    b = binder(
        tensor("x", "in", MN),
        tensor("y", "out", [dim("M"), dim("K")]),
        scalar("k", "i32"),
        scalar("n", "f32"),
    )
    assert bound(b, (3, 4), scalars=(2, 0.5)).outputs[1].shape == (3, 2)
