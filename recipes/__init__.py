"""Kiln's own catalog: what is computed. Families are modules; `catalog()` lists them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kiln.ir.spec import Op
from kiln.recipes import (
    activation,
    fusion,
    gdn,
    gdn_chunk,
    gdn_chunk_walk,
    gdn_pack,
    gdn_replay,
    gemm,
    gemm_batched,
    gemm_fp8,
    gemm_packed,
    linear,
    norm,
    quant,
    rope,
    ssm,
    topk,
)

FAMILIES = (
    norm, activation, quant, rope, fusion, gemm, gemm_batched, gemm_packed, linear, gemm_fp8, topk, gdn,
    gdn_chunk, gdn_chunk_walk, gdn_pack, gdn_replay, ssm,
)  # fmt: skip


@dataclass(frozen=True)
class OwnCatalog:
    """See kiln.compiler.catalog.Catalog; Kiln's own realizations lie in its backends."""

    ops: tuple[Op, ...]
    realizations: tuple[Any, ...] = ()


def catalog() -> OwnCatalog:
    """Every op and recipe that Kiln ships."""
    return OwnCatalog(tuple(op for family in FAMILIES for op in family.OPS))
