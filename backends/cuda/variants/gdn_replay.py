"""CUDA realizations of the gated delta rule's decode step with a ring: K = V = 128, any number of heads."""

from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import DTypeVar, Ship
from kiln.recipes.gdn_replay import REPLAY_DECODE, WINDOW

Expr: TypeAlias = Any

DIM = 128
BLOCK_V, WARPS = 32, 2
"""Values and warps of a program. Rows at staggered positions, an H200 (copy 4.25 TB/s), us, ring of f32 / of
bf16 / gated_delta_rule_packed_decode in the same run:

    rows  48 value heads          32 value heads
    1     4.15   4.07   3.86      3.70   3.60   3.13
    16    22.1   19.6   27.4      16.5   15.3   19.3
    128   144    139    200       95.5   91.3   134
    256   281    280    396       186    186    267

So it pays from 16 rows on, 1.2 to 1.5 times, where bytes alone allow 1.6; a single row takes up to 0.6 us
longer. At 16 rows of 48 heads (bf16 ring) a step without a flush takes 16.6 to 17.4 us as the ring fills, one
where all rows flush 49.8: rows belong apart. Other tiles, geometric mean of all shapes, f32 and bf16 rings:
64 values and 4 warps 10 and 3 % slower, 16 and 2 20 and 15 %, 32 and 4 19 and 16 %. Five steps of the ring at
a time in a flush: 1 to 2 % faster, and spills on sm_80. Loads of the state past the first-level cache
(`.cg`): up to 7 % faster at 256 rows, 4 to 12 % slower at 16. Norms before the dots, and one step of the ring
at a time: 334 us where 281 are now."""
ENTRIES = 1 << (WINDOW - 1).bit_length()
"""Of the ring, in a tile."""
PART = 32
"""Keys that lie side by side in a tile: 128 bytes of a state's row."""
VECTOR = 16
"""Bytes that addresses are multiples of; rows of the state, of the rings and of q, k and v are too."""
MAX_ROWS = 65535
"""The second dimension of a grid."""
VECTORS = ("mixed_qkv", "state", "ring_d", "ring_k", "out")
"""Operands whose rows are read or written in vectors."""
STRIDES = {
    "mixed_qkv": "qkv", "a": "a", "b": "b", "state": "state", "ring_d": "d", "ring_k": "k", "ring_g": "g",
    "out": "out",
}  # fmt: skip
"""Operand -> what the kernel calls it."""


def _pointers(ship: Ship) -> tuple[Pointer, ...]:
    """Inputs in declared order, the written side of in/out operands, then the output."""
    present = [t for t in REPLAY_DECODE.tensors if t.name not in ship.absent]

    def pointer(name: str, dtype: str, access: Any, suffix: str = "") -> Pointer:
        align = VECTOR if name in VECTORS else DTYPES[dtype].bytes
        return Pointer(name + suffix, name, dtype, access, align)

    kinds = {
        t.name: (ship.dtypes[t.dtype.name] if isinstance(t.dtype, DTypeVar) else t.dtype).name
        for t in present
    }
    reads = [pointer(t.name, kinds[t.name], "read") for t in present if t.role != "out"]
    both = [pointer(t.name, kinds[t.name], "write", "_out") for t in present if t.role == "inout"]
    return (*reads, *both, *(pointer(t.name, kinds[t.name], "write") for t in present if t.role == "out"))


def _when(ship: Ship) -> Expr:
    sizes = {"key_dim": DIM, "value_dim": DIM, "window": WINDOW}
    return [
        "and",
        *type_predicates(REPLAY_DECODE, ship),
        *(["eq", ["arg", name], size] for name, size in sizes.items()),
        ["le", ["dim", "B"], MAX_ROWS],
        *(["divisible", ["stride", n], 16] for n in VECTORS),
        *(["aligned", n, VECTOR] for n in VECTORS),
    ]


def _replay_decode(ship: Ship) -> CudaPrimitive:
    hv = ["dim", "HV"]
    return CudaPrimitive(
        op=REPLAY_DECODE.name,
        variant=f"{variant_name(ship)}_k{DIM}_v{DIM}_w{WINDOW}",
        kernel="kiln.backends.cuda.kernels.gdn_replay:replay_decode",
        params=(
            *_pointers(ship),
            Number("HV", "i32", hv),
            Number("HEADS", "i32", ["arg", "heads"]),
            Number("SLOTS", "i64", ["dim", "SLOTS"]),
            Number("scale", "f32", ["arg", "scale"]),
            *(
                Number(f"{short}_stride", "i64", ["stride", n], 16 if n in VECTORS else 1)
                for n, short in STRIDES.items()
            ),
        ),
        constants={
            **dict.fromkeys(ship.absent), "K": DIM, "V": DIM, "WINDOW": WINDOW,
            "BLOCK_V": BLOCK_V, "ENTRIES": ENTRIES, "PART": PART,
        },
        grid=(["mul", hv, DIM // BLOCK_V], ["dim", "B"], 1),
        when=_when(ship),
        num_warps=WARPS,
    )  # fmt: skip


PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(_replay_decode(s) for s in REPLAY_DECODE.ship if not s.rare)
