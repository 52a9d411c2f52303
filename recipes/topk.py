"""Top-k with indices (KERNEL-TOPK-PAIRS): what it selects. No target is named in this file.

The order of a row is total: values descending, NaN (any sign or payload) before +inf, -0 equal to +0, ties by
ascending index. Nothing is computed, so results are the same bits everywhere; a returned value keeps the
row's own bits.
"""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F16, F32, I32, I64
from kiln.ir.spec import DTypeVar, Op, Scalar, Ship, Tensor

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-TOPK-PAIRS"
T = DTypeVar("T", (F32, BF16, F16))
MAX_K = 1024
VOCABULARIES = (248320, 151936, 129280, 128256, 102400)
"""Qwen3.6, Qwen3, DeepSeek-V3, Llama-3, DeepSeek-V2."""

SCORES = Tensor("scores", T, ("R", "V"), doc="scores; a row is selected from independently")
K = Scalar("k", I32, minimum=1, doc="pairs to return")
PADDING = Scalar(
    "num_org_vocab_padding", I32, default=0, minimum=0, doc="the last columns that count as -inf"
)
VALUES = Tensor("values", T, ("R", "K"), role="out", layout="dense", doc="the selected values, descending")
INDICES = Tensor("indices", I32, ("R", "K"), role="out", layout="dense", doc="their columns")

_K_FITS: tuple[tuple[list[Any], str], ...] = (
    (["le", ["arg", "k"], MAX_K], f"k must be at most {MAX_K}: select more with a full sort"),
)
_ROW_FITS: tuple[tuple[list[Any], str], ...] = (
    (["le", ["arg", "k"], ["dim", "V"]], "k must not exceed the row length V: give a smaller k"),
    (
        ["le", ["arg", "num_org_vocab_padding"], ["dim", "V"]],
        "num_org_vocab_padding must not exceed the row length V: it counts columns of the row",
    ),
    (["lt", ["dim", "V"], 2**31], "rows of 2**31 and more columns do not fit 32-bit indices: split the row"),
)


def order_keys(scores: Array) -> Array:
    """The total order as u32: a larger key sorts first, equal keys are ties."""
    wide = scores.astype(np.float32)
    bits = wide.view(np.uint32)
    key = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000))
    key = np.where(wide == 0, np.uint32(0x80000000), key)
    return np.where(np.isnan(wide), np.uint32(0xFFFFFFFF), key).astype(np.uint32)


def _padded(scores: Array, padding: int) -> Array:
    """A copy of scores whose last `padding` columns are -inf."""
    out = scores.copy()
    out[:, scores.shape[1] - padding :] = -np.inf
    return out


def select(scores: Array, k: int) -> Array:
    """Columns of the first k elements of each row in the total order, [R, k] i32."""
    falling = -order_keys(scores).astype(np.int64)
    return np.argsort(falling, axis=1, kind="stable")[:, :k].astype(np.int32)


def _top_k_pairs(*, scores: Array, k: int, num_org_vocab_padding: int = 0) -> tuple[Array, Array]:
    """(values [R, k], indices [R, k]): a stable sort by falling key, cut at k."""
    padded = _padded(scores, num_org_vocab_padding)
    indices = select(padded, k)
    return np.take_along_axis(padded, indices, axis=1), indices


