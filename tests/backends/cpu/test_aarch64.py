"""The AArch64 build gives the oracle's bits too, in qemu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.backends.cpu.compile import generated, ships_of, source_text
from kiln.compiler.target import TARGETS
from kiln.runtime.expr import compile_expr, parse_expr
from kiln.runtime.shared_object import read_shared_object
from kiln.tests.backends.cpu import aarch64, cases
from kiln.tests.backends.cpu.cases import Specialization
from kiln.tests.backends.cpu.entries import CATALOGS, Call, built, ops, same_bits
from kiln.tests.backends.cpu.guarded import Array

TARGET = "cpu-aarch64"
NAMES = (
    "fused_add_rms_norm", "layer_norm", "softmax", "gelu", "silu_and_mul", "rms_norm_quant_fp8",
    "quant_fp8_per_group",
    "silu_mul_fp4_quant_swizzled", "rope",
)  # fmt: skip
CHOSEN = [
    s
    for s in cases.all_specializations()
    if (s.op in NAMES and s.index == 0) or (s.op == "cast" and s.index in (2, 3, 5))
]


@pytest.mark.skipif(aarch64.QEMU is None, reason=aarch64.MISSING)
@pytest.mark.parametrize("s", CHOSEN, ids=str)
def test_bits_on_neon(s: Specialization, tmp_path: Path) -> None:
    op = ops()[s.op]
    (job,) = CpuBackend().plan({s.op: op}, CATALOGS, TARGET)
    variant = generated(op, ops(), ships_of(job.payload)[s.index], TARGETS[TARGET])
    source = source_text(op, [variant])
    for rows, width in ((3, 384), (2, 1031)):
        if not cases.legal(op, cases.full_attrs(op, s), rows, width):
            continue
        arrays = cases.inputs(op, s, rows, width)
        wanted = {
            n: cases.swizzled(w) if n == "scales" and "swizzled" in s.op else w
            for n, w in cases.expected(op, s, arrays).items()
        }
        env = Call(
            op,
            variant.fields,
            cases.sizes_of(op, rows, width),
            cases.scalars(op),
            {},
            cases.full_attrs(op, s),
        ).env()
        for name, a in (*arrays.items(), *wanted.items()):
            env.strides[name], env.colstrides[name] = a.shape[-1], 1
        memory: list[Array] = []
        written: list[str | None] = []
        ints: list[int] = []
        floats: list[float] = []
        for p in variant.fields["params"]:
            if p["kind"] == "ptr":
                write = p["access"] == "write"
                written.append(p["operand"] if write else None)
                memory.append(np.zeros_like(wanted[p["operand"]]) if write else arrays[p["operand"]])
            else:
                value = compile_expr(parse_expr(p["value"]))(env)
                if p["dtype"] == "i64":
                    ints.append(int(value))
                else:
                    floats.append(float(value))
        total = int(compile_expr(parse_expr(variant.fields["grid"][0]))(env))
        outcome = aarch64.call(tmp_path, source, variant.symbol, memory, ints, floats, total)
        assert outcome.status == 0
        for output, data in zip(written, outcome.memory, strict=True):
            if output is not None:
                w = wanted[output]
                assert same_bits(np.frombuffer(data, w.dtype).reshape(w.shape), w), (
                    f"{s} {rows}x{width}: {output}"
                )


def test_aarch64_objects_are_sound() -> None:
    made = built("l2_norm", TARGET)
    for data in made.files.values():
        found = read_shared_object(data)
        assert found.machine == "aarch64"
        assert not found.needed
        assert not found.undefined
        assert sorted(found.exports) == sorted({k["entry"] for k in made.kernels})


def test_one_source_for_both_machines() -> None:
    assert built("l2_norm", TARGET).sources == built("l2_norm").sources
