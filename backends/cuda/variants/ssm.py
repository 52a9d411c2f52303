"""CUDA realizations of causal convolutions and of the split after them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import DTypeVar, Op, Ship
from kiln.recipes.ssm import FORWARD, POST_CONV, UPDATE

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.ssm"
WIDTH = 4
"""Taps: GDN, Mamba, KDA and Nemotron all have 4; CPUs take 2 to 4."""
DIM = 128
VECTOR = 16
LANES = 256
"""The most sequences: a program looks through all to find its own."""
CHANNELS, PIECE, STEP = 256, 32, 8
"""Channels and tokens of a program of the forward convolution, and rows that are read ahead.

16384 tokens of 10240 channels take 173 us, 0.91 of the copy bandwidth (flash-linear-attention's kernel 248;
H200). Blocks of 512 with steps of 4: 174 to 176 at 16, 32 and 64 tokens; 1024 with 8 bytes a thread 176, with
16 bytes 197 to 217; 256 with 16 bytes, one warp, 194. Whole tiles of tokens by channels, each of their rows
read four times from the cache: 646.
"""
BLOCK = 256
"""Channels of a program of one step, in 4 warps: 1.75 us at 1 row of 8192 channels, 2.97, 5.00 and 14.0 at
16, 64 and 256 rows of 10240 (flash-linear-attention, which has no indices of states to wait for: 1.39,
3.11, 7.97 and 26.9; H200). In 1 or 2 warps 0 to 9 % slower below 64 rows, 4 % faster at 256; blocks of 128
6 % slower there. Several rows a program: slower but at 256.
"""
ROWS = 16
"""Tokens of a program of the split."""
MAX_GRID = 65535
C: Expr = ["dim", "C"]
HV: Expr = ["dim", "HV"]
NAMES = {"conv_state": "state", "mixed_qkv": "qkv"}


def _pointers(op: Op, ship: Ship) -> tuple[Pointer, ...]:
    """Inputs in declared order, the written side of in/out operands, then outputs; rows in vectors but for
    gates."""
    kinds = {
        t.name: ship.dtypes[t.dtype.name] if isinstance(t.dtype, DTypeVar) else t.dtype for t in op.tensors
    }
    gates = ("a", "b", "g", "beta", "a_log", "dt_bias", "bias", "weight")

    def pointer(name: str, access: Any, suffix: str = "") -> Pointer:
        dtype = kinds[name]
        wide = dtype.is_float and name not in gates
        return Pointer(name + suffix, name, dtype.name, access, VECTOR if wide else dtype.bytes)

    present = [t for t in op.tensors if t.name not in ship.absent]
    reads = [pointer(t.name, "read") for t in present if t.role != "out"]
    both = [pointer(t.name, "write", "_out") for t in present if t.role == "inout"]
    return (*reads, *both, *(pointer(t.name, "write") for t in present if t.role == "out"))


def _stride(name: str, unit: Any = 1) -> Number:
    return Number(f"{NAMES.get(name, name)}_stride", "i64", ["stride", name], unit)


def _when(
    op: Op, ship: Ship, pointers: Sequence[Pointer], numbers: Sequence[Number], more: Sequence[Expr]
) -> Expr:
    when: list[Expr] = ["and", *type_predicates(op, ship), *more]
    when += [["divisible", n.value, 16] for n in numbers if n.divisible_by == 16]
    aligned = dict.fromkeys(p.operand for p in pointers if p.align == VECTOR)
    return when + [["aligned", n, VECTOR] for n in aligned]


def _primitive(
    op: Op, kernel: str, ship: Ship, numbers: tuple[Number, ...], constants: Mapping[str, Any], grid: Any,
    more: Sequence[Expr],
) -> CudaPrimitive:  # fmt: skip
    pointers = _pointers(op, ship)
    return CudaPrimitive(
        op=op.name,
        variant=variant_name(ship),
        kernel=f"{KERNELS}:{kernel}",
        params=(*pointers, *numbers),
        constants={**dict.fromkeys(ship.absent), **constants},
        grid=grid,
        when=_when(op, ship, pointers, numbers, more),
    )


def _convolution(op: Op, kernel: str, ship: Ship) -> CudaPrimitive:
    forward = op is FORWARD
    block = CHANNELS if forward else BLOCK
    sizes = [Number("T", "i32", ["dim", "T"]), Number("SEQS", "i32", ["dim", "SEQS"])] if forward else []
    numbers = (
        *sizes, Number("C", "i32", C, 16), Number("SLOTS", "i64", ["dim", "SLOTS"]), _stride("x", 16),
        _stride("conv_state", 16),
    )  # fmt: skip
    constants = {"SILU": ship.attrs["silu"], "BLOCK": block}
    pieces: Expr = ["add", ["cdiv", ["dim", "T"], PIECE], ["dim", "SEQS"]]
    down: Expr = pieces if forward else ["dim", "B"]
    more: list[Expr] = [["eq", ["dim", "WIDTH"], WIDTH], ["le", down, MAX_GRID]]
    if forward:
        constants |= {"PIECE": PIECE, "STEP": STEP, "LANES": LANES}
        more.append(["le", ["dim", "SEQS"], LANES])
    return _primitive(op, kernel, ship, numbers, constants, (["cdiv", C, block], down, 1), more)


def _post_conv(ship: Ship) -> CudaPrimitive:
    heads: Expr = ["arg", "heads"]
    numbers = (
        Number("T", "i32", ["dim", "T"]), Number("HV", "i32", HV), Number("HEADS", "i32", heads),
        _stride("mixed_qkv", 16),
        _stride("a"), _stride("b"),
    )  # fmt: skip
    more: list[Expr] = [["eq", ["arg", f"{side}_dim"], DIM] for side in ("key", "value")]
    more += [["lt", ["dim", "T"], 2**31], ["le", ["add", heads, HV], MAX_GRID]]
    grid = (["cdiv", ["dim", "T"], ROWS], ["add", heads, HV], 1)
    return _primitive(POST_CONV, "post_conv", ship, numbers, {"K": DIM, "V": DIM, "ROWS": ROWS}, grid, more)


def _common(op: Op) -> tuple[Ship, ...]:
    return tuple(s for s in op.ship if s.dtypes["T"] is DTYPES["bf16"])


PRIMITIVES: tuple[CudaPrimitive, ...] = (
    *(
        _convolution(op, kernel, s)
        for op, kernel in ((UPDATE, "update"), (FORWARD, "forward"))
        for s in _common(op)
    ),
    *map(_post_conv, _common(POST_CONV)),
)
