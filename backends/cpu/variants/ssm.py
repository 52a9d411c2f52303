"""CPU realizations of causal convolutions and of the split after them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.spec import DTypeVar, Op, Ship
from kiln.recipes.ssm import FORWARD, POST_CONV, UPDATE

Expr: TypeAlias = Any

CHANNELS = 256
"""Of a tile."""
STRIDED = {
    UPDATE.name: ("x", "conv_state"),
    FORWARD.name: ("x", "conv_state"),
    POST_CONV.name: ("mixed_qkv", "a", "b"),
}


def _pointers(op: Op, ship: Ship) -> tuple[CpuPointer, ...]:
    kinds = {
        t.name: ship.dtypes[t.dtype.name] if isinstance(t.dtype, DTypeVar) else t.dtype for t in op.tensors
    }

    def pointer(name: str, access: Any, suffix: str = "") -> CpuPointer:
        return CpuPointer(name + suffix, name, kinds[name].name, kinds[name].bytes, access)

    present = [t for t in op.tensors if t.name not in ship.absent]
    reads = [pointer(t.name, "read") for t in present if t.role != "out"]
    both = [pointer(t.name, "write", "_out") for t in present if t.role == "inout"]
    return (*reads, *both, *(pointer(t.name, "write") for t in present if t.role == "out"))


def _primitive(
    op: Op, kind: str, ship: Ship, sizes: Sequence[tuple[str, Expr]], grid: Expr, constants: Any
) -> CpuPrimitive:
    name = variant_name(ship)
    return CpuPrimitive(
        op=op.name,
        variant=name,
        template="ssm.c.j2",
        entry=f"{op.name}_{name}",
        params=(
            *_pointers(op, ship),
            *(CpuNumber(n, "i64", e) for n, e in sizes),
            *(CpuNumber(f"{t}_stride", "i64", ["stride", t]) for t in STRIDED[op.name]),
        ),
        grid=grid,
        when=["and", *type_predicates(op, ship)],
        constants={"kind": kind, "io": ship.dtypes["T"].name, **constants},
    )


def _convolution(op: Op, kind: str, ship: Ship) -> CpuPrimitive:
    c: Expr = ["dim", "C"]
    rows: Expr = ["dim", "B"] if op is UPDATE else ["dim", "SEQS"]
    own = () if op is UPDATE else (("T", ["dim", "T"]), ("sequences", rows))
    sizes = (*own, ("C", c), ("slots", ["dim", "SLOTS"]), ("width", ["dim", "WIDTH"]))
    constants = {"silu": ship.attrs["silu"], "biased": "bias" not in ship.absent, "channels": CHANNELS}
    return _primitive(op, kind, ship, sizes, ["mul", rows, ["cdiv", c, CHANNELS]], constants)


def _post_conv(ship: Ship) -> CpuPrimitive:
    sizes: tuple[tuple[str, Expr], ...] = (
        ("HV", ["dim", "HV"]), ("heads", ["arg", "heads"]), ("K", ["arg", "key_dim"]), ("V", ["arg",
        "value_dim"]),
    )  # fmt: skip
    return _primitive(POST_CONV, "post_conv", ship, sizes, ["dim", "T"], {"bias": ship.dtypes["P"].name})


PRIMITIVES: tuple[CpuPrimitive, ...] = (
    *(_convolution(op, kind, s) for op, kind in ((UPDATE, "update"), (FORWARD, "forward")) for s in op.ship),
    *map(_post_conv, POST_CONV.ship),
)
