"""Input projections of gated-delta-rule layers, packed once at load (GDN-MOE-PACKED-BA): copies of rows, no
arithmetic. No target is named in this file.

A layer has two: qkvz, of the parts q, k (key heads), v and z (value heads), and ba, of the parts b (update
strength) and a (decay), a row a value head. Packed, a weight is [part; part; ...], each with its heads in
order, so that one product gives all parts as columns. Checkpoints have the parts in that order but in two
tensors, the last part in the second, or interleaved in one: for each key head, its rows of every part in
turn. One rank of several has a contiguous share of the heads of each part.

ba is a qkvz without keys whose values are one row: b has the place of v, and a that of z.
"""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F8E4M3, F16, F32, I32
from kiln.ir.spec import Contract, DTypeVar, Op, Scalar, Ship, Tensor

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "GDN-MOE-PACKED-BA"
W = DTypeVar("W", (BF16, F16, F32, F8E4M3))

_KEYS: Any = ["mul", 2, ["dim", "KEY_ROWS"]]
_VALUES: Any = ["dim", "VALUE_ROWS"]
ROWS: Any = ["mul", ["floordiv", ["dim", "HEADS"], ["dim", "SIZE"]], ["add", _KEYS, ["mul", 2, _VALUES]]]
"""Of one rank's packed weight."""
SPLIT = ["and", ["present", "first"], ["present", "second"], ["absent", "fused"]]
FUSED = ["and", ["absent", "first"], ["absent", "second"], ["present", "fused"]]


def split(first: Array, second: Array, heads: int, rows: list[int]) -> list[Array]:
    """Each part as [heads, its rows of a head, K], of tensors that have them one below another."""
    edges = np.cumsum([heads * n for n in rows[:-1]])[:-1]
    parts = [*np.split(first, edges), second]
    return [p.reshape(heads, n, first.shape[1]) for p, n in zip(parts, rows, strict=True)]


def interleaved(fused: Array, heads: int, rows: list[int]) -> list[Array]:
    """The same of one tensor that has them head by head."""
    return np.split(fused.reshape(heads, sum(rows), fused.shape[1]), np.cumsum(rows)[:-1], axis=1)


def _pack(
    *, first: Array | None = None, second: Array | None = None, fused: Array | None = None, heads: int,
    value_rows: int, key_rows: int = 0, rank: int = 0, size: int = 1,
) -> tuple[Array]:  # fmt: skip
    """(packed,): the parts, cut to the rank's heads, one below another."""
    rows = [key_rows, key_rows, value_rows, value_rows]
    if fused is not None:
        parts = interleaved(fused, heads, rows)
    else:
        assert first is not None
        assert second is not None
        parts = split(first, second, heads, rows)
    count = heads // size
    own = [p[rank * count : (rank + 1) * count] for p in parts]
    return (np.concatenate([p.reshape(count * p.shape[1], p.shape[2]) for p in own]),)


def _source(name: str, rows: Any, doc: str) -> Tensor:
    return Tensor(name, W, (["mul", ["dim", "HEADS"], rows], "K"), optional=True, doc=doc)


PACK = Op(
    name="gated_delta_rule_pack",
    family=FAMILY,
    operands=(
        _source("first", ["add", _KEYS, _VALUES], "in_proj_qkv or in_proj_b: parts one below another"),
        _source("second", _VALUES, "in_proj_z or in_proj_a: the last part"),
        _source("fused", ["add", _KEYS, ["mul", 2, _VALUES]],
                "in_proj_qkvz or in_proj_ba instead: the parts of each key head in turn"),
        Scalar("heads", I32, minimum=1, doc="key heads"),
        Scalar("value_rows", I32, minimum=1,
               doc="rows of v, and of z, of one key head: HV / H * value_dim; of b, and of a: HV / H"),
        Scalar("key_rows", I32, default=0, minimum=0, doc="rows of q, and of k: key_dim; 0 for ba"),
        Scalar("rank", I32, default=0, minimum=0, doc="whose share of the heads"),
        Scalar("size", I32, default=1, minimum=1, doc="ranks"),
        Tensor("packed", W, (ROWS, "K"), "out", doc="[q; k; v; z] or [b; a]"),
    ),
    rows="HEADS",
    width="K",
    constraints=(
        (["or", SPLIT, FUSED],
         "give in_proj_qkv and in_proj_z (b and a) as first and second, or in_proj_qkvz (ba) alone as fused"),
        (["eq", ["mod", ["dim", "HEADS"], ["dim", "SIZE"]], 0], "ranks must divide the key heads"),
        (["lt", ["arg", "rank"], ["dim", "SIZE"]], "rank must be below size"),
    ),
    contract=Contract("exact"),
    ship=tuple(Ship({"W": w}, absent=a) for w in W.choices for a in (("fused",), ("first", "second"))),
    doc="Pack the qkvz or the ba projection of a gated-delta-rule layer, for one product. CPUs only: CUDA "
    "trees have no kernel of it; pack before weights are copied to the device, or gather their rows there "
    "with embedding and kiln.runtime.projections.packed_rows.",
    reference=_pack,
)  # fmt: skip

OPS: tuple[Op, ...] = (PACK,)