def pack(scores: Array, columns: Array) -> Array:
    """Key above complemented column, 64 bits: larger is earlier in the total order."""
    low = ~columns.astype(np.uint32)
    return (order_keys(scores).astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def _top_k_tiles(
    *, scores: Array, k: int, keep: int, tile: int, lists: int, num_org_vocab_padding: int = 0
) -> tuple[Array]:
    """(packed [R, lists * keep],): each tile's first k elements in order, packed, then zeros."""
    padded = _padded(scores, num_org_vocab_padding)
    packed = np.zeros((scores.shape[0], lists, keep), np.uint64)
    for part in range(lists):
        piece = padded[:, part * tile : (part + 1) * tile]
        columns = select(piece, k)
        best = pack(np.take_along_axis(piece, columns, axis=1), columns + part * tile)
        packed[:, part, : best.shape[1]] = best
    return (packed.reshape(len(packed), lists * keep).view(np.int64),)


def _top_k_merge(
    *, packed: Array, scores: Array, k: int, keep: int, lists: int, num_org_vocab_padding: int = 0
) -> tuple[Array, Array]:
    """(values [R, k], indices [R, k]): the k largest packed elements of a row, unpacked."""
    del keep, lists
    best = np.sort(packed.view(np.uint64), axis=1)[:, ::-1][:, :k]
    indices = (~best.astype(np.uint32)).view(np.int32)
    return np.take_along_axis(_padded(scores, num_org_vocab_padding), indices, axis=1), indices


TOP_K_PAIRS = Op(
    name="top_k_pairs",
    family=FAMILY,
    operands=(SCORES, K, PADDING, VALUES, INDICES),
    returns=("values", "indices"),
    rows="R",
    width="V",
    constraints=_K_FITS + _ROW_FITS,
    ship=(Ship({"T": F32}, widths=VOCABULARIES), Ship({"T": BF16}, widths=VOCABULARIES), Ship({"T": F16})),
    doc="The first k elements of each row and their columns, by (value descending, index ascending). CUDA "
    "artifacts take f32 (fast up to k = 64 and 262144 columns) and bf16 up to k = 32 and 262144 columns; f16 "
    "has CPU artifacts only.",
    reference=_top_k_pairs,
)

KEEP = Scalar("keep", I32, minimum=1, doc="slots of a tile's list")
TILE = Scalar("tile", I32, minimum=1, doc="columns of a tile")
LISTS = Scalar("lists", I32, minimum=1, doc="tiles a row is split into")
PACKED_SHAPE: tuple[Any, ...] = ("R", ["mul", ["dim", "LISTS"], ["dim", "KEEP"]])
_K_KEPT: tuple[tuple[list[Any], str], ...] = (
    (["le", ["arg", "k"], ["dim", "KEEP"]], "k must not exceed keep: a tile's list holds every candidate"),
)
_TILES_COVER: tuple[tuple[list[Any], str], ...] = (
    (
        ["le", ["dim", "V"], ["mul", ["arg", "lists"], ["arg", "tile"]]],
        "lists tiles must cover the row: give more lists or longer tiles",
    ),
)

TOP_K_TILES = Op(
    name="top_k_tiles",
    family=FAMILY,
    operands=(
        SCORES,
        K,
        KEEP,
        TILE,
        LISTS,
        PADDING,
        Tensor(
            "packed",
            I64,
            PACKED_SHAPE,
            role="out",
            layout="dense",
            doc="each tile's list of packed elements",
        ),
    ),
    rows="R",
    width="V",
    constraints=(*_K_KEPT, *_TILES_COVER, *_K_FITS, *_ROW_FITS[1:]),
    doc="Internal, the first half of top_k_pairs: the first k elements of every tile of a row.",
    reference=_top_k_tiles,
)

TOP_K_MERGE = Op(
    name="top_k_merge",
    family=FAMILY,
    operands=(
        Tensor(
            "packed",
            I64,
            PACKED_SHAPE,
            layout="dense",
            doc="sorted lists of packed elements, as top_k_tiles writes them",
        ),
        SCORES,
        K,
        KEEP,
        LISTS,
        PADDING,
        VALUES,
        INDICES,
    ),
    returns=("values", "indices"),
    rows="R",
    width="V",
    constraints=(*_K_KEPT, *_K_FITS, *_ROW_FITS),
    doc="Internal, the second half of top_k_pairs: the first k elements of a row's lists.",
    reference=_top_k_merge,
)

OPS: tuple[Op, ...] = (TOP_K_PAIRS, TOP_K_TILES, TOP_K_MERGE)
