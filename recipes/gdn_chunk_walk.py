"""The chunked gated delta rule in two parts, for devices on which one program can walk along the chunks of a
sequence and make outputs as it goes. No target is named in this file.

With A, G and T = (I + A)^-1 of `kiln.recipes.gdn_chunk`, a chunk needs two matrices of itself: solve = T
diag(beta), and scores = scale lower(q k^T exp(G_r - G_s)) solve. Then, with the S before the chunk, r = v -
exp(G) k S^T is what the keys do not recall yet; out = scale exp(G) q S^T + scores r, and S = exp(G_last) S +
(exp(G_last - G) solve r)^T k. Neither w, u, v_new nor the states go through memory.
"""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F32
from kiln.ir.spec import Op, Tensor
from kiln.recipes.gdn_chunk import (
    BETA,
    BOUNDS,
    CHUNK,
    DIMS,
    FINAL,
    HEADS,
    INITIAL,
    KERNELS,
    OUT,
    SCALE,
    SEQS,
    G,
    Held,
    K,
    Q,
    V,
    by_head,
    chunks,
    flat,
    internal,
    lower,
    read,
)  # fmt: skip

Array: TypeAlias = np.ndarray[Any, Any]

_CHUNKS: Any = ["add", ["cdiv", ["dim", "T"], CHUNK], ["dim", "SEQS"]]
BLOCKS = Tensor(
    "blocks",
    BF16,
    (_CHUNKS, ["mul", ["dim", "HV"], 2 * CHUNK * CHUNK]),
    "out",
    layout="dense",
    doc="[value head, solve and scores, row, column] of every chunk",
)
FACTORS = Tensor(
    "factors",
    F32,
    (_CHUNKS, ["mul", ["dim", "HV"], 2 * CHUNK]),
    "out",
    layout="dense",
    doc="[value head, exp(G) and exp(G_last - G), row] of every chunk",
)


def _solve(
    *, q: Array, k: Array, g: Array, beta: Array, cu_seqlens: Array, heads: int, scale: float, seqs: int,
    key_dim: int = 128, value_dim: int = 128, chunk: int = CHUNK, held: Held = KERNELS,
) -> tuple[Array, Array]:  # fmt: skip
    """(blocks, factors): see the module's formulas. Rows and columns beyond a short chunk are zeros."""
    del key_dim, value_dim
    value_heads = g.shape[1]
    keys, queries = (by_head(x, heads, value_heads // heads) for x in (k, q))
    most = -(-len(k) // chunk) + seqs
    blocks = np.zeros((most, value_heads, 2, chunk, chunk), held.matrices)
    factors = np.zeros((most, value_heads, 2, chunk), held.numbers)
    with np.errstate(all="ignore"):
        for at, (_, begin, end) in enumerate(chunks(cu_seqlens, len(k), chunk)):
            decay = np.cumsum(g[begin:end], axis=0, dtype=held.numbers)
            part, strength = keys[:, begin:end], beta[begin:end].T.astype(np.float64)
            rows, across = end - begin, part.transpose(0, 2, 1)
            within = strength[:, :, None] * (part @ across) * lower(decay, 0, rows, -1)
            solve = np.linalg.inv(np.eye(rows) + np.nan_to_num(within)) * strength[:, None, :]
            asked = queries[:, begin:end] @ across * lower(decay, 0, rows, 0)
            made = np.stack([solve, (asked @ solve) * np.float64(np.float32(scale))], axis=1)
            blocks[at, :, :, :rows, :rows] = made.astype(held.matrices)
            exact = decay.T.astype(np.float64)
            last = exact[:, -1:] - exact
            factors[at, :, :, :rows] = np.exp(np.stack([exact, last], axis=1))
    return blocks.reshape(most, -1), factors.reshape(most, -1)


def _walk(
    *, q: Array, k: Array, v: Array, blocks: Array, factors: Array, initial_state: Array, cu_seqlens: Array,
    heads: int, scale: float, seqs: int, key_dim: int = 128, value_dim: int = 128, chunk: int = CHUNK,
    held: Held = KERNELS,
) -> tuple[Array, Array]:  # fmt: skip
    """(out [T, HV * V] before its rounding, final_state): see the module's formulas."""
    del seqs
    value_heads = factors.shape[1] // (2 * chunk)
    keys, queries = (by_head(x, heads, value_heads // heads) for x in (k, q))
    values = by_head(v, value_heads)
    pairs = blocks.astype(np.float64).reshape(-1, value_heads, 2, chunk, chunk)
    scales = factors.astype(np.float64).reshape(-1, value_heads, 2, chunk, 1)
    state = initial_state.astype(np.float64).reshape(-1, value_heads, value_dim, key_dim)
    out = np.zeros_like(values)
    for at, (n, begin, end) in enumerate(chunks(cu_seqlens, len(q), chunk)):
        rows, s = end - begin, state[n].transpose(0, 2, 1)
        rise, fall = scales[at, :, 0, :rows], scales[at, :, 1, :rows]
        solve, scores = pairs[at, :, 0, :rows, :rows], pairs[at, :, 1, :rows, :rows]
        fresh = values[:, begin:end] - rise * (keys[:, begin:end] @ s)
        asked = rise * (queries[:, begin:end] @ s) * np.float64(np.float32(scale))
        out[:, begin:end] = asked + scores @ fresh
        kept = (fall * (solve @ fresh)).transpose(0, 2, 1) @ keys[:, begin:end]
        state[n] = rise[:, -1:] * state[n] + kept
    return flat(out).astype(held.numbers), state.reshape(initial_state.shape).astype(held.numbers)


SOLVE = internal(
    "gated_delta_rule_chunk_solve",
    (Q, K, G, BETA, BOUNDS, HEADS, SCALE, SEQS, *DIMS, BLOCKS, FACTORS),
    "Internal, the first of two parts of gated_delta_rule_chunk: what each chunk needs of itself.",
    _solve,
)
WALK = internal(
    "gated_delta_rule_chunk_walk",
    (Q, K, V, read(BLOCKS), read(FACTORS), INITIAL, BOUNDS, HEADS, SCALE, SEQS, *DIMS, OUT, FINAL),
    "Internal, the second of two parts of gated_delta_rule_chunk: outputs and states along the chunks.",
    _walk,
)

OPS: tuple[Op, ...] = (SOLVE, WALK)
