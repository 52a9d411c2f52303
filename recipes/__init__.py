"""Kiln's own catalog: what is computed. Families are modules; `catalog()` lists them all."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import Any

from kiln.ir.diagnostics import DeclarationError
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


def op(name: str) -> Op:
    """One of Kiln's ops by the name that calls have, for a recipe of one's own: `call(op("gelu"), x)`.

    Raises:
        DeclarationError: there is none; the message has the nearest names.
    """
    known = _by_name()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3) or sorted(known)
        raise DeclarationError(f"Kiln has no op {name!r}; there are {', '.join(near)}")
    return known[name]


@cache
def _by_name() -> dict[str, Op]:
    return {declared.name: declared for declared in catalog().ops}
