"""What a test call must give: the declaration run in NumPy, and the comparison with what a kernel wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kiln.ir import interpret
from kiln.ir.dtypes import DTYPES, DType
from kiln.ir.spec import DTypeVar, Op, Tensor
from kiln.runtime.entities import Contract
from kiln.tools.cases import Case

Array: TypeAlias = np.ndarray[Any, Any]

IDEAL_EPS = 8.0
"""How far the exact bits may be from float64, in epsilons of the coarsest type of the call, relative to the
larger of the element and the root mean square of all."""
IDEAL_SHARE = 0.99
"""The part of the elements for which that holds: a scale that rounds the other way moves a whole group."""


def types_of(op: Op, case: Case) -> dict[str, DType]:
    """The op's type variables in a call."""
    given = {s.tensor.name: DTYPES[s.dtype] for s in case.slots}
    return {
        t.dtype.name: given[t.name] for t in op.tensors if isinstance(t.dtype, DTypeVar) and t.name in given
    }


def expected(op: Op, case: Case, inputs: Mapping[str, Array], ideal: bool = False) -> dict[str, Array]:
    """Every output of a call by name, in the shape that its operand has.

    `ideal` gives float64 values, for ops with a body alone; swizzled scales stay linear then.
    """
    scalars = {s.name: case.scalars[s.name] for s in op.scalars}
    if op.body is None and op.steps is None:
        if op.reference is None:
            raise LookupError(f"{op.name} has neither a body nor a reference; nothing says what is right")
        absent = dict.fromkeys(t.name for t in op.inputs if t.name not in inputs)
        given = op.reference(**inputs, **absent, **scalars, **case.attrs)
        results = tuple(_stored(t, r, case) for t, r in zip(op.outputs, given, strict=True))
    else:
        types = types_of(op, case)
        results = interpret.run(op, {**inputs, **scalars}, attrs=case.attrs, dtypes=types, ideal=ideal)
    present = {s.tensor.name: s for s in case.slots}
    named = {
        t.name: r for t, r in zip(op.outputs, results, strict=True) if r is not None and t.name in present
    }
    if not ideal:
        for t in op.outputs:
            if t.layout == "nvfp4_128x4":
                named[t.name] = swizzled(named[t.name], present[t.name].shape)
    return {
        n: r.reshape(present[n].shape) if r.size == np.prod(present[n].shape) else r for n, r in named.items()
    }


def _stored(t: Tensor, result: Array | None, case: Case) -> Array | None:
    """A reference's result in the type that the call's operand has, where calls choose it."""
    kind = next((s.dtype for s in case.slots if s.tensor.name == t.name), None)
    if result is None or kind is None or not isinstance(t.dtype, DTypeVar):
        return result
    with np.errstate(over="ignore"):
        return result.astype(DTYPES[kind].numpy, copy=False)


def swizzled(linear: Array, shape: tuple[int, ...]) -> Array:
    """Scales (rows, groups) in 128x4 blocks of the padded shape; every byte of padding is 0."""
    rows, groups = linear.shape
    blocks = shape[1] // 4
    m, k = np.arange(rows)[:, None], np.arange(groups)[None, :]
    offset = ((m // 128 * blocks + k // 4) * 32 + m % 32) * 16 + m % 128 // 32 * 4 + k % 4
    out = np.zeros(int(np.prod(shape)), linear.dtype)
    out[offset] = linear
    return out.reshape(shape)


@dataclass(frozen=True)
class Difference:
    """How an output differs from what was expected."""

    error: float
    """Differing elements (exact), or the worst one's distance in epsilons (envelope)."""
    why: str | None
    """A sentence with the worst element; None where the contract is met."""


def is_float(array: Array) -> bool:
    """Whether NaN can be among the elements (bf16 is no float to NumPy)."""
    return array.dtype.kind in "fV"


def bits(array: Array) -> Array:
    """The elements as unsigned integers."""
    found: Array = np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))
    return found


