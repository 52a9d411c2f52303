"""CUDA realizations of the chunked gated delta rule: three launches, K = V = 128, bf16 operands."""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer, PrimitivePlan, Step, Temp
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Op
from kiln.recipes.gdn_chunk import CHUNK, CHUNKED, OUTPUT, PREPARE, STATE

Expr: TypeAlias = Any

KERNELS = "kiln.backends.cuda.kernels.gdn_chunk"
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
VECTORS = ("q", "k", "v", "w", "u", "v_new", "states", "out")


@dataclass(frozen=True)
class Part:
    """How one of the three launches is cut."""

    op: Op
    kernel: str
    strided: tuple[str, ...]
    """Operands whose row strides it takes."""
    grid: tuple[Expr, Expr, Expr]
    constants: dict[str, int]
    warps: int
    name: str = ""
    when: Expr = True
    rank: int = 0
    """Which of several is taken, where more than one may be."""
    scale: bool = False
    min_sm: int = 80
    max_sm: int = 999


MULTIPROCESSORS = 132
"""Of an H100 or H200, for which the state's launches are cut."""
PAIRS: Expr = ["mul", SEQS, HV]
"""Sequences times value heads: each is walked chunk by chunk, cut into blocks of values."""
FEW: Expr = ["le", ["mul", PAIRS, DIM // 32], MULTIPROCESSORS]
SOME: Expr = ["le", ["mul", PAIRS, DIM // 64], MULTIPROCESSORS]


def _state(block: int, stages: int, when: Expr = True, rank: int = 0) -> Part:
    constants = {"BLOCK_V": block, "STAGES": stages}
    name = f"v{block}_s{stages}"
    return Part(STATE, "state", ("k",), (DIM // block, PAIRS, 1), constants, 4, name, when, rank)


def parts() -> tuple[Part, ...]:
    """The launches in order.

    The state of 8192 tokens in one sequence of 32 heads takes 164 us with 32 values and 3 stages, 224 with 64
    and 3, 255 with 64 and 2; of 48 heads 326, 220 and 291; of 8 sequences of 32 heads 1279, 880 and 866.
    H200. The state and the outputs in one launch, with no states in memory: 427 against 164 + 135 us.
    """
    prepare = Part(PREPARE, "prepare", ("k", "v", "g", "beta"), (CHUNKS, HV, 1), {"PART": 64}, 8)
    output = Part(OUTPUT, "output", ("q", "k", "out"), (1, CHUNKS, HV), {"BLOCK_V": DIM}, 4, scale=True)
    hopper = (_state(64, 2), _state(64, 3, SOME, 1), _state(32, 3, FEW, 2))
    return (
        # With mma.sync the inverse spills in 4 warps.
        replace(prepare, max_sm=89),
        replace(prepare, warps=4, min_sm=90, max_sm=119),
        replace(prepare, min_sm=120),
        replace(_state(32, 2), max_sm=89),
        *(replace(part, min_sm=90, max_sm=90) for part in hopper),
        replace(_state(32, 3), min_sm=100, max_sm=119),
        replace(_state(32, 2), min_sm=120),
        # 8 warps where mma.sync needs the registers: 4 spill 20 bytes.
        replace(output, warps=8, max_sm=89),
        replace(output, min_sm=90, max_sm=119),
        replace(output, warps=8, min_sm=120),
    )


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
    when += [] if part.when is True else [part.when]
    return CudaPrimitive(
        op=part.op.name,
        variant="_".join((*types.values(), *filter(None, (part.name,)))),
        kernel=f"{KERNELS}:{part.kernel}",
        params=(*pointers, *numbers),
        constants={"K": DIM, "V": DIM, **part.constants, "LANES": LANES},
        grid=part.grid,
        when=when,
        priority=part.rank,
        num_warps=part.warps,
        min_sm=part.min_sm,
        max_sm=part.max_sm,
    )


def _plan(output: str) -> PrimitivePlan:
    """All three, with what is between them in temporaries."""
    sizes = {n: ["arg", n] for n in ("heads", "key_dim", "value_dim")}
    seqs: Expr = ["dim", "SEQS"]
    values: Expr = ["mul", HV, ["arg", "value_dim"]]
    state: Expr = ["mul", values, ["arg", "key_dim"]]
    temps = (
        Temp("decay", "f32", (T, HV)),
        Temp("w", "bf16", (T, ["mul", HV, ["arg", "key_dim"]])),
        Temp("u", "bf16", (T, values)),
        Temp("states", "bf16", (["add", ["cdiv", T, CHUNK], seqs], state)),
        Temp("v_new", "bf16", (T, values)),
    )
    own = {t.name for t in CHUNKED.tensors}

    def step(op: Op, **args: Expr) -> Step:
        bind = {t.name: t.name if t.name in own else f"temp:{t.name}" for t in op.tensors}
        return Step(op.name, bind, {**sizes, "seqs": seqs, **args})

    return PrimitivePlan(
        op=CHUNKED.name,
        variant=f"bf16_{output}_chunks",
        when=["and", ["dtype", "q", "bf16"], ["dtype", "out", output],
              *(["eq", ["arg", f"{side}_dim"], DIM] for side in ("key", "value"))],
        temps=temps,
        steps=(step(PREPARE), step(STATE), step(OUTPUT, scale=["arg", "scale"])),
    )  # fmt: skip


OUTPUTS = ("bf16", "f32")
PRIMITIVES: tuple[CudaPrimitive, ...] = tuple(
    _primitive(part, {"X": "bf16", **({"O": o} if part.op is OUTPUT else {})})
    for part in parts()
    for o in (OUTPUTS if part.op is OUTPUT else OUTPUTS[:1])
)
PLANS: tuple[PrimitivePlan, ...] = tuple(_plan(o) for o in OUTPUTS)
