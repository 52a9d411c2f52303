"""What a candidate of a tiled matrix product is expected to cost on a target that nobody measured.

A roofline with occupancy: tiles run in waves over the multiprocessors; each wave takes the longer of its
arithmetic and of its loads, of which a multiprocessor keeps only the tiles of its pipeline in flight. It
ranks candidates; it predicts no time. Choices that rest on it are marked `model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, Self

from kiln.backends.cuda.primitive import CudaPrimitive, Pointer
from kiln.compiler.target import Target
from kiln.compiler.tuning import Shape, shape_key
from kiln.ir.dtypes import DTYPES, F32
from kiln.ir.spec import Op
from kiln.runtime.expr import Env, compile_expr, parse_expr, parse_pred, why_not


@dataclass(frozen=True)
class Machine:
    """A device that stands for a target; figures of its vendor's data sheet."""

    device: str
    units: int
    """Multiprocessors."""
    bandwidth: float
    """Of its memory, bytes a second."""
    tensor: float
    """Dense FLOP a second of 16-bit types; 8-bit types take half the time."""
    single: float
    """FLOP a second of f32 without tensor cores."""
    threads: int = 2048
    """Of a multiprocessor."""


MACHINES: Mapping[str, Machine] = {
    "sm_80": Machine("A100", 108, 2.04e12, 312e12, 19.5e12),
    "sm_86": Machine("A40", 84, 0.70e12, 150e12, 37e12, 1536),
    "sm_87": Machine("Jetson AGX Orin", 16, 0.20e12, 43e12, 5.3e12, 1536),
    "sm_89": Machine("L40S", 142, 0.86e12, 362e12, 92e12, 1536),
    "sm_90a": Machine("H200", 132, 4.8e12, 989e12, 67e12),
    "sm_100a": Machine("B200", 148, 8.0e12, 2250e12, 75e12),
    "sm_103a": Machine("B300", 148, 8.0e12, 2250e12, 75e12),
    "sm_110a": Machine("Jetson T5000", 20, 0.27e12, 250e12, 8e12, 1536),
    "sm_120a": Machine("RTX 5090", 170, 1.79e12, 209e12, 105e12, 1536),
    "sm_121a": Machine("GB10", 48, 0.27e12, 62e12, 31e12, 1536),
}
LATENCY = 0.8e-6
"""Seconds from a load to its data under load."""
LAUNCH = 2.0e-6
"""Seconds that a launch takes at least."""
ARRIVAL = 1.0e-6
"""Seconds that programs of one output tile wait for each other at its end."""
L2_OVER_MEMORY = 2.5
"""How much faster repeated tiles come from L2 than from memory."""


UNALIGNED = 4.0
"""How much longer loads take that may not be of 16 bytes."""


@dataclass(frozen=True)
class Model:
    """What the model sees of a candidate."""

    row: CudaPrimitive
    m: int
    n: int
    k: int
    """Its tile."""
    split: int
    """Programs that share an output tile's inner dimension."""
    types: Mapping[str, str]

    @classmethod
    def of(cls, row: CudaPrimitive) -> Self | None:
        """None where the kernel has no constants BLOCK_M, BLOCK_N and BLOCK_K."""
        sizes = [row.constants.get(f"BLOCK_{axis}") for axis in "MNK"]
        if not all(isinstance(s, int) for s in sizes):
            return None
        m, n, k = (int(s) for s in sizes if s is not None)
        split = row.constants.get("SPLIT")
        cut = split if isinstance(split, int) else 1
        return cls(row, m, n, k, cut, operand_types(row))


def operand_types(row: CudaPrimitive) -> dict[str, str]:
    """Element types of a kernel's operands; scratch is none."""
    return {p.operand: p.dtype for p in row.params if isinstance(p, Pointer) and ":" not in p.operand}


def modelled(
    rows: Iterable[CudaPrimitive],
    op: Op,
    shapes: Iterable[Mapping[str, int]],
    derived: Mapping[str, Any],
    target: Target,
) -> dict[Shape, dict[str, float]]:
    """Seconds of every candidate that the model knows, on every call that the candidate may run; `derived`
    are dimensions that follow from those of a shape."""
    known = [model for row in rows if (model := Model.of(row)) is not None]
    calls = tuple(map(shape_key, shapes)) if known else ()
    dense = _dense(op, derived)
    runs = [
        (
            m.row.variant,
            _timer(m, target),
            _admitted(dense, calls, json.dumps(m.row.when), tuple(m.types.items())),
        )
        for m in known
    ]
    found = {}
    for i, call in enumerate(calls):
        shape = dict(call)
        if costs := {name: seconds(shape) for name, seconds, admits in runs if admits[i]}:
            found[call] = costs
    return found


