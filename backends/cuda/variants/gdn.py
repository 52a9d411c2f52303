"""CUDA realizations of the gated delta rule's decode step: K = V = 128, any number of heads."""

from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import BF16, DTYPES, F32
from kiln.ir.spec import Ship
from kiln.recipes.gdn import PACKED_DECODE

Expr: TypeAlias = Any

DIM = 128
FEW = 64
"""Rows up to which a program has 4 values instead of 8: at 16 rows of 48 heads 27.7 against 28.4 us, at 256
rows 408 against 400 (H200; the copy kernel's share is 0.86 and 0.95). 16 and 32 values and 2 or 4 warps are
slower
throughout."""
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


def _packed_decode(ship: Ship, few: bool) -> CudaPrimitive:
    hv, heads = ["dim", "HV"], ["arg", "heads"]
    when: list[Expr] = ["and", *type_predicates(PACKED_DECODE, ship), ["attr", "qk_l2norm", True]]
    when += [["eq", ["arg", f"{side}_dim"], DIM] for side in ("key", "value")]
    when += [["le", ["dim", "B"], FEW if few else MAX_ROWS]]
    block = 4 if few else 8
    when += [["divisible", ["stride", n], 16] for n in VECTORS]
    when += [["aligned", n, VECTOR] for n in VECTORS]
    return CudaPrimitive(
        op=PACKED_DECODE.name,
        variant=f"{variant_name(ship)}_k{DIM}_v{DIM}{'_few' if few else ''}",
        kernel="kiln.backends.cuda.kernels.gdn:packed_decode",
        params=(
            *(_pointer(ship, *row) for row in POINTERS),
            Number("HV", "i32", hv),
            Number("HEADS", "i32", heads),
            Number("SLOTS", "i64", ["dim", "SLOTS"]),
            Number("scale", "f32", ["arg", "scale"]),
            *_strides(),
        ),
        constants={
            "K": DIM,
            "V": DIM,
            "BLOCK_V": block,
            "L2NORM": True,
            "CACHE": "" if few else ".cg",
            "EVICT": "evict_first" if few else "",
        },
        grid=(["mul", hv, DIM // block], ["dim", "B"], 1),
        when=when,
        priority=int(few),
        num_warps=1,
    )


def _common(ship: Ship) -> bool:
    """Whether models have these types: worth a kernel for few rows."""
    return (ship.dtypes["T"], ship.dtypes["S"], ship.dtypes["O"]) == (BF16, F32, BF16)


PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(
    _packed_decode(ship, few)
    for ship in PACKED_DECODE.ship
    for few in ((False, True) if _common(ship) else (False,))
)
