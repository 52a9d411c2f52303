"""CUDA realizations of the chunked gated delta rule, K = V = 128, bf16 operands: two launches on Hopper,
where the second walks along the chunks and makes outputs as it goes, and three elsewhere.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer, PrimitivePlan, Step, Temp
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Op
from kiln.recipes.gdn_chunk import CHUNK, CHUNKED, OUTPUT, PREPARE, STATE
from kiln.recipes.gdn_chunk_walk import SOLVE, WALK

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.gdn_chunk"
"""Those of the two launches lie in modules of their own, `_solve` and `_walk`."""
DIM = 128
VECTOR = 16
"""Bytes that addresses, and elements that row strides, are multiples of where rows are read in vectors."""
LANES = 256
"""The most sequences: a program looks through all to find its own."""
T: Expr = ["dim", "T"]
HV: Expr = ["dim", "HV"]
SEQS: Expr = ["arg", "seqs"]
CHUNKS: Expr = ["add", ["cdiv", T, CHUNK], SEQS]
_LETTERS = {"q": "X", "k": "X", "v": "X", "out": "O"}
"""Operands of a type that calls choose."""
VECTORS = ("q", "k", "v", "w", "u", "v_new", "states", "out", "blocks", "factors")
STRIDE = 2**26
"""The most that the walk multiplies by the rows of one copy, 16, in 32 bits."""


@dataclass(frozen=True)
class Part:
    """How one of the launches is cut."""

    op: Op
    kernel: str
    """`_module:function` behind the family's module, or `:function`."""
    strided: tuple[str, ...]
    """Operands whose row strides it takes."""
    grid: tuple[Expr, Expr, Expr]
    constants: dict[str, int]
    warps: int
    name: str = ""
    more: tuple[Expr, ...] = ()
    """What it needs beyond what all need."""
    scale: bool = False
    min_sm: int = 80
    max_sm: int = 999


SIZES = {"K": DIM, "V": DIM}
PAIRS: Expr = ["mul", SEQS, HV]
"""Sequences times value heads: each is walked chunk by chunk, cut into blocks of values."""


