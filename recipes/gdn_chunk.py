"""The gated delta rule over whole sequences (KERNEL-GDN-AOT-BF16): prefill, in chunks where that is faster.
No target is named in this file.

Token by token: S = exp(g) S; S += beta (v - S k) k^T; out = scale S q, as in `kiln.recipes.gdn`. In chunks
of C tokens, with G the sum of g within its chunk: A[r, s] = beta_r (k_r . k_s) exp(G_r - G_s) below the
diagonal, T = (I + A)^-1, u = T (beta v), w = T (beta exp(G) k); then along the chunks v_new = u - w S^T, S =
exp(G_last) S + (exp(G_last - G) v_new)^T k, and out = scale (exp(G) q S^T + lower(q k^T exp(G_r - G_s))
v_new) with the S before the chunk.

Sequences are rows [cu_seqlens[n], cu_seqlens[n + 1]). Whatever cu_seqlens holds, they cover every row once:
the first begins at 0, the last ends at T, a boundary that is lower than one before it counts as that one.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F32, I32
from kiln.ir.spec import Contract, DTypeVar, Op, Scalar, Ship, Tensor

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-GDN-AOT-BF16"
CHUNK = 64
"""Tokens of a chunk in every kernel. The formulas hold for any size, which their references take."""
X = DTypeVar("X", (BF16, F32))
O = DTypeVar("O", (BF16, F32))  # noqa: E741  the output's type

ENVELOPE = Contract("envelope", rel_l2=2.0**-7, max_eps=2.0**17)
"""Relative L2: bf16 operands of five products a chunk (emulated in NumPy at 512 tokens: out 3.7e-3, state
2.8e-3). Worst element, relative to the largest of its output: 2**-6 of an f32 state."""

_KEYS: Any = ["mul", ["dim", "HEADS"], ["dim", "KEY_DIM"]]
_VALUES: Any = ["mul", ["dim", "HV"], ["dim", "VALUE_DIM"]]
_STATE: Any = ["mul", _VALUES, ["dim", "KEY_DIM"]]
_CHUNKS: Any = ["add", ["cdiv", ["dim", "T"], CHUNK], ["dim", "SEQS"]]

Q = Tensor("q", X, ("T", _KEYS), doc="normalized by the caller")
K = Tensor("k", X, ("T", _KEYS), doc="normalized by the caller")
V = Tensor("v", X, ("T", _VALUES))
G = Tensor("g", F32, ("T", "HV"), doc="log of the decay, at most 0")
BETA = Tensor("beta", F32, ("T", "HV"), doc="update strength")
BOUNDS = Tensor(
    "cu_seqlens",
    I32,
    (["add", ["dim", "SEQS"], 1],),
    layout="dense",
    doc="first row of each sequence, then T",
)
INITIAL = Tensor(
    "initial_state", F32, ("SEQS", _STATE), layout="dense", doc="[value head, value, key] of each sequence"
)
FINAL = Tensor("final_state", F32, ("SEQS", _STATE), "out", layout="dense", doc="after the last token")
OUT = Tensor("out", O, ("T", _VALUES), "out", layout="dense", doc="[value head, value] of every token")
DECAY = Tensor(
    "decay", F32, ("T", "HV"), "out", layout="dense", doc="G: the sum of g within its chunk so far"
)
W = Tensor("w", BF16, ("T", ["mul", ["dim", "HV"], ["dim", "KEY_DIM"]]), "out", layout="dense")
U = Tensor("u", BF16, ("T", _VALUES), "out", layout="dense")
STATES = Tensor(
    "states",
    BF16,
    (_CHUNKS, _STATE),
    "out",
    layout="dense",
    doc="[value head, key, value] before every chunk",
)
V_NEW = Tensor("v_new", BF16, ("T", _VALUES), "out", layout="dense")

HEADS = Scalar("heads", I32, minimum=1, doc="key heads; value head h has key head h * heads / HV")
SCALE = Scalar("scale", F32, positive=True, doc="of q; models use key_dim ** -0.5")
DIMS = (Scalar("key_dim", I32, default=128, minimum=1), Scalar("value_dim", I32, default=128, minimum=1))
SEQS = Scalar("seqs", I32, minimum=1, doc="sequences")

LIMITS: tuple[tuple[list[Any], str], ...] = (
    (
        ["eq", ["mod", ["dim", "HV"], ["dim", "HEADS"]], 0],
        "HV must be divisible by H: every key head serves as many value heads",
    ),
    (["lt", ["dim", "T"], 2**31], "rows of 2**31 and more do not fit 32-bit boundaries: split the batch"),
)

COVERED: tuple[list[Any], str] = (
    ["or", ["ge", ["dim", "SEQS"], 1], ["eq", ["dim", "T"], 0]],
    "rows need a sequence: pass cu_seqlens with two entries or more",
)
"""Without a sequence nobody would write out."""


def read(t: Tensor) -> Tensor:
    """What one step wrote, as another reads it."""
    return Tensor(t.name, t.dtype, t.shape, "in", t.layout, doc=t.doc)


def sequences(cu_seqlens: Array, rows: int) -> list[tuple[int, int]]:
    """(first row, end) of every sequence."""
    inner = np.clip(np.maximum.accumulate([0, *cu_seqlens[1:-1].tolist()]), 0, rows)
    edges = [*map(int, inner), rows]
    return list(pairwise(edges))


def chunks(cu_seqlens: Array, rows: int, size: int = CHUNK) -> Iterator[tuple[int, int, int]]:
    """(sequence, first row, end) of every chunk, in order."""
    for n, (begin, end) in enumerate(sequences(cu_seqlens, rows)):
        yield from ((n, at, min(at + size, end)) for at in range(begin, end, size))


class Held(NamedTuple):
    """Element types of what the parts of a chunked run leave for each other, by default those of kernels."""

    matrices: Any = BF16.numpy
    numbers: Any = np.float32
    """Sums of decays, their exponentials, and results."""


KERNELS = Held()
EXACT = Held(np.float64, np.float64)
"""Nothing is rounded: the formulas alone."""


def by_head(x: Array, heads: int, repeat: int = 1) -> Array:
    """[T, heads * D] as [heads * repeat, T, D] in float64."""
    split = x.astype(np.float64).reshape(len(x), heads, x.shape[1] // heads).transpose(1, 0, 2)
    return np.repeat(split, repeat, axis=0)


def flat(x: Array) -> Array:
    """[heads, T, D] as [T, heads * D]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], x.shape[0] * x.shape[2])


