"""Every entry of every ISA tier gives the oracle's bits: ragged rows, strides, red zones, in place, in
parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from kiln.backends.cpu.c_loops import BUFFERED
from kiln.ir import signature
from kiln.ir.dtypes import BF16, F32, I32, I64
from kiln.tests.backends.cpu import cases
from kiln.tests.backends.cpu.cases import SHAPES, Specialization
from kiln.tests.backends.cpu.entries import TIERS, Call, built, ops, same_bits
from kiln.tests.backends.cpu.guarded import Array, Guarded

ALL = cases.all_specializations()


def make_call(
    s: Specialization,
    tier: str,
    arrays: Mapping[str, Array],
    wanted: Mapping[str, Array],
    *,
    gap: int = 0,
    at_end: bool = True,
    alias: str = "",
) -> Call:
    """Guarded copies of the inputs, poisoned outputs; `out` lies on the input `alias`, an in/out operand on
    itself."""
    op = ops()[s.op]
    layouts = {t.name: t.layout for t in op.tensors}
    memory: dict[tuple[str, str], Guarded] = {}

    def place(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Guarded:
        stride = shape[-1] + gap if len(shape) == 2 and layouts[name] in ("rows", "strided") else 0
        g = Guarded(shape, dtype, stride, at_end=at_end)
        g.poison()
        return g

    for name, array in arrays.items():
        memory[name, "read"] = place(name, array.shape, array.dtype)
        memory[name, "read"].view[...] = array
    for name, array in wanted.items():
        below = alias if name == "out" else name
        shared = memory.get((below, "read"))
        shape = cases.swizzled(array).shape if layouts[name] == "nvfp4_128x4" else array.shape
        memory[name, "write"] = shared if shared is not None else place(name, shape, array.dtype)
    sizes = {**cases.sizes_of(op, 1, 1), **signature.bind_sizes(op, {k: v.shape for k, v in arrays.items()})}
    kernel = [k for k in built(s.op).kernels if k["isa"]["tier"] == tier][s.index]
    return Call(op, kernel, sizes, cases.scalars(op), memory, cases.full_attrs(op, s))


def check(call: Call, wanted: Mapping[str, Array], label: str) -> None:
    """Outputs are the oracle's and nothing between rows was touched."""
    for name, array in wanted.items():
        tensor = next(t for t in call.op.tensors if t.name == name)
        g = call.memory[name, "write"]
        reference = cases.swizzled(array) if tensor.layout == "nvfp4_128x4" else array
        assert same_bits(g.view, reference), (
            f"{label}: {name} differs at {first_difference(g.view, reference)}"
        )
        assert g.gaps_are(), f"{label}: {name} was written between its rows"


def first_difference(found: Array, expected: Array) -> str:
    """Where, and how many."""
    kind = np.dtype(f"u{found.dtype.itemsize}")
    a, b = (np.ascontiguousarray(x).view(kind) for x in (found, expected))
    differs = (a != b) & ~(np.isnan(found) & np.isnan(expected)) if found.dtype.kind in "fV" else a != b
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    told = f"{found[at]} ({a[at]:#x}), expected {expected[at]} ({b[at]:#x})"
    return f"{at}: {told}; {differs.sum()} of {differs.size}"


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
            if width > BUFFERED and call.refusal() is not None:
                continue
            assert call.run() == 0
            check(call, wanted, f"{s} {tier} {rows}x{width}")
            ran += 1
    assert ran >= 4 * len(TIERS)


def aliases() -> list[tuple[Specialization, str]]:
    """(entry, input) where `out` may be the input's memory: the same shape and type."""
    found = []
    for s in ALL:
        op = ops()[s.op]
        outs = [t for t in op.outputs if t.name == "out"]
        for t in op.inputs:
            same = outs and t.dims == outs[0].dims and t.role == "in" and t.name not in s.absent
            if same and signature.resolve(op, t, s.types) is signature.resolve(op, outs[0], s.types):
                found.append((s, t.name))
    return found


