"""C templates of primitive ops, built and called directly: rendered, compiled per ISA tier, run through
the entry ABI."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import numpy as np

from kiln.backends.cpu.c_emitter import translation_unit
from kiln.backends.cpu.primitive import CpuNumber, CpuPrimitive

Array: TypeAlias = np.ndarray[Any, Any]

TIERS = {"baseline": "x86_64", "v3": "x86_64_v3", "v4": "x86_64_v4"}
NEEDS = {"baseline": "sse2", "v3": "avx2", "v4": "avx512f"}
TEMPLATES = Path(__file__).parents[3] / "backends" / "cpu" / "kernels"
FLAGS = (
    "-O2",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-nostdlib",
    "-shared",
    "-fPIC",
    "-g0",
    "-s",
    "-Wall",
    "-Werror",
)


def runnable_tiers() -> list[str]:
    """The tiers that this processor can run."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return [tier for tier in TIERS if NEEDS[tier] in flags]


def render(primitive: CpuPrimitive) -> str:
    """The C source of a realization."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=False
    )
    text = environment.get_template(primitive.template).render(entry=primitive.entry, **primitive.constants)
    return translation_unit(primitive.entry, [text])


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


class Native:
    """A realization compiled for one tier."""

    def __init__(self, primitive: CpuPrimitive, tier: str, folder: Path) -> None:
        self.primitive = primitive
        source = folder / f"{primitive.entry}.c"
        shared = folder / f"{primitive.entry}.{tier}.so"
        source.write_text(render(primitive))
        target = ("-target", "x86_64-linux-gnu.2.17", f"-mcpu={TIERS[tier]}")
        command = [sys.executable, "-m", "ziglang", "cc", *target, *FLAGS, str(source), "-o", str(shared)]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        if built.returncode:
            raise ValueError(f"{source} does not compile for tier {tier}:\n{built.stderr}")
        self.entry = ctypes.CDLL(str(shared))[primitive.entry]
        self.entry.restype = ctypes.c_int64

    def __call__(
        self, operands: Mapping[str, Array | None], numbers: Mapping[str, float], begin: int, end: int
    ) -> None:
        """Compute tiles [begin, end); `numbers` gives the scalar parameters by name. None is absent."""
        pointers = [p for p in self.primitive.params if not isinstance(p, CpuNumber)]
        scalars = [p for p in self.primitive.params if isinstance(p, CpuNumber)]
        integers = [int(numbers[p.name]) for p in scalars if p.dtype == "i64"]
        reals = [numbers[p.name] for p in scalars if p.dtype == "f64"]
        ptrs = (ctypes.c_void_p * len(pointers))(*(_address(operands[p.operand]) for p in pointers))
        ints, floats = (ctypes.c_int64 * len(integers))(*integers), (ctypes.c_double * len(reals))(*reals)
        if code := self.entry(ptrs, ints, floats, ctypes.c_int64(begin), ctypes.c_int64(end)):
            raise ValueError(f"{self.primitive.entry} returned {code}, expected 0")
