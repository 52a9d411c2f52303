"""Merged projections of gated-delta-rule layers: rows as worked by hand, both layouts, ranks, refusals, and
the product's bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.runtime.errors import ContractError
from kiln.runtime.projections import Heads, Packed, pack_ba, pack_qkvz, packed_rows
from kiln.tests.arrays import f32
from kiln.tests.backends.cpu.gemm_calls import RUNNABLE, TARGET, Product
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]

BF16 = ml_dtypes.bfloat16
B, A = f32([[1, 0], [0, 1], [1, 1], [2, 0]]), f32([[0, 2], [3, 0], [1, -1], [0, 0]])
X = f32([[2, 5]])
SPLIT = {"in_proj_b.weight": B, "in_proj_a.weight": A}
FUSED = {"in_proj_ba.weight": np.concatenate([B[:2], A[:2], B[2:], A[2:]])}
PAIR = Heads(2, 4)


def _views(packed: Packed) -> list[list[float]]:
    return [v[0].tolist() for v in packed.views(X @ packed.weight.T)]


@literal("packed_ba/1.split")
def test_b_then_a() -> None:
    packed = pack_ba(PAIR, SPLIT)
    assert (X @ packed.weight.T).tolist() == [[2, 5, 7, 4, 10, 6, -3, 0]]
    assert _views(packed) == [[2, 5, 7, 4], [10, 6, -3, 0]]


@literal("packed_ba/2.interleaved")
def test_an_interleaved_tensor_gives_the_same_rows() -> None:
    packed = pack_ba(PAIR, FUSED)
    assert packed.weight.tobytes() == pack_ba(PAIR, SPLIT).weight.tobytes()
    assert packed.shards == (4, 4)
    assert packed.weight.flags.c_contiguous
    assert not np.shares_memory(packed.weight, FUSED["in_proj_ba.weight"])


@literal("packed_ba/2.misread")
def test_an_interleaved_tensor_is_not_b_then_a() -> None:
    (wide,) = FUSED.values()
    assert (X @ wide.T)[0, :4].tolist() == [2, 5, 10, 6]
    assert _views(pack_ba(PAIR, FUSED))[0] != [2, 5, 10, 6]


def _checkpoint(heads: Heads, width: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """(split, interleaved) tensors of one qkvz projection; a row's first number is its place when packed."""
    rng = np.random.default_rng(0)
    h, wide = heads.keys, heads.values * heads.value_dim
    parts = [rng.standard_normal((n, width)) for n in (h * heads.key_dim, h * heads.key_dim, wide, wide)]
    whole = np.concatenate(parts).astype(BF16)
    whole[:, 0] = np.arange(len(whole))
    q, k, v, z = (x.reshape(h, -1, width) for x in np.split(whole, np.cumsum([len(p) for p in parts])[:3]))
    fused = np.concatenate([q, k, v, z], axis=1).reshape(-1, width)
    split = {"in_proj_qkv.weight": whole[: -len(parts[3])], "in_proj_z.weight": whole[-len(parts[3]) :]}
    return split, {"in_proj_qkvz.weight": fused}


