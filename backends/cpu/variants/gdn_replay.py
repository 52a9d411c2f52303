"""CPU realizations of the gated delta rule's decode step with a ring: any head sizes, one head of one row a
tile."""

from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.backends.cpu.variants.gdn import MOST
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.spec import DTypeVar, Ship
from kiln.recipes.gdn_replay import REPLAY_DECODE

Expr: TypeAlias = Any

LONGEST = 64
"""The largest window: weights of its entries are held on the stack."""
STRIDED = ("mixed_qkv", "a", "b", "state", "ring_d", "ring_k", "ring_g", "out")


def _pointers(ship: Ship) -> tuple[CpuPointer, ...]:
    """Inputs in declared order, the written side of in/out operands, then the output."""
    present = [t for t in REPLAY_DECODE.tensors if t.name not in ship.absent]
    kinds = {t.name: ship.dtypes[t.dtype.name] if isinstance(t.dtype, DTypeVar) else t.dtype for t in present}

    def pointer(name: str, access: Any, suffix: str = "") -> CpuPointer:
        return CpuPointer(name + suffix, name, kinds[name].name, kinds[name].bytes, access)

    reads = [pointer(t.name, "read") for t in present if t.role != "out"]
    both = [pointer(t.name, "write", "_out") for t in present if t.role == "inout"]
    return (*reads, *both, *(pointer(t.name, "write") for t in present if t.role == "out"))


def replay_decode(ship: Ship) -> CpuPrimitive:
    """The realization for one combination of types, shipped or not."""
    types = {k: d.name for k, d in ship.dtypes.items()}
    name = variant_name(ship)
    sizes: tuple[tuple[str, Expr], ...] = (
        ("HV", ["dim", "HV"]), ("heads", ["arg", "heads"]), ("slots", ["dim", "SLOTS"]),
        ("K", ["arg", "key_dim"]), ("V", ["arg", "value_dim"]), ("window", ["arg", "window"]),
        ("norm", ["add", ["attr", "qk_l2norm"], 0]),
    )  # fmt: skip
    limits = (("key_dim", MOST), ("window", LONGEST))
    return CpuPrimitive(
        op=REPLAY_DECODE.name,
        variant=name,
        template="gdn_replay.c.j2",
        entry=f"{REPLAY_DECODE.name}_{name}",
        params=(
            *_pointers(ship),
            *(CpuNumber(n, "i64", e) for n, e in sizes),
            *(CpuNumber(f"{t}_stride", "i64", ["stride", t]) for t in STRIDED),
            CpuNumber("scale", "f64", ["arg", "scale"]),
        ),
        grid=["mul", ["dim", "B"], ["dim", "HV"]],
        when=[
            "and",
            *(p for p in type_predicates(REPLAY_DECODE, ship) if p[0] != "attr"),
            *(["le", ["arg", size], most] for size, most in limits),
        ],
        constants={
            "io": types["T"], "bias": "f32", "ring": types["R"], "output": types["O"],
            "forced": "force_flush" not in ship.absent, "most": MOST, "longest": LONGEST,
        },
    )  # fmt: skip


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(replay_decode(s) for s in REPLAY_DECODE.ship)
