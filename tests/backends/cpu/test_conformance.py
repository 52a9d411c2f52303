"""Every entry of every ISA tier gives the oracle's bits: ragged rows, strides, red zones, in place, in parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from kiln.ir import signature
from kiln.ir.spec import Op
from kiln.tests.backends.cpu import cases
from kiln.tests.backends.cpu.cases import SHAPES, Specialization
from kiln.tests.backends.cpu.entries import TIERS, Call, built, ops, same_bits
from kiln.tests.backends.cpu.guarded import Array, Guarded

ALL = cases.all_specializations()


def kernel_of(s: Specialization, tier: str) -> Mapping[str, object]:
    of_tier = [k for k in built(s.op).kernels if k["isa"]["tier"] == tier]
    return of_tier[s.index]


def make_call(
    s: Specialization, tier: str, arrays: Mapping[str, Array], wanted: Mapping[str, Array], *, gap: int = 0, at_end: bool = True, alias: str = ""
) -> Call:
    """Guarded copies of the inputs and poisoned outputs; the output `out` lies on the input `alias`, in/out operands on themselves."""
    op = ops()[s.op]
    memory: dict[tuple[str, str], Guarded] = {}
    for name, array in arrays.items():
        rows_layout = array.ndim == 2 and next(t for t in op.tensors if t.name == name).layout == "rows"
        g = Guarded(array.shape, array.dtype, array.shape[-1] + gap if rows_layout else 0, at_end=at_end)
        g.poison()
        g.view[...] = array
        memory[name, "read"] = g
    for name, array in wanted.items():
        tensor = next(t for t in op.tensors if t.name == name)
        if tensor.role == "inout" or (alias and name == "out"):
            memory[name, "write"] = memory[alias if tensor.role == "out" else name, "read"]
            continue
        shape = cases.swizzled(array).shape if tensor.layout == "nvfp4_128x4" else array.shape
        g = Guarded(shape, array.dtype, shape[-1] + gap if len(shape) == 2 and tensor.layout == "rows" else 0, at_end=at_end)
        g.poison()
        memory[name, "write"] = g
    sizes = {op.rows: rows_of(op, arrays), op.width: width_of(op, arrays), "V": cases.VOCABULARY}
    return Call(op, kernel_of(s, tier), sizes, cases.scalars(op), memory, cases.full_attrs(op, s))


def rows_of(op: Op, arrays: Mapping[str, Array]) -> int:
    return signature.bind_sizes(op, {k: v.shape for k, v in arrays.items()})[op.rows]


def width_of(op: Op, arrays: Mapping[str, Array]) -> int:
    return signature.bind_sizes(op, {k: v.shape for k, v in arrays.items()})[op.width]


def check(call: Call, wanted: Mapping[str, Array], label: str) -> None:
    for name, array in wanted.items():
        tensor = next(t for t in call.op.tensors if t.name == name)
        g = call.memory[name, "write"]
        reference = cases.swizzled(array) if tensor.layout == "nvfp4_128x4" else array
        assert same_bits(g.view, reference), f"{label}: {name} differs at {first_difference(g.view, reference)}"
        assert g.gaps_are(), f"{label}: {name} was written between its rows"


def first_difference(found: Array, expected: Array) -> str:
    kind = np.dtype(f"u{found.dtype.itemsize}")
    a, b = (np.ascontiguousarray(x).view(kind) for x in (found, expected))
    differs = (a != b) & ~(np.isnan(found) & np.isnan(expected)) if found.dtype.kind in "fV" else a != b
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    return f"{at}: {found[at]} ({a[at]:#x}), expected {expected[at]} ({b[at]:#x}); {int(differs.sum())} of {differs.size}"


@pytest.mark.parametrize("s", ALL, ids=str)
def test_bits_of_every_entry(s: Specialization) -> None:
    op = ops()[s.op]
    ran = 0
    for number, (rows, width) in enumerate(SHAPES):
        if not cases.legal(op, cases.full_attrs(op, s), rows, width):
            continue
        arrays = cases.inputs(op, s, rows, width)
        wanted = cases.expected(op, s, arrays)
        for tier in TIERS:
            call = make_call(s, tier, arrays, wanted, gap=5 * (number % 2), at_end=number % 3 != 1)
            assert call.run() == 0
            check(call, wanted, f"{s} {tier} {rows}x{width}")
            ran += 1
    assert ran >= 5 * len(TIERS)
