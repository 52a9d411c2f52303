"""Tensor maps that the host makes: what a manifest may ask for, what a call must keep, and the numbers that
cuTensorMapEncodeTiled takes.

A kernel takes such a map by value, 128 bytes that tell the copy engine (TMA) how to walk an operand. Every
rule of the driver for it is checked here, so that a call which breaks one is told before the driver sees it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kiln.runtime.dtypes import DTYPES
from kiln.runtime.entities import Param, TensorMap
from kiln.runtime.expr import Env, compile_expr
from kiln.runtime.targets import capability

BYTES, ALIGN = 128, 64
"""Of a map, as a parameter and in memory."""
FIRST_SM = 90
"""The least compute capability that has them."""
MAX_RANK, MAX_EXTENT, MAX_PITCH = 5, 1 << 32, 1 << 40
"""Dimensions; elements along one, at most; bytes between its neighbours, less than."""

ELEMENTS = {
    "u8": 0, "i8": 0, "bool": 0, "f8e4m3": 0, "f8e5m2": 0, "i16": 1, "u32": 2, "i32": 3, "i64": 5, "f16": 6,
    "f32": 7, "f64": 8, "bf16": 9,
}  # fmt: skip
"""Kiln element type -> the driver's CUtensorMapDataType; bytes are bytes to it."""
_FLOATS = frozenset({"f16", "f32", "f64", "bf16"})
SWIZZLES = {"none": 0, "32b": 1, "64b": 2, "128b": 3}
INTERLEAVES = {"none": 0, "16b": 1, "32b": 2}
PROMOTIONS = {"none": 0, "64b": 1, "128b": 2, "256b": 3}
FILLS = {"zeros": 0, "nan": 1}
"""The driver's enumerations, in its order."""

SMALL, SMALL_FIXED_IN = 128 << 10, 13010
"""A map may let the copy engine touch so many bytes behind the address (CU_TENSOR_MAP_ALLOC_CLASS_LARGE).
Drivers up to that version always do, so that the bit is cleared for tensors of fewer bytes, as CUTLASS and
Triton do; later ones look at the allocation that the address is in."""


class Tiled(NamedTuple):
    """What cuTensorMapEncodeTiled is given for a call's shape, all but the address; innermost first.

    Attributes:
        element: CUtensorMapDataType.
        extents: elements.
        pitches: bytes between neighbours, of all dimensions but the innermost.
        box: elements that one copy takes.
        interleave, swizzle, promotion, fill: the driver's numbers.
        small: fewer than SMALL bytes from the first to the last element.
    """

    element: int
    extents: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    interleave: int
    swizzle: int
    promotion: int
    fill: int
    small: bool


def alignment(m: TensorMap) -> int:
    """What addresses, and strides in bytes, must be multiples of."""
    return 32 if m.interleave == "32b" else 16


def faults(p: Param, m: TensorMap, target: str) -> Iterator[str]:
    """Every rule of the driver that a manifest's tensor map breaks, whatever the call."""
    rank, size = len(m.box), DTYPES[p.dtype]
    if target.startswith("cpu-") or capability(target)[0] * 10 + capability(target)[1] < FIRST_SM:
        yield f"param {p.name} is a tensor map, which {target} has not; expected sm_{FIRST_SM} or later."
    if not len(m.shape) == len(m.strides) + 1 == rank:
        yield (
            f"param {p.name} has {len(m.shape)} extents, {len(m.strides)} strides and a box of {rank}; "
            "expected a stride less, the innermost being 1."
        )
    if m.interleave != "none" and rank < 3:
        yield f"param {p.name} is interleaved and has {rank} dimensions; expected 3 and more."
    if m.interleave == "32b" and m.swizzle != "32b":
        yield f"param {p.name} is interleaved by 32 bytes with another swizzle; expected 32b."
    inner = m.box[-1] * size
    if m.interleave == "none" and inner % 16:
        yield f"param {p.name} copies rows of {inner} bytes; expected a multiple of 16."
    if m.interleave == "none" and m.swizzle != "none" and inner > int(m.swizzle[:-1]):
        yield (
            f"param {p.name} copies rows of {inner} bytes, which its swizzle does not hold; expected no more "
            f"than {m.swizzle[:-1]}."
        )
    if m.fill == "nan" and p.dtype not in _FLOATS:
        yield f"param {p.name} fills {p.dtype} with NaN; expected a type that the copy engine knows as one."


def why_not(p: Param, m: TensorMap, env: Env) -> str | None:
    """Which rule of the driver a call breaks: presence, extents, strides. Type and address are checked as a
    pointer's."""
    if p.operand not in env.dtypes:
        return f"needs {p.operand} present"
    for e in m.shape:
        n = compile_expr(e)(env)
        if type(n) is not int or not 1 <= n <= MAX_EXTENT:
            return f"maps {p.operand} with an extent of {n}, expected 1 to {MAX_EXTENT}"
    unit, size = alignment(m), DTYPES[p.dtype]
    for e in m.strides:
        n = compile_expr(e)(env)
        if type(n) is not int or not 0 <= n < MAX_PITCH // size or n * size % unit:
            return (
                f"maps {p.operand} with a stride of {n}, expected a multiple of {unit // size or 1} below "
                f"{MAX_PITCH // size}"
            )
    return None


def tiled(p: Param, m: TensorMap, env: Env) -> Tiled:
    """The driver's arguments for a call that keeps the rules."""
    size = DTYPES[p.dtype]
    extents = _inwards([compile_expr(e)(env) for e in m.shape])
    pitches = _inwards([compile_expr(e)(env) * size for e in m.strides])
    last = sum((n - 1) * pitch for n, pitch in zip(extents, (size, *pitches), strict=True))
    return Tiled(
        ELEMENTS[p.dtype], extents, pitches, _inwards(m.box), INTERLEAVES[m.interleave],
        SWIZZLES[m.swizzle], PROMOTIONS[m.l2], FILLS[m.fill], last + 1 < SMALL,
    )  # fmt: skip


def _inwards(outermost_first: Sequence[int]) -> tuple[int, ...]:
    return tuple(reversed(outermost_first))
