"""Input projections of gated-delta-rule layers, packed once at load for dense and MoE models alike: copies of
rows, no arithmetic.

A layer has two: qkvz, of the parts q, k (key heads), v and z (value heads), and ba, of the parts b (update
strength) and a (decay), a row a value head. Packed, a weight is [part; part; ...], each with its heads in
order, so that one product gives all parts as views of its columns. Checkpoints have them `split`, in that
order but in several tensors, or interleaved in one: for each key head, its rows of every part in turn. One
rank of several has a contiguous share of the heads of each part.

NumPy moves the rows, by the table of `packed_rows`. Given a library for the CPU, its op
`gated_delta_rule_pack` does, in one pass instead of two: it is what callers in C have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kiln.runtime.errors import ContractError
from kiln.runtime.merged import merged

if TYPE_CHECKING:
    from kiln.runtime.load import Library

Array: TypeAlias = np.ndarray[Any, Any]


PACK = "gated_delta_rule_pack"
"""The op that packs, where a library has it."""
ROWS = {
    "b": "HV", "a": "HV", "ba": "2*HV", "qkv": "2*H*K + HV*V", "z": "HV*V", "qkvz": "2*H*K + 2*HV*V",
}  # fmt: skip
"""Tensor of a checkpoint -> its rows, in words."""


@dataclass(frozen=True)
class Heads:
    """The heads of a layer, of all ranks together."""

    keys: int
    values: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def ba(self) -> tuple[int, int]:
        """Rows of b and a of one key head."""
        return (self.values // self.keys,) * 2

    @property
    def qkvz(self) -> tuple[int, int, int, int]:
        """Rows of q, k, v and z of one key head."""
        wide = self.values // self.keys * self.value_dim
        return (self.key_dim, self.key_dim, wide, wide)


@dataclass(frozen=True)
class Packed:
    """A packed weight and how its product's columns are cut."""

    weight: Array
    """[rows, ...], C-contiguous, owned."""
    shards: tuple[int, ...]
    """Rows of each view, in order."""

    def views(self, out: Any) -> tuple[Any, ...]:
        """(b, a), or (mixed_qkv, z), of the product's output [..., rows]: views with its row stride."""
        return merged(out, self.shards)


def packed_rows(
    parts: Sequence[int], heads: int, *, interleaved: bool, rank: int = 0, size: int = 1
) -> Array:
    """int64: the checkpoint's row behind each packed row, for any framework to index with.

    Args:
        parts: rows of each part of one key head.
        heads: key heads of the checkpoint.
        interleaved: whether its rows are head by head; else part by part.
        rank, size: this rank and how many there are.

    Raises:
        ContractError: ranks that do not divide the heads.
    """
    if not 0 <= rank < size or heads % size:
        raise ContractError(
            f"projection: rank {rank} of {size} of {heads} key heads; expected ranks that divide the heads."
        )
    whole, share = sum(parts), heads // size
    own = np.arange(rank * share, (rank + 1) * share)[:, None]
    found, before = [], 0
    for rows in parts:
        first, step = (before, whole) if interleaved else (before * heads, rows)
        found.append((first + own * step + np.arange(rows)).reshape(-1))
        before += rows
    return np.concatenate(found).astype(np.int64)


def pack_ba(
    heads: Heads,
    tensors: Mapping[str, Array],
    prefix: str = "",
    suffix: str = ".weight",
    *,
    rank: int = 0,
    size: int = 1,
    library: "Library | None" = None,
) -> Packed:
    """The weight [b; a] of a layer.

    Args:
        heads: the layer's.
        tensors: of the checkpoint, by name: `in_proj_b.weight` and `in_proj_a.weight`, [HV, ...] each, or
            `in_proj_ba.weight`, [2 HV, ...], interleaved; of any one type, codes too.
        prefix: before `in_proj`.
        suffix: after the projection's name: what else has its rows, as scales, is packed the same way.
        rank, size: this rank and how many there are.
        library: whose op moves the rows, of bf16, f16, f32 or e4m3, on the CPU.

    Raises:
        ContractError: tensors that are missing, there twice, of other types or shapes; heads that do not
            divide; a type that the library's op does not take.
    """
    source = _checked(heads, tensors, (prefix, suffix), ("b", "a", "ba"), heads.ba, heads.ba)
    return _packed(source, heads, heads.ba, heads.ba, rank, size, library)


