"""CPU realizations of the gated delta rule over sequences: token by token, one head of one sequence a
tile."""

from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.backends.cpu.variants.gdn import MOST
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import DTypeVar, Ship
from kiln.recipes.gdn_chunk import CHUNKED

Expr: TypeAlias = Any

STRIDED = ("q", "k", "v", "g", "beta", "out")


def _pointers(ship: Ship) -> tuple[CpuPointer, ...]:
    kinds = {
        t.name: ship.dtypes[t.dtype.name] if isinstance(t.dtype, DTypeVar) else t.dtype
        for t in CHUNKED.tensors
    }
    return tuple(
        CpuPointer(
            t.name, t.name, kinds[t.name].name, kinds[t.name].bytes, "read" if t.role == "in" else "write"
        )
        for t in CHUNKED.tensors
    )


def _chunk(ship: Ship) -> CpuPrimitive:
    sizes: tuple[tuple[str, Expr], ...] = (
        ("T", ["dim", "T"]), ("sequences", ["dim", "SEQS"]), ("HV", ["dim", "HV"]), ("heads", ["arg",
        "heads"]),
        ("K", ["arg", "key_dim"]), ("V", ["arg", "value_dim"]),
    )  # fmt: skip
    return CpuPrimitive(
        op=CHUNKED.name,
        variant=variant_name(ship),
        template="gdn.c.j2",
        entry=f"{CHUNKED.name}_{variant_name(ship)}",
        params=(
            *_pointers(ship),
            *(CpuNumber(n, "i64", e) for n, e in sizes),
            *(CpuNumber(f"{t}_stride", "i64", ["stride", t]) for t in STRIDED),
            CpuNumber("scale", "f64", ["arg", "scale"]),
        ),
        grid=["mul", ["dim", "SEQS"], ["dim", "HV"]],
        when=["and", *type_predicates(CHUNKED, ship), ["le", ["arg", "key_dim"], MOST]],
        constants={
            "io": ship.dtypes["X"].name, "state": DTYPES["f32"].name, "output": ship.dtypes["O"].name,
            "step": False,
            "index": 32, "most": MOST,
        },
    )  # fmt: skip


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(_chunk(s) for s in CHUNKED.ship)