def _state(block: int, stages: int) -> Part:
    constants = {**SIZES, "BLOCK_V": block, "STAGES": stages}
    name = f"v{block}_s{stages}"
    return Part(STATE, ":state", ("k",), (DIM // block, PAIRS, 1), constants, 4, name)


def three_launches() -> tuple[Part, ...]:
    """What each chunk needs of itself, the state along the chunks, the outputs.

    On an H200, where two launches are taken, these took 178, 164 and 135 us for one sequence of 8192 tokens
    and 32 heads.
    """
    prepare = Part(
        PREPARE, ":prepare", ("k", "v", "g", "beta"), (CHUNKS, HV, 1), {**SIZES, "PART": 64}, 8
    )
    output = Part(
        OUTPUT, ":output", ("q", "k", "out"), (1, CHUNKS, HV), {**SIZES, "BLOCK_V": DIM}, 4, scale=True
    )
    return (
        # With mma.sync the inverse spills in 4 warps.
        replace(prepare, max_sm=89),
        replace(prepare, warps=4, min_sm=100, max_sm=119),
        replace(prepare, min_sm=120),
        replace(_state(32, 2), max_sm=89),
        replace(_state(32, 3), min_sm=100, max_sm=119),
        replace(_state(32, 2), min_sm=120),
        # 8 warps where mma.sync needs the registers: 4 spill 20 bytes.
        replace(output, warps=8, max_sm=89),
        replace(output, min_sm=100, max_sm=119),
        replace(output, warps=8, min_sm=120),
    )


WALK_BLOCK = 64
"""Values of a program: a warpgroup's rows of wgmma."""


def two_launches() -> tuple[Part, ...]:
    """What each chunk needs of itself, then outputs and states along the chunks.

    On an H200 solve and walk take 12 + 26 us at 1 x 1024 tokens of 32 heads, 74 + 171 at 1 x 8192, 103 +
    177 at 1 x 8192 of 48 heads, 77 + 93 at 4 x 2048, 504 + 710 at 8 x 8192. flash-linear-attention's
    pipeline takes 93, 557, 804, 553 at the first four; the three launches took 70, 467, 679, 435, 3324.

    Tried and not kept, walk of 1 x 8192 tokens of 32 heads, where it takes 171 us. Five products 64 wide
    instead of three 128 wide: 167, but outputs 3.3e-3 from the recurrence instead of 2.4e-3, and 1.6e-2
    instead of 3e-3 where all keys are one. Three stages: 170, and 16 % slower at 8 sequences. 128 values
    in 8 warps: 301, no faster at 8 sequences. Copies begun at the end of a step: 282. Stages of memory of
    their own and two steps in the loop, so that the fence before a product does not wait for copies: 167,
    but 203 against 177 at 48 heads; with outputs stored a step later 181. Without copies the steps alone
    take 134. Solve with wgmma on whole 64 x 64 matrices in 4 warps: 129 us instead of 71.
    """
    small = tuple(["le", ["stride", name], STRIDE] for name in ("q", "k", "v", "out"))
    solve = Part(
        SOLVE, "_solve:solve", ("q", "k", "g", "beta"), (HV, CHUNKS, 1), {}, 1, scale=True,
        min_sm=90, max_sm=90,
    )  # fmt: skip
    walk = Part(
        WALK, "_walk:walk", ("q", "k", "v", "out"), (DIM // WALK_BLOCK, PAIRS, 1),
        {"BLOCK_V": WALK_BLOCK}, 4, more=small, scale=True, min_sm=90, max_sm=90,
    )  # fmt: skip
    return solve, walk


def _dtype(name: str, declared: Any, types: dict[str, str]) -> str:
    return types[_LETTERS[name]] if name in _LETTERS else str(declared.name)


def _primitive(part: Part, types: dict[str, str]) -> CudaPrimitive:
    tensors = {t.name: t for t in part.op.tensors}
    pointers = []
    for name, t in tensors.items():
        dtype = _dtype(name, t.dtype, types)
        align = VECTOR if name in VECTORS else DTYPES[dtype].bytes
        pointers.append(Pointer(name, name, dtype, "read" if t.role == "in" else "write", align))
    numbers = [Number("T", "i32", T), Number("SEQS", "i32", SEQS), Number("HV", "i32", HV)]
    numbers += [Number("HEADS", "i32", ["arg", "heads"])]
    numbers += [Number("scale", "f32", ["arg", "scale"])] if part.scale else []
    numbers += [Number(f"{n}_stride", "i64", ["stride", n], 16 if n in VECTORS else 1) for n in part.strided]
    when: list[Expr] = ["and", *(["dtype", n, types[x]] for n, x in _LETTERS.items() if n in tensors)]
    when += [["eq", ["arg", f"{side}_dim"], DIM] for side in ("key", "value")]
    when += [["le", SEQS, LANES], ["le", ["mul", SEQS, HV], 65535], ["le", CHUNKS, 65535]]
    when += [["divisible", n.value, 16] for n in numbers if n.divisible_by == 16]
    when += [["aligned", n, VECTOR] for n in tensors if n in VECTORS]
    when += part.more
    return CudaPrimitive(
        op=part.op.name,
        variant="_".join((*types.values(), *filter(None, (part.name,)))),
        kernel=f"{KERNELS}{part.kernel}",
        params=(*pointers, *numbers),
        constants={**part.constants, "LANES": LANES},
        grid=part.grid,
        when=when,
        num_warps=part.warps,
        min_sm=part.min_sm,
        max_sm=part.max_sm,
    )


VALUES: Expr = ["mul", HV, ["arg", "value_dim"]]
STATES: Expr = ["mul", VALUES, ["arg", "key_dim"]]
ALL_CHUNKS: Expr = ["add", ["cdiv", T, CHUNK], ["dim", "SEQS"]]
BETWEEN_THREE = (
    Temp("decay", "f32", (T, HV)),
    Temp("w", "bf16", (T, ["mul", HV, ["arg", "key_dim"]])),
    Temp("u", "bf16", (T, VALUES)),
    Temp("states", "bf16", (ALL_CHUNKS, STATES)),
    Temp("v_new", "bf16", (T, VALUES)),
)
BETWEEN_TWO = (
    Temp("blocks", "bf16", (ALL_CHUNKS, ["mul", HV, 2 * CHUNK * CHUNK])),
    Temp("factors", "f32", (ALL_CHUNKS, ["mul", HV, 2 * CHUNK])),
)


def _step(op: Op) -> Step:
    own = {t.name for t in CHUNKED.tensors}
    bind = {t.name: t.name if t.name in own else f"temp:{t.name}" for t in op.tensors}
    args = {n: ["arg", n] for n in ("heads", "key_dim", "value_dim")} | {"seqs": ["dim", "SEQS"]}
    scaled = any(s.name == "scale" for s in op.scalars)
    return Step(op.name, bind, args | ({"scale": ["arg", "scale"]} if scaled else {}))


def _plan(name: str, ops: tuple[Op, ...], temps: tuple[Temp, ...], output: str) -> PrimitivePlan:
    """The launches one after another, with what is between them in temporaries. A target has the plan whose
    kernels it has."""
    return PrimitivePlan(
        op=CHUNKED.name,
        variant=f"bf16_{output}_{name}",
        when=["and", ["dtype", "q", "bf16"], ["dtype", "out", output],
              *(["eq", ["arg", f"{side}_dim"], DIM] for side in ("key", "value"))],
        temps=temps,
        steps=tuple(map(_step, ops)),
    )  # fmt: skip


OUTPUTS = ("bf16", "f32")
PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(
    _primitive(part, {"X": "bf16", **({"O": o} if part.op in (OUTPUT, WALK) else {})})
    for part in (*three_launches(), *two_launches())
    for o in (OUTPUTS if part.op in (OUTPUT, WALK) else OUTPUTS[:1])
)
PLANS: tuple[PrimitivePlan, ...] = tuple(
    _plan(name, ops, temps, output)
    for name, ops, temps in (
        ("chunks", (PREPARE, STATE, OUTPUT), BETWEEN_THREE),
        ("walk", (SOLVE, WALK), BETWEEN_TWO),
    )
    for output in OUTPUTS
)