def _dense(op: Op, derived: Mapping[str, Any]) -> str:
    """What calls of dense operands are made of, as JSON: a key of what does not depend on the target."""
    widths = {t.name: t.dims[-1] if t.dims else 1 for t in op.tensors}
    return json.dumps(
        {"derived": dict(derived), "attrs": {a.name: a.default for a in op.attrs}, "widths": widths}
    )


@lru_cache(maxsize=4096)
def _admitted(
    dense: str, calls: tuple[Shape, ...], when: str, types: tuple[tuple[str, str], ...]
) -> tuple[bool, ...]:
    """For each call whether a kernel with these needs may run it; the targets that a build is for share the
    answers."""
    envs, needs, own = _envs(dense, calls), parse_pred(json.loads(when)), dict(types)
    answers = []
    for env in envs:
        env.dtypes = own
        answers.append(why_not(needs, env) is None)
    return tuple(answers)


@lru_cache(maxsize=64)
def _envs(dense: str, calls: tuple[Shape, ...]) -> tuple[Env, ...]:
    """Calls of dense operands at addresses that are multiples of anything."""
    made = json.loads(dense)
    derived = {d: compile_expr(parse_expr(e)) for d, e in made["derived"].items()}
    widths = {name: compile_expr(parse_expr(e)) for name, e in made["widths"].items()}
    envs = []
    for call in calls:
        env = Env()
        env.dims = dict(call)
        env.dims |= {d: int(value(env)) for d, value in derived.items()}
        env.attrs = made["attrs"]
        env.strides = {name: int(value(env)) for name, value in widths.items()}
        env.colstrides, env.pointers = dict.fromkeys(widths, 1), dict.fromkeys(widths, 0)
        envs.append(env)
    return tuple(envs)


def _timer(model: Model, target: Target) -> Callable[[Mapping[str, int]], float]:
    """Seconds of a candidate on a target, by shape."""
    machine, row = MACHINES[target.name], model.row
    first = next(p for p in row.params if isinstance(p, Pointer))
    size = DTYPES[first.dtype].bytes
    staged = (model.m + model.n) * model.k * size
    stages = max(row.num_stages, 1)
    fit = min(machine.threads // (32 * row.num_warps), target.max_shared // max(staged * stages, 1), 8)
    peak = {1: 2 * machine.tensor, 2: machine.tensor}.get(size, machine.single) / machine.units
    reached = peak * _efficiency(model)
    unaligned = 1 if first.hinted else UNALIGNED

    def seconds(shape: Mapping[str, int]) -> float:
        programs = ceil(shape["M"] / model.m) * ceil(shape["N"] / model.n) * model.split
        inner = shape["K"] / model.split
        resident = max(1, min(fit, ceil(programs / machine.units)))
        waves = ceil(programs / (machine.units * resident))
        busy = min(machine.units, programs)
        arithmetic = 2 * model.m * model.n * inner * resident / reached
        in_flight = resident * max(stages - 1, 1) * staged
        per_unit = min(in_flight / LATENCY, L2_OVER_MEMORY * machine.bandwidth / busy)
        loads = resident * (model.m + model.n) * inner * size / per_unit * unaligned
        least = (shape["N"] + shape["M"]) * shape["K"] * size / machine.bandwidth
        partials = 2 * F32.bytes * programs * model.m * model.n if model.split > 1 else 0
        summed = ARRIVAL * (model.split > 1) + partials / (L2_OVER_MEMORY * machine.bandwidth)
        return LAUNCH + summed + max(waves * max(arithmetic, loads), least)

    return seconds


def _efficiency(model: Model) -> float:
    """The part of the peak that a tile's matrix instructions reach: small ones wait for their operands."""
    return min(1.0, 0.2 + 0.8 * min(model.m, 128) * min(model.n, 128) / 128**2)
