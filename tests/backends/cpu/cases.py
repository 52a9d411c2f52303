"""What conformance runs: every specialization of every expressible op, on ragged and long rows, with special
values among the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kiln.backends.cpu.backend import specializations
from kiln.ir import signature
from kiln.ir.dtypes import DTYPES, DType
from kiln.ir.interpret import run
from kiln.ir.spec import Op, Tensor
from kiln.runtime.expr import Env, compile_expr, names, parse_expr, parse_pred, why_not
from kiln.tests.backends.cpu.entries import ops
from kiln.tests.backends.cpu.guarded import Array

SHAPES = (
    (1, 1), (3, 15), (130, 16), (3, 17), (2, 31), (1, 127), (3, 128), (2, 129), (2, 256), (3, 512), (1,
    1000), (3, 2048), (2, 2064),
    (1, 5120), (1, 8213),
)  # fmt: skip
"""(rows, width): around a vector, a block of the sum tree, a block of groups, and beyond the row buffers."""
VOCABULARY = 37
HEADS = 4
SCALARS = {"scale": 0.37, "global_scale_inv": 3.0, "cap": 30.0, "factor": -1.7, "eps": 1e-5, "heads": HEADS}
SPECIAL = (
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    -1e-45,
    6e-8,
    3e38,
    -3e38,
    448.0,
    65504.0,
    88.8,
    -104.2,
    -87.5,
    0.625,
    1.0,
)


@dataclass(frozen=True)
class Specialization:
    """One entry of an op, as `backend.specializations` lists it."""

    op: str
    types: Mapping[str, DType]
    attrs: Mapping[str, Any]
    absent: tuple[str, ...]
    index: int

    def __str__(self) -> str:
        names = [
            *(d.name for d in self.types.values()),
            *(f"{k}={v}" for k, v in self.attrs.items()),
            *self.absent,
        ]
        return f"{self.op}-{'-'.join(names)}"


def all_specializations() -> list[Specialization]:
    """Every entry that is shipped."""
    found = []
    for op in ops().values():
        for n, s in enumerate(specializations(op) if op.body is not None else ()):
            types = {k: DTYPES[d] for k, d in s["types"].items()}
            found.append(Specialization(op.name, types, s["attrs"], tuple(s["absent"]), n))
    return found


def full_attrs(op: Op, s: Specialization) -> dict[str, Any]:
    """Attribute values, defaults included."""
    return {a.name: s.attrs.get(a.name, a.default) for a in op.attrs}


def sizes_of(op: Op, rows: int, width: int) -> dict[str, int]:
    """Every dimension; tables have `VOCABULARY` rows, tokens `HEADS` of them."""
    named = {
        name for t in op.tensors for dim in t.dims for head, name in names(parse_expr(dim)) if head == "dim"
    }
    return {**dict.fromkeys(named, VOCABULARY), "HEADS": HEADS, op.rows: rows, op.width: width}


def environment(op: Op, attrs: Mapping[str, Any], rows: int, width: int) -> Env:
    """What expressions see."""
    env = Env()
    env.dims, env.attrs = sizes_of(op, rows, width), dict(attrs)
    env.args = dict(SCALARS)
    return env


def legal(op: Op, attrs: Mapping[str, Any], rows: int, width: int) -> bool:
    """Whether the op's constraints allow the shape."""
    env = environment(op, attrs, rows, width)
    inside = int(attrs.get("rotary_dim", 0)) <= width
    return inside and all(why_not(parse_pred(pred), env) is None for pred, _ in op.constraints)


def shape_of(op: Op, tensor: Tensor, attrs: Mapping[str, Any], rows: int, width: int) -> tuple[int, ...]:
    """The operand's array shape."""
    env = environment(op, attrs, rows, width)
    return tuple(int(compile_expr(parse_expr(dim))(env)) for dim in tensor.dims)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Mixed magnitudes; the second row of several has special values, the third has them without NaN and
    infinity."""
    if not dtype.is_float:
        return rng.integers(0, VOCABULARY, shape).astype(dtype.numpy)
    scale = np.exp2(rng.integers(-3, 3, shape))
    data = (rng.standard_normal(shape) * scale).astype(np.float32)
    if len(shape) == 2 and shape[0] > 1:
        for row, pool in ((1, SPECIAL), (2, [s for s in SPECIAL if np.isfinite(s) and abs(s) < 1e30])):
            if row < shape[0]:
                count = max(1, shape[1] // 5)
                data[row, rng.integers(0, shape[1], count)] = rng.choice(np.array(pool, np.float32), count)
    with np.errstate(all="ignore"):
        return data.astype(dtype.numpy)


def inputs(op: Op, s: Specialization, rows: int, width: int, seed: int = 0) -> dict[str, Array]:
    """Arrays of every input that is present."""
    rng = np.random.default_rng([seed, rows, width])
    attrs = full_attrs(op, s)
    present = (t for t in op.inputs if t.name not in s.absent)
    return {
        t.name: values(rng, shape_of(op, t, attrs, rows, width), signature.resolve(op, t, s.types))
        for t in present
    }


def scalars(op: Op) -> dict[str, float]:
    """A value of every scalar operand, rounded to f32 as the oracle takes it."""
    return {o.name: float(np.float32(SCALARS.get(o.name, o.default))) for o in op.scalars}


def expected(op: Op, s: Specialization, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The oracle's outputs by name."""
    results = run(op, {**arrays, **scalars(op)}, attrs=full_attrs(op, s), dtypes=s.types)
    named = {t.name: r for t, r in zip(op.outputs, results, strict=True)}
    return {n: r for n, r in named.items() if r is not None and n not in s.absent}


def swizzled(linear: Array) -> Array:
    """Scales of (M, groups) in 128x4 blocks, padding 0; the offsets are worked out one by one."""
    rows, groups = linear.shape
    columns = -(-groups // 4) * 4
    out = np.zeros(-(-rows // 128) * 128 * columns, np.uint8)
    for m in range(rows):
        for k in range(groups):
            out[
                (((m // 128) * (columns // 4) + k // 4) * 32 + m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4
            ] = linear[m, k]
    return out.reshape(-(-rows // 128) * 128, columns)