@pytest.mark.parametrize(("s", "alias"), aliases(), ids=str)
def test_bits_in_place(s: Specialization, alias: str) -> None:
    op = ops()[s.op]
    for rows, width in ((3, 129), (2, 528), (1, 8213)):
        if not cases.legal(op, cases.full_attrs(op, s), rows, width):
            continue
        arrays = cases.inputs(op, s, rows, width, seed=1)
        wanted = cases.expected(op, s, arrays)
        for tier in TIERS:
            call = make_call(s, tier, arrays, wanted, gap=3, alias=alias)
            if width > BUFFERED and call.refusal() is not None:
                continue
            assert call.run() == 0
            check(call, wanted, f"{s} {tier} {rows}x{width} on {alias}")


def test_there_are_aliases() -> None:
    assert len({s.op for s, _ in aliases()}) > 15


@pytest.mark.parametrize("s", [s for s in ALL if s.index == 0], ids=str)
def test_rows_in_any_parts(s: Specialization) -> None:
    """Each row depends on nothing but itself, and a call touches its rows alone."""
    op = ops()[s.op]
    arrays = cases.inputs(op, s, 7, 256, seed=2)
    wanted = cases.expected(op, s, arrays)
    call = make_call(s, TIERS[-1], arrays, wanted)
    rows = call.rows()
    first = {n: call.memory[n, "write"].view.copy() for n in wanted}
    call.run(3, 3)
    for n, before in first.items():
        assert call.memory[n, "write"].view.tobytes() == before.tobytes()
    for begin, end in ((5, rows), (0, 2), (2, 5)):
        assert call.run(begin, end) == 0
    check(call, wanted, str(s))


@pytest.mark.parametrize("group", [64, 128])
def test_scales_may_be_column_major(group: int) -> None:
    s = next(
        s
        for s in ALL
        if s.op == "quant_fp8_per_group" and s.attrs.get("group", 128) == group and not s.attrs.get("ue8m0")
    )
    op = ops()[s.op]
    arrays = cases.inputs(op, s, 3, 5 * group)
    wanted = cases.expected(op, s, arrays)
    for tier in TIERS:
        call = make_call(s, tier, arrays, wanted)
        call.memory["scales", "write"] = turned = Guarded((5, 3), np.dtype(np.float32))  # type: ignore[index]
        turned.poison()
        params = [dict(p) for p in call.kernel["params"]]
        for p in params:
            if p.get("value") == ["stride", "scales"]:
                p["value"] = 1
            if p.get("value") == ["colstride", "scales"]:
                p["value"] = 3
        call.kernel = {**call.kernel, "params": params}
        assert call.run() == 0
        assert same_bits(turned.view.T.copy(), wanted["scales"])


@pytest.mark.parametrize("index", [-1, cases.VOCABULARY, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [I32, I64])
def test_an_index_outside_the_table_ends_the_call(index: int, dtype: object) -> None:
    s = next(s for s in ALL if s.op == "embedding" and s.types["I"] is dtype and s.types["T"] is BF16)
    arrays = cases.inputs(ops()["embedding"], s, 4, 32)
    wanted = cases.expected(ops()["embedding"], s, arrays)
    arrays["ids"][2] = index
    for tier in TIERS:
        call = make_call(s, tier, arrays, wanted)
        assert call.run() == 3
        assert same_bits(call.memory["out", "write"].view[:2], wanted["out"][:2])


def test_a_wrong_bit_is_found() -> None:
    s = next(s for s in ALL if s.op == "add" and s.types["T"] is F32)
    arrays = cases.inputs(ops()["add"], s, 2, 33)
    wanted = cases.expected(ops()["add"], s, arrays)
    call = make_call(s, TIERS[0], arrays, wanted, gap=2)
    call.run()
    check(call, wanted, "add")
    call.memory["out", "write"].view.view(np.uint32)[1, 32] ^= 1
    with pytest.raises(AssertionError, match="differs at \\(1, 32\\)"):
        check(call, wanted, "add")
    call.memory["out", "write"].view[1, 32] = wanted["out"][1, 32]
    call.memory["out", "write"].flat[34] = 0
    with pytest.raises(AssertionError, match="between its rows"):
        check(call, wanted, "add")
