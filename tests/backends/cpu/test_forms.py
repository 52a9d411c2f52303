"""Forms that Kiln's own catalog does not have, but a user's may: compiled, run and compared with the
oracle."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.backends.cpu.c_emitter import emit, translation_unit
from kiln.backends.cpu.toolchain import shared_object
from kiln.compiler.lower import Request, lower
from kiln.compiler.target import TARGETS
from kiln.ir.dtypes import BF16, F32
from kiln.ir.interpret import run
from kiln.ir.language import Value, columns, exp, permute, row_max, row_sum, select
from kiln.ir.spec import Op, Tensor
from kiln.runtime.expr import Env, compile_expr, parse_expr
from kiln.tests.backends.cpu.entries import NATIVE, TIERS, same_bits
from kiln.tests.backends.cpu.guarded import Array, Guarded

X = Tensor("x", F32, ("M", "N"))
B = Tensor("x", BF16, ("M", "N"))
OUT = Tensor("out", F32, ("M", "N"), "out")


def _two_reductions(x: Value) -> Value:
    return x * row_sum(x) + row_max(exp(x))


def _waiting_store(x: Value) -> tuple[Value, Value]:
    doubled = x + x
    return doubled, x * row_sum(doubled)


def _rounded_scalar(x: Value) -> tuple[Value, Value]:
    total = row_sum(x.to(F32)).to(BF16)
    return total, x.to(F32) - total.to(F32)


def _dear_before_two_sums(x: Value) -> Value:
    e = exp(x.to(F32))
    return e * (row_sum(e) + row_sum(e * e))


def _turned(x: Value) -> Value:
    column = columns(x)
    other = permute(x.to(F32) * 3.0, select(column < 5, 4 - column, column))
    return other + row_sum(other)


FORMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "two_reductions": (_two_reductions, (X, OUT)),
    "waiting_store": (_waiting_store, (X, Tensor("first", F32, ("M", "N"), "out"), OUT)),
    "rounded_scalar": (_rounded_scalar, (B, Tensor("total", BF16, ("M",), "out", "dense"), OUT)),
    "dear_before_two_sums": (_dear_before_two_sums, (B, OUT)),
    "turned": (_turned, (B, OUT)),
}


def declared(name: str) -> Op:
    """The op of a form."""
    body, operands = FORMS[name]
    return Op(name, "TEST", operands, body=body)


@cache
def compiled(name: str, tier: str) -> tuple[ctypes.CDLL, list[dict[str, Any]]]:
    """The entry `own` of a form, loaded, and its parameters."""
    op = declared(name)
    entry = emit(op, lower(Request(op, {}), {op.name: op}).program, {}, {}, "own")
    target = TARGETS[NATIVE]
    data = shared_object(
        translation_unit(op.name, [entry.text]),
        target,
        next(t for t in target.tiers if t.name == tier),
        op.name,
    )
    handle, path = tempfile.mkstemp(suffix=".so")
    os.close(handle)
    Path(path).write_bytes(data)
    try:
        return ctypes.CDLL(path), entry.abi.json_params()
    finally:
        os.unlink(path)


def call(op: Op, tier: str, memory: Mapping[tuple[str, str], Guarded], rows: int, width: int) -> None:
    """Run all rows."""
    loaded, params = compiled(op.name, tier)
    env = Env()
    env.dims = {"M": rows, "N": width}
    env.strides = {operand: g.stride for (operand, _), g in memory.items()}
    pointers = [memory[p["operand"], p["access"]].address for p in params if p["kind"] == "ptr"]
    integers = [int(compile_expr(parse_expr(p["value"]))(env)) for p in params if p["kind"] == "scalar"]
    arguments = (
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(integers))(*integers),
        None,
    )
    assert loaded.own(*arguments, ctypes.c_int64(0), ctypes.c_int64(rows)) == 0


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tier", TIERS)
def test_bits(name: str, tier: str) -> None:
    op = declared(name)
    rng = np.random.default_rng(4)
    for rows, width in ((2, 16), (3, 41), (2, 300), (1, 9001)):
        if name == "turned" and width > 8192:
            continue
        x: Array = rng.standard_normal((rows, width)).astype(np.float32).astype(op.inputs[0].dtype.numpy)  # type: ignore[union-attr]
        results = dict(zip((t.name for t in op.outputs), run(op, {"x": x}), strict=True))
        memory = {("x", "read"): Guarded(x.shape, x.dtype, width + 2)}
        memory["x", "read"].view[...] = x
        for t in op.outputs:
            expected = results[t.name]
            assert expected is not None
            memory[t.name, "write"] = Guarded(
                expected.shape, expected.dtype, width + 2 if expected.ndim == 2 else 0
            )
            memory[t.name, "write"].poison()
        if name == "waiting_store":
            memory["first", "write"] = memory["x", "read"]
        call(op, tier, memory, rows, width)
        for t in op.outputs:
            found, expected = memory[t.name, "write"].view, results[t.name]
            assert expected is not None
            assert same_bits(found, expected), f"{name} {tier} {rows}x{width}: {t.name}"
