"""CPU realizations of the gated delta rule's decode step: any head sizes, one head of one row a tile."""

from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import DTYPES, I64
from kiln.ir.spec import Ship
from kiln.recipes.gdn import PACKED_DECODE

Expr: TypeAlias = Any

MOST = 256
"""The largest key dimension: q and k of a head are held on the stack."""
POINTERS: tuple[tuple[str, str, Any], ...] = (
    ("mixed_qkv", "T", "read"), ("a", "T", "read"), ("b", "T", "read"), ("a_log", "f32", "read"),
    ("dt_bias", "P", "read"), ("state", "S", "read"), ("state_indices", "I", "read"), ("state", "S", "write"),
    ("out", "O", "write"),
)  # fmt: skip
"""(operand, type or its variable, access), in the order of the entry's `ptrs`."""
STRIDED = ("mixed_qkv", "a", "b", "state", "out")


def _pointer(ship: Ship, operand: str, dtype: str, access: Any) -> CpuPointer:
    found = ship.dtypes.get(dtype) or DTYPES[dtype]
    name = f"{operand}_out" if (operand, access) == ("state", "write") else operand
    return CpuPointer(name, operand, found.name, found.bytes, access)


def _packed_decode(ship: Ship) -> CpuPrimitive:
    types = {k: d.name for k, d in ship.dtypes.items()}
    name = variant_name(ship)
    sizes: tuple[tuple[str, Expr], ...] = (
        ("HV", ["dim", "HV"]), ("heads", ["arg", "heads"]), ("slots", ["dim", "SLOTS"]),
        ("K", ["arg", "key_dim"]), ("V", ["arg", "value_dim"]), ("norm", ["add", ["attr", "qk_l2norm"], 0]),
    )  # fmt: skip
    return CpuPrimitive(
        op=PACKED_DECODE.name,
        variant=name,
        template="gdn.c.j2",
        entry=f"{PACKED_DECODE.name}_{name}",
        params=(
            *(_pointer(ship, *row) for row in POINTERS),
            *(CpuNumber(n, "i64", e) for n, e in sizes),
            *(CpuNumber(f"{t}_stride", "i64", ["stride", t]) for t in STRIDED),
            CpuNumber("scale", "f64", ["arg", "scale"]),
        ),
        grid=["mul", ["dim", "B"], ["dim", "HV"]],
        when=[
            "and",
            # Whether it normalizes is a number of the call.
            *(p for p in type_predicates(PACKED_DECODE, ship) if p[0] != "attr"),
            ["le", ["arg", "key_dim"], MOST],
        ],
        constants={
            "io": types["T"], "state": types["S"], "bias": types["P"], "output": types["O"],
            "step": True, "index": 64 if ship.dtypes["I"] is I64 else 32, "most": MOST,
        },
    )  # fmt: skip


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(_packed_decode(s) for s in PACKED_DECODE.ship)
