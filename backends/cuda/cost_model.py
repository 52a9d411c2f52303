"""What a candidate of a tiled matrix product is expected to cost on a target that nobody measured.

A roofline with occupancy: programs run in waves over the multiprocessors; each wave takes the longer of its
arithmetic and of its loads, of which a multiprocessor keeps only the tiles of its pipeline in flight. It ranks
candidates; it predicts no time. Choices that rest on it are marked `model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Self

from kiln.backends.cuda.primitive import CudaPrimitive, Pointer
from kiln.compiler.target import Target
from kiln.compiler.tuning import Shape, shape_key
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Op
from kiln.runtime.expr import Env, Pred, Value, compile_expr, parse_expr, parse_pred, why_not


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
    when: Pred
    grid: tuple[Value, ...]

    @classmethod
    def of(cls, row: CudaPrimitive) -> Self | None:
        """None where the kernel has no constants BLOCK_M, BLOCK_N and BLOCK_K."""
        sizes = [row.constants.get(f"BLOCK_{axis}") for axis in "MNK"]
        if not all(isinstance(s, int) for s in sizes):
            return None
        m, n, k = (int(s) for s in sizes if s is not None)
        grid = tuple(compile_expr(parse_expr(g)) for g in row.grid)
        split = int(row.constants.get("SPLIT", 1))
        return cls(row, m, n, k, split, operand_types(row), parse_pred(row.when), grid)


def operand_types(row: CudaPrimitive) -> dict[str, str]:
    """Element types of a kernel's operands; scratch is none."""
    return {p.operand: p.dtype for p in row.params if isinstance(p, Pointer) and ":" not in p.operand}


def modelled(
    rows: Iterable[CudaPrimitive], op: Op, shapes: Iterable[Mapping[str, int]], target: Target
) -> dict[Shape, dict[str, float]]:
    """Seconds of every candidate that the model knows, on every call that the candidate may run."""
    known = [model for row in rows if (model := Model.of(row)) is not None]
    found = {}
    for shape in shapes if known else ():
        env = _env(op, shape)
        costs = {}
        for model in known:
            env.dtypes = dict(model.types)
            if why_not(model.when, env) is None:
                costs[model.row.variant] = _seconds(model, shape, env, target)
        if costs:
            found[shape_key(shape)] = costs
    return found


def _env(op: Op, shape: Mapping[str, int]) -> Env:
    """A call of dense operands at addresses that are multiples of anything."""
    env = Env()
    env.dims = dict(shape)
    env.attrs = {a.name: a.default for a in op.attrs}
    for t in op.tensors:
        width = compile_expr(parse_expr(t.dims[-1]))(env) if t.dims else 1
        env.strides[t.name], env.colstrides[t.name], env.pointers[t.name] = int(width), 1, 0
    return env


def _seconds(model: Model, shape: Mapping[str, int], env: Env, target: Target) -> float:
    machine, row = MACHINES[target.name], model.row
    first = next(p for p in row.params if isinstance(p, Pointer))
    size = DTYPES[first.dtype].bytes
    programs = prod(max(1, int(extent(env))) for extent in model.grid)
    inner = shape["K"] / model.split
    staged = (model.m + model.n) * model.k * size
    stages = max(row.num_stages, 1)
    fit = min(machine.threads // (32 * row.num_warps), target.max_shared // max(staged * stages, 1), 8)
    resident = max(1, min(fit, ceil(programs / machine.units)))
    waves = ceil(programs / (machine.units * resident))
    busy = min(machine.units, programs)
    peak = {1: 2 * machine.tensor, 2: machine.tensor}.get(size, machine.single) / machine.units
    arithmetic = 2 * model.m * model.n * inner * resident / (peak * _efficiency(model))
    in_flight = resident * max(stages - 1, 1) * staged
    per_unit = min(in_flight / LATENCY, L2_OVER_MEMORY * machine.bandwidth / busy)
    loads = resident * (model.m + model.n) * inner * size / per_unit * (1 if first.hinted else UNALIGNED)
    least = (shape["N"] + shape["M"]) * shape["K"] * size / machine.bandwidth
    return LAUNCH + max(waves * max(arithmetic, loads), least)


def _efficiency(model: Model) -> float:
    """The part of the peak that a tile's matrix instructions reach: small ones wait for their operands."""
    return min(1.0, 0.2 + 0.8 * min(model.m, 128) * min(model.n, 128) / 128**2)