def test_qkvz_is_parts_of_heads_in_order() -> None:
    heads = Heads(2, 6, key_dim=3, value_dim=5)
    split, fused = _checkpoint(heads, 4)
    packed = pack_qkvz(heads, split)
    assert packed.weight.tobytes() == np.concatenate(list(split.values())).tobytes()
    assert pack_qkvz(heads, fused).weight.tobytes() == packed.weight.tobytes()
    assert packed.shards == (2 * 6 + 30, 30)
    out = np.arange(2.0 * 72).reshape(2, 72)
    mixed, z = packed.views(out)
    assert (mixed.shape, z.shape, z.strides) == ((2, 42), (2, 30), out.strides)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(n, layout, marks=literal(f"packed_ba/5.{n}.{layout}"))
        for n in (2, 4)
        for layout in ("split", "interleaved")
    ],
)
def test_ranks_together_are_the_whole(size: int, layout: str) -> None:
    """b of every rank, then a of every rank, is the unsharded output; so of q, k, v and z."""
    heads = Heads(4, 8, key_dim=3, value_dim=2)
    rng = np.random.default_rng(size)
    b, a = (rng.standard_normal((8, 6)) for _ in "ba")
    grouped = np.concatenate([np.stack([b[2 * j : 2 * j + 2], a[2 * j : 2 * j + 2]]) for j in range(4)])
    layouts = {
        "split": ({"in_proj_b.weight": b, "in_proj_a.weight": a}, _checkpoint(heads, 6)[0]),
        "interleaved": ({"in_proj_ba.weight": grouped.reshape(16, 6)}, _checkpoint(heads, 6)[1]),
    }
    ba, qkvz = layouts[layout]
    for pack, tensors in ((pack_ba, ba), (pack_qkvz, qkvz)):
        whole = pack(heads, tensors)
        shards = [pack(heads, tensors, rank=r, size=size) for r in range(size)]
        parts = heads.ba if pack is pack_ba else heads.qkvz
        ends = np.cumsum([n * heads.keys // size for n in parts])[:-1]
        joined = [np.concatenate(p) for p in zip(*(np.split(s.weight, ends) for s in shards), strict=True)]
        assert np.concatenate(joined).tobytes() == whole.weight.tobytes()
        assert [sum(s.shards[i] for s in shards) for i in (0, 1)] == list(whole.shards)


def test_scales_of_rows_are_packed_like_the_rows() -> None:
    scales = np.arange(8, dtype=np.float32)
    packed = pack_ba(PAIR, {"m.in_proj_ba.weight_scale": scales}, "m.", ".weight_scale")
    assert packed.weight.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert packed.weight.tolist() == packed_rows((2, 2), 2, interleaved=True).tolist()


MISSING = {"in_proj_b.weight": B}
BAD: tuple[tuple[Mapping[str, Array], Heads, int, str], ...] = (
    (MISSING, PAIR, 1, "in_proj_b without in_proj_a"),
    ({"in_proj_a.weight": A}, PAIR, 1, "in_proj_a without in_proj_b"),
    ({}, PAIR, 1, "no tensor of it"),
    ({"in_proj_ba.weight": B}, PAIR, 1, r"in_proj_ba rows must be 2\*HV, found \[4, 2\], expected 8"),
    ({**SPLIT, "in_proj_a.weight": A[:3]}, PAIR, 1, "in_proj_a rows must be HV"),
    ({**SPLIT, "in_proj_a.weight": A.astype(BF16)}, PAIR, 1, "b and a must share dtype and quantization"),
    ({**SPLIT, "in_proj_a.weight": A[:, :1]}, PAIR, 1, "b and a must share dtype and quantization"),
    (FUSED, Heads(3, 4), 1, "interleaved layout needs HV divisible by H"),
    ({**SPLIT, **FUSED}, PAIR, 1, "merged and split BA both present"),
    (SPLIT, PAIR, 3, "rank 0 of 3 of 2 key heads"),
)


@pytest.mark.parametrize(("tensors", "heads", "size", "why"), BAD)
def test_what_cannot_be_packed_is_refused(
    tensors: Mapping[str, Array], heads: Heads, size: int, why: str
) -> None:
    with pytest.raises(ContractError, match=why):
        pack_ba(heads, tensors, size=size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ContractError, match=f"rank {rank} of 2"):
        pack_ba(PAIR, SPLIT, rank=rank, size=2)
    assert pack_ba(PAIR, SPLIT, rank=1, size=2).weight.tolist() == [[1, 1], [2, 0], [1, -1], [0, 0]]


@pytest.mark.parametrize(
    "rows", [pytest.param(n, marks=literal(f"packed_ba/4.{n}")) for n in (1, 3, 64)]
)  # fmt: skip
def test_one_product_has_the_bits_of_two(rows: int) -> None:
    """On every tier of this machine."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 96)).astype(BF16)
    b, a = (rng.standard_normal((12, 96)).astype(BF16) for _ in "ba")
    packed = pack_ba(Heads(4, 12), {"in_proj_b.weight": b, "in_proj_a.weight": a})
    tiers = [t for t in RUNNABLE if t in TARGET.tiers]
    assert tiers
    for tier in tiers:
        product = Product("matmul_bt", tier)
        views = packed.views(product(x, packed.weight, "bf16"))
        for view, weight in zip(views, (b, a), strict=True):
            assert view.tobytes() == product(x, weight, "bf16").tobytes()
