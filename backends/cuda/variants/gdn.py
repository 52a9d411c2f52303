"""CUDA realizations of the gated delta rule's decode step: K = V = 128, any number of heads."""

from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Ship
from kiln.recipes.gdn import PACKED_DECODE

Expr: TypeAlias = Any

DIM = 128
BLOCK_V, WARPS = 8, 1
VECTOR = 16
"""Bytes that addresses are multiples of; rows of the state and of q, k and v are too."""
MAX_ROWS = 65535
"""The second dimension of a grid."""
POINTERS: tuple[tuple[str, str, str, str], ...] = (
    ("mixed_qkv", "mixed_qkv", "T", "read"),
    ("a", "a", "T", "read"),
    ("b", "b", "T", "read"),
    ("a_log", "a_log", "f32", "read"),
    ("dt_bias", "dt_bias", "P", "read"),
    ("state", "state", "S", "read"),
    ("state_indices", "state_indices", "I", "read"),
    ("state_out", "state", "S", "write"),
    ("out", "out", "O", "write"),
)
"""(parameter, operand, type or its variable, access)."""
VECTORS = ("mixed_qkv", "state", "out")
"""Operands whose rows are read or written in vectors."""


def _pointer(ship: Ship, name: str, operand: str, dtype: str, access: Any) -> Pointer:
    found = ship.dtypes[dtype].name if dtype in ship.dtypes else dtype
    return Pointer(name, operand, found, access, VECTOR if operand in VECTORS else DTYPES[found].bytes)


def _strides() -> tuple[Number, ...]:
    short = {"mixed_qkv": "qkv"}
    names = ("mixed_qkv", "a", "b", "state", "out")
    return tuple(
        Number(f"{short.get(n, n)}_stride", "i64", ["stride", n], 16 if n in VECTORS else 1) for n in names
    )


def _packed_decode(ship: Ship) -> CudaPrimitive:
    hv, heads = ["dim", "HV"], ["arg", "heads"]
    when: list[Expr] = ["and", *type_predicates(PACKED_DECODE, ship), ["attr", "qk_l2norm", True]]
    when += [["eq", ["arg", f"{side}_dim"], DIM] for side in ("key", "value")]
    when += [["le", ["dim", "B"], MAX_ROWS]]
    when += [["divisible", ["stride", n], 16] for n in VECTORS]
    when += [["aligned", n, VECTOR] for n in VECTORS]
    return CudaPrimitive(
        op=PACKED_DECODE.name,
        variant=f"{variant_name(ship)}_k{DIM}_v{DIM}",
        kernel="kiln.backends.cuda.kernels.gdn:packed_decode",
        params=(
            *(_pointer(ship, *row) for row in POINTERS),
            Number("HV", "i32", hv),
            Number("HEADS", "i32", heads),
            Number("SLOTS", "i64", ["dim", "SLOTS"]),
            Number("scale", "f32", ["arg", "scale"]),
            *_strides(),
        ),
        constants={"K": DIM, "V": DIM, "BLOCK_V": BLOCK_V, "L2NORM": True},
        grid=(["mul", hv, DIM // BLOCK_V], ["dim", "B"], 1),
        when=when,
        num_warps=WARPS,
    )


PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(_packed_decode(ship) for ship in PACKED_DECODE.ship)