def recurrence(
    *, q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array, initial_state: Array,
    heads: int,
    scale: float, key_dim: int = 128, value_dim: int = 128,
) -> tuple[Array, Array]:  # fmt: skip
    """(out [T, HV * V], final_state) in float64: the recurrence, token by token."""
    value_heads = g.shape[1]
    keys, queries = (by_head(x, heads, value_heads // heads) for x in (k, q))
    values = by_head(v, value_heads)
    state = initial_state.astype(np.float64).reshape(-1, value_heads, value_dim, key_dim)
    out = np.zeros((value_heads, len(q), value_dim))
    with np.errstate(all="ignore"):
        for n, (begin, end) in enumerate(sequences(cu_seqlens, len(q))):
            for t in range(begin, end):
                s = state[n] * np.exp(g[t].astype(np.float64))[:, None, None]
                d = beta[t, :, None] * (values[:, t] - np.einsum("hvk,hk->hv", s, keys[:, t]))
                state[n] = s + d[:, :, None] * keys[:, t][:, None, :]
                out[:, t] = np.einsum("hvk,hk->hv", state[n], queries[:, t]) * np.float64(np.float32(scale))
        return flat(out), state.reshape(initial_state.shape)


def _chunk(**given: Any) -> tuple[Array, Array]:
    """(out before its rounding, final_state), f32."""
    out, final = recurrence(**given)
    return out.astype(np.float32), final.astype(np.float32)


def _domain(*, heads: int, **given: Any) -> dict[str, Array]:
    """Finite numbers, of which keys and queries have length 1; decays; strengths between 0 and 1: what the
    recurrence is stable for. The products of a chunk carry what is not finite to its earlier tokens too."""
    names = ("q", "k", "v", "g", "beta", "initial_state")
    inside: dict[str, Array] = {n: np.nan_to_num(given[n].astype(np.float32), False, 0, 0, 0) for n in names}

    def normal(x: Array) -> Array:
        split: Array = x.reshape(len(x), heads, -1)
        length = np.sqrt((split * split).sum(axis=-1, keepdims=True) + np.float32(1e-6))
        unit: Array = (split / length).reshape(x.shape)
        return unit

    strength = 1 / (1 + np.exp(-inside["beta"]))
    own = {"q": normal(inside["q"]), "k": normal(inside["k"]), "g": -np.abs(inside["g"]), "beta": strength}
    return {**inside, **own}


def lower(decay: Array, begin: int, end: int, diagonal: int) -> Array:
    """exp(G_r - G_s) on and below a diagonal, 0 above: [HV, rows, rows]."""
    part = decay[begin:end].T.astype(np.float64)
    inside = np.tril(np.ones((end - begin, end - begin), bool), diagonal)
    return np.exp(np.where(inside, part[:, :, None] - part[:, None, :], -np.inf))


def _prepare(
    *, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array, heads: int, seqs: int,
    key_dim: int = 128,
    value_dim: int = 128, chunk: int = CHUNK, held: Held = KERNELS,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(decay, w, u): see the module's formulas."""
    del seqs, key_dim, value_dim
    value_heads = g.shape[1]
    keys, values = by_head(k, heads, value_heads // heads), by_head(v, value_heads)
    strength = beta.T.astype(np.float64)[:, :, None]
    decay, w, u = np.zeros(g.shape, held.numbers), np.zeros_like(keys), np.zeros_like(values)
    with np.errstate(all="ignore"):
        for _, begin, end in chunks(cu_seqlens, len(k), chunk):
            decay[begin:end] = np.cumsum(g[begin:end], axis=0, dtype=held.numbers)
            part, b = keys[:, begin:end], strength[:, begin:end]
            a = b * (part @ part.transpose(0, 2, 1)) * lower(decay, begin, end, -1)
            inverse = np.linalg.inv(np.eye(end - begin) + np.nan_to_num(a))
            u[:, begin:end] = inverse @ (b * values[:, begin:end])
            w[:, begin:end] = inverse @ (b * np.exp(decay[begin:end].T)[:, :, None] * part)
    return decay, flat(w).astype(held.matrices), flat(u).astype(held.matrices)


def _state(
    *, k: Array, w: Array, u: Array, decay: Array, initial_state: Array, cu_seqlens: Array, heads: int,
    seqs: int,
    key_dim: int = 128, value_dim: int = 128, chunk: int = CHUNK, held: Held = KERNELS,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(states, v_new, final_state): see the module's formulas."""
    value_heads = decay.shape[1]
    keys = by_head(k, heads, value_heads // heads)
    weights, values = by_head(w, value_heads), by_head(u, value_heads)
    state = initial_state.astype(np.float64).reshape(-1, value_heads, value_dim, key_dim)
    states = np.zeros((-(-len(k) // chunk) + seqs, value_heads, key_dim, value_dim), held.matrices)
    fresh = np.zeros_like(values)
    for at, (n, begin, end) in enumerate(chunks(cu_seqlens, len(k), chunk)):
        states[at] = state[n].transpose(0, 2, 1).astype(held.matrices)
        fresh[:, begin:end] = values[:, begin:end] - weights[:, begin:end] @ states[at].astype(np.float64)
        last = decay[end - 1].astype(np.float64)
        kept = np.exp(last[:, None] - decay[begin:end].T)[:, :, None] * fresh[:, begin:end]
        state[n] = np.exp(last)[:, None, None] * state[n] + kept.transpose(0, 2, 1) @ keys[:, begin:end]
    final = state.reshape(initial_state.shape).astype(held.numbers)
    return states.reshape(len(states), -1), flat(fresh).astype(held.matrices), final


def _output(
    *, q: Array, k: Array, v_new: Array, states: Array, decay: Array, cu_seqlens: Array, heads: int,
    scale: float,
    seqs: int, key_dim: int = 128, value_dim: int = 128, chunk: int = CHUNK, held: Held = KERNELS,
) -> tuple[Array]:  # fmt: skip
    """(out [T, HV * V] before its rounding,): see the module's formulas."""
    del seqs
    value_heads = decay.shape[1]
    keys, queries = (by_head(x, heads, value_heads // heads) for x in (k, q))
    values = by_head(v_new, value_heads)
    pool = states.astype(np.float64).reshape(-1, value_heads, key_dim, value_dim)
    out = np.zeros_like(values)
    for at, (_, begin, end) in enumerate(chunks(cu_seqlens, len(q), chunk)):
        query = queries[:, begin:end]
        inner = query @ keys[:, begin:end].transpose(0, 2, 1) * lower(decay, begin, end, 0)
        grown = np.exp(decay[begin:end].T.astype(np.float64))[:, :, None]
        out[:, begin:end] = (grown * (query @ pool[at]) + inner @ values[:, begin:end]) * np.float64(
            np.float32(scale)
        )
    return (flat(out).astype(held.numbers),)


def internal(
    name: str,
    operands: tuple[Tensor | Scalar, ...],
    doc: str,
    reference: Any,
    constraints: tuple[tuple[list[Any], str], ...] = LIMITS,
    **more: Any,
) -> Op:
    return Op(
        name,
        FAMILY,
        operands,
        rows="T",
        width="HV",
        constraints=constraints,
        contract=ENVELOPE,
        doc=doc,
        reference=reference,
        **more,
    )


CHUNKED = internal(
    "gated_delta_rule_chunk",
    (Q, K, V, G, BETA, BOUNDS, INITIAL, HEADS, SCALE, *DIMS, OUT, FINAL),
    "The gated delta rule over sequences of any lengths from normalized q and k, log decays and strengths: "
    "outputs of every token, and the "
    "state after each sequence. CUDA works in chunks of 64 tokens; CPUs go token by token in f32.",
    _chunk,
    (*LIMITS, COVERED),
    domain=_domain,
    ship=(Ship({"X": BF16, "O": BF16}), Ship({"X": BF16, "O": F32}), Ship({"X": F32, "O": F32}, rare=True)),
)
PREPARE = internal(
    "gated_delta_rule_chunk_prepare",
    (K, V, G, BETA, BOUNDS, HEADS, SEQS, *DIMS, DECAY, W, U),
    "Internal, the first part of gated_delta_rule_chunk: what each chunk needs of itself.",
    _prepare,
)
STATE = internal(
    "gated_delta_rule_chunk_state",
    (K, *map(read, (W, U, DECAY)), INITIAL, BOUNDS, HEADS, SEQS, *DIMS, STATES, V_NEW, FINAL),
    "Internal, the second part of gated_delta_rule_chunk: the state along the chunks of each sequence.",
    _state,
)
OUTPUT = internal(
    "gated_delta_rule_chunk_output",
    (Q, K, *map(read, (V_NEW, STATES, DECAY)), BOUNDS, HEADS, SCALE, SEQS, *DIMS, OUT),
    "Internal, the last part of gated_delta_rule_chunk: the outputs of each chunk.",
    _output,
)

OPS: tuple[Op, ...] = (CHUNKED, PREPARE, STATE, OUTPUT)
