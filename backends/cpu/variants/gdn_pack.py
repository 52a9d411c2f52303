"""CPU realizations of the packing of projections: one entry, in bytes, for each layout of a checkpoint."""

from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.compiler.plan import type_predicates, variant_name
from kiln.compiler.target import TARGETS
from kiln.ir.spec import Ship
from kiln.recipes.gdn_pack import PACK, ROWS

Expr: TypeAlias = Any

TIERS = tuple(t.tiers[0].name for t in TARGETS.values() if t.kind == "cpu")
"""Those that every CPU has. Weights are packed once, and 50 MB of bf16 took 9.3 ms in SSE2, 10.2 in AVX2 and
7.4 in AVX-512, one thread (np.copyto 6.4, NumPy's gather 27): not worth 17 KB of manifest a tier."""
SIZES: tuple[tuple[str, Expr], ...] = (
    ("heads", ["dim", "HEADS"]), ("keys", ["dim", "KEY_ROWS"]), ("values", ["dim", "VALUE_ROWS"]),
    ("rank", ["arg", "rank"]), ("size", ["dim", "SIZE"]),
)  # fmt: skip


def _pack(ship: Ship) -> CpuPrimitive:
    dtype, names = ship.dtypes["W"], [t.name for t in PACK.tensors if t.name not in ship.absent]
    split = "fused" in ship.absent
    return CpuPrimitive(
        op=PACK.name,
        variant=variant_name(ship),
        template="gdn_pack.c.j2",
        entry=f"kiln_{PACK.name}_{'split' if split else 'fused'}",
        params=(
            *(CpuPointer(n, n, dtype.name, dtype.bytes) for n in names[:-1]),
            CpuPointer(names[-1], names[-1], dtype.name, dtype.bytes, "write"),
            CpuNumber("row_bytes", "i64", ["mul", ["dim", "K"], dtype.bytes]),
            *(CpuNumber(n, "i64", e) for n, e in SIZES),
            *(CpuNumber(f"{n}_stride", "i64", ["mul", ["stride", n], dtype.bytes]) for n in names),
        ),
        grid=ROWS,
        when=["and", *type_predicates(PACK, ship)],
        constants={"split": split},
        tiers=TIERS,
    )


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(map(_pack, PACK.ship))