def pack_qkvz(
    heads: Heads,
    tensors: Mapping[str, Array],
    prefix: str = "",
    suffix: str = ".weight",
    *,
    rank: int = 0,
    size: int = 1,
    library: "Library | None" = None,
) -> Packed:
    """The weight [q; k; v; z] of a layer: as `pack_ba`, of `in_proj_qkv.weight` and `in_proj_z.weight`, or of
    `in_proj_qkvz.weight`. Its views are (mixed_qkv, z)."""
    q, k, v, z = heads.qkvz
    views = (q + k + v, z)
    source = _checked(heads, tensors, (prefix, suffix), ("qkv", "z", "qkvz"), heads.qkvz, views)
    return _packed(source, heads, heads.qkvz, views, rank, size, library)


def _checked(
    heads: Heads, tensors: Mapping[str, Array], around: tuple[str, str], names: tuple[str, str, str],
    parts: tuple[int, ...], views: tuple[int, ...],
) -> list[Array]:  # fmt: skip
    """The tensors to pack, of the rows they must have.

    `names`: of the two split tensors, then of the fused one; `parts` and `views`: rows of a key head.
    """
    if heads.keys < 1 or heads.values < 1 or heads.values % heads.keys:
        found = f"HV={heads.values}, H={heads.keys}"
        raise ContractError(f"projection: interleaved layout needs HV divisible by H, found {found}.")
    source = _source(tensors, {n: f"{around[0]}in_proj_{n}{around[1]}" for n in names}, names)
    for (name, tensor), rows in zip(source.items(), views if len(source) > 1 else (sum(parts),), strict=True):
        wanted = heads.keys * rows
        if tensor.ndim < 1 or len(tensor) != wanted:
            found = f"{list(tensor.shape)}, expected {wanted} rows"
            raise ContractError(f"projection: in_proj_{name} rows must be {ROWS[name]}, found {found}.")
    return list(source.values())


def _packed(
    source: list[Array], heads: Heads, parts: tuple[int, ...], views: tuple[int, ...],
    rank: int, size: int, library: "Library | None",
) -> Packed:  # fmt: skip
    index = packed_rows(parts, heads.keys, interleaved=len(source) == 1, rank=rank, size=size)
    if library is None:
        weight = np.ascontiguousarray(np.concatenate(source)[index])
    else:
        rows = {"value_rows": parts[-1], "key_rows": parts[0] if len(parts) > 2 else 0}
        named = dict(zip(("first", "second") if len(source) > 1 else ("fused",), source, strict=True))
        flat = {n: t.reshape(len(t), -1) for n, t in named.items()}
        done = library.op(PACK)(**flat, heads=heads.keys, **rows, rank=rank, size=size)
        weight = np.asarray(done).reshape(len(index), *source[0].shape[1:])
    return Packed(weight, tuple(heads.keys // size * n for n in views))


def _source(
    tensors: Mapping[str, Array], full: Mapping[str, str], names: tuple[str, str, str]
) -> dict[str, Array]:
    """By name, both tensors of the split layout or the one of the interleaved."""
    first, second, fused = names
    there = [n for n in names if full[n] in tensors]
    if there == [fused]:
        return {fused: tensors[full[fused]]}
    expected = f"expected {full[first]} and {full[second]}, or {full[fused]}"
    if fused in there:
        held = ", ".join(full[n] for n in there)
        raise ContractError(f"projection: merged and split {fused.upper()} both present: {held}; {expected}.")
    if len(there) < 2:
        lone = there and f"in_proj_{there[0]} without in_proj_{second if there[0] == first else first}"
        raise ContractError(f"projection: {lone or 'no tensor of it'}; {expected}.")
    one, other = tensors[full[first]], tensors[full[second]]
    if (one.dtype, one.shape[1:]) != (other.dtype, other.shape[1:]):
        found = f"{one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
        raise ContractError(
            f"projection: {first} and {second} must share dtype and quantization, found {found}."
        )
    return {first: one, second: other}
