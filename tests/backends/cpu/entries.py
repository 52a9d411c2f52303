"""Compiled entries of ops, called through ctypes as their manifest entries say, on guarded memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kiln.backends.cpu.backend import CpuBackend
from kiln.backends.cpu.compile import run
from kiln.compiler.backend import Built
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.target import TARGETS
from kiln.ir.spec import Op
from kiln.runtime.expr import Env, compile_expr, parse_expr, parse_pred, why_not
from kiln.runtime.targets import cpu_features, cpu_target, missing_features
from kiln.tests.backends.cpu.guarded import Array, Guarded

CATALOGS = ("kiln.recipes",)
NATIVE = cpu_target()
FEATURES = cpu_features()
TIERS = tuple(t.name for t in TARGETS[NATIVE].tiers if not missing_features(NATIVE, t.features, FEATURES))
"""ISA tiers that this machine runs."""


@cache
def ops() -> dict[str, Op]:
    """Kiln's own catalog."""
    return load_catalogs(CATALOGS)


@cache
def built(name: str, target: str = NATIVE) -> Built:
    """Everything the CPU backend makes of one op."""
    (job,) = (j for j in CpuBackend().plan({name: ops()[name]}, CATALOGS, target) if j.op == name)
    return run(job)


@cache
def library(name: str, file: str) -> ctypes.CDLL:
    """A shared object of an op, loaded."""
    handle, path = tempfile.mkstemp(suffix=".so")
    os.close(handle)
    Path(path).write_bytes(built(name).files[file])
    try:
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)


@dataclass
class Call:
    """One call: geometry and memory of each operand by parameter (operand, access), scalars, sizes."""

    op: Op
    kernel: Mapping[str, Any]
    sizes: Mapping[str, int]
    scalars: Mapping[str, float]
    memory: Mapping[tuple[str, str], Guarded]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def env(self) -> Env:
        """What the manifest's expressions see."""
        env = Env()
        env.dims, env.attrs, env.args = dict(self.sizes), dict(self.attrs), dict(self.scalars)
        for (operand, _), g in self.memory.items():
            env.strides[operand], env.colstrides[operand] = g.stride, 1
        return env

    def refusal(self) -> str | None:
        """Why the entry is not for this call; None if it is."""
        env = self.env()
        env.dtypes = {p["operand"]: p["dtype"] for p in self.kernel["params"] if p["kind"] == "ptr"}
        return why_not(parse_pred(self.kernel["when"]), env)

    def rows(self) -> int:
        """The extent of the whole call."""
        return int(compile_expr(parse_expr(self.kernel["grid"][0]))(self.env()))

    def arguments(self) -> tuple[Any, Any, Any]:
        """The three arrays of the CPU ABI."""
        env = self.env()
        pointers = [
            self.memory[p["operand"], p["access"]].address
            for p in self.kernel["params"]
            if p["kind"] == "ptr"
        ]
        values = [
            (p["dtype"], compile_expr(parse_expr(p["value"]))(env))
            for p in self.kernel["params"]
            if p["kind"] == "scalar"
        ]
        integers = [int(v) for d, v in values if d[0] == "i"]
        floats = [float(v) for d, v in values if d[0] == "f"]
        return (
            (ctypes.c_void_p * max(len(pointers), 1))(*pointers),
            (ctypes.c_int64 * max(len(integers), 1))(*integers),
            (ctypes.c_double * max(len(floats), 1))(*floats),
        )

    def run(self, begin: int = 0, end: int | None = None) -> int:
        """Call the entry for rows [begin, end); its status."""
        entry = library(self.op.name, self.kernel["file"])[self.kernel["entry"]]
        entry.restype = ctypes.c_int64
        entry.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
        return int(entry(*self.arguments(), begin, self.rows() if end is None else end))


def same_bits(found: Array, expected: Array) -> bool:
    """Equal to the bit, except that NaN equals NaN whatever its payload."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    kind = np.dtype(f"u{found.dtype.itemsize}")
    equal = np.ascontiguousarray(found).view(kind) == np.ascontiguousarray(expected).view(kind)
    if expected.dtype.kind in "fV":
        equal |= np.isnan(found) & np.isnan(expected)
    return bool(equal.all())