def compare(found: Array, wanted: Array, contract: Contract) -> Difference:
    """Judge one output by its contract."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        what = f"{wanted.dtype}{list(wanted.shape)}"
        return Difference(float("inf"), f"the oracle gives {what}, the call {found.dtype}{list(found.shape)}")
    if found.size == 0:
        return Difference(0.0, None)
    if contract.kind == "exact" or not is_float(wanted):
        return _exact(found, wanted)
    return _envelope(found, wanted, contract)


def _exact(found: Array, wanted: Array) -> Difference:
    differs = bits(found) != bits(wanted)
    if is_float(wanted):
        differs &= ~(np.isnan(found) & np.isnan(wanted))
    count = int(np.count_nonzero(differs))
    if not count:
        return Difference(0.0, None)
    at = _worst(np.where(differs, _distance(found, wanted), -1.0))
    return Difference(float(count), f"{count} of {differs.size} differ, the worst {_pair(found, wanted, at)}")


def _distance(found: Array, wanted: Array) -> Array:
    with np.errstate(all="ignore"):
        gap = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    return np.where(np.isfinite(gap), gap, np.finfo(np.float64).max)


def _worst(size: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(size)), size.shape))


def _pair(found: Array, wanted: Array, at: tuple[int, ...]) -> str:
    a, b = found[at], wanted[at]
    digits = 2 * wanted.dtype.itemsize
    codes = f"0x{int(bits(found)[at]):0{digits}x}, expected {b} 0x{int(bits(wanted)[at]):0{digits}x}"
    return f"at {list(at)}: found {a} {codes}"


def _envelope(found: Array, wanted: Array, contract: Contract) -> Difference:
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    alike = (np.isnan(a) == np.isnan(b)) & (~np.isinf(b) | (a == b)) & (~np.isinf(a) | (a == b))
    if not alike.all():
        return Difference(float("inf"), f"not both finite {_pair(found, wanted, _worst(~alike * 1.0))}")
    finite = np.isfinite(b)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    epsilon = next(d.epsilon for d in DTYPES.values() if d.numpy == wanted.dtype) or 1.0
    largest = float(np.abs(b).max())
    gap = np.abs(a - b)
    unit = epsilon * largest
    worst = float(gap.max()) / unit if unit else float("inf") if gap.any() else 0.0
    norm = float(np.linalg.norm(b))
    relative = float(np.linalg.norm(a - b)) / norm if norm else 0.0
    if worst > contract.max_eps:
        where = _pair(found, wanted, _worst(gap))
        return Difference(
            worst, f"{worst:.3g} epsilons of the largest output off, at most {contract.max_eps:g}: {where}"
        )
    if relative > contract.rel_l2:
        return Difference(worst, f"relative L2 distance {relative:.3g}, at most {contract.rel_l2:.3g}")
    return Difference(worst, None)


def against_ideal(op: Op, case: Case, inputs: Mapping[str, Array], exact: Mapping[str, Array]) -> str | None:
    """Whether the exact results are those of the mathematics: a sentence if they are not.

    Only for calls of plain numbers: what overflows or cancels in f32 has no envelope in f64.
    """
    ideal = expected(op, case, inputs, ideal=True)
    swizzles = {t.name for t in op.outputs if t.layout == "nvfp4_128x4"}
    kinds = [DTYPES[s.dtype].epsilon for s in case.slots]
    coarsest = max([k for k in kinds if k is not None] + [DTYPES["bf16"].epsilon or 0.0] * op.is_recipe)
    for name in exact.keys() - swizzles:
        near = _near(exact[name], ideal[name], coarsest)
        if np.count_nonzero(near) < IDEAL_SHARE * near.size:
            at = _worst(~near * 1.0)
            return f"{name}: the oracle gives {exact[name][at]} at {list(at)}, float64 {ideal[name][at]}"
    return None


def _near(exact: Array, ideal: Array, epsilon: float) -> Array:
    if not is_float(exact):
        if exact.dtype != np.uint8:
            same: Array = exact == ideal
            return same
        return _one_code(exact, ideal)
    b = ideal.astype(np.float64)
    power = np.sqrt(np.mean(b * b))
    near: Array = np.abs(exact.astype(np.float64) - b) <= IDEAL_EPS * epsilon * np.maximum(np.abs(b), power)
    return near


def _one_code(exact: Array, ideal: Array) -> Array:
    """Bytes of e4m3 codes, or of packed e2m1 pairs, at most one step apart under either reading."""
    whole = np.abs(_order(exact, 0x80) - _order(ideal, 0x80)) <= 1
    low = np.abs(_order(exact & 15, 8) - _order(ideal & 15, 8)) <= 1
    high = np.abs(_order(exact >> 4, 8) - _order(ideal >> 4, 8)) <= 1
    near: Array = whole | (low & high)
    return near


def _order(code: Array, sign: int) -> Array:
    value = (code & (sign - 1)).astype(np.int32)
    signed: Array = np.where(code & sign, -value, value)
    return signed
