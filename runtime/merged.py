"""Merged projections: one product whose columns are several layers' outputs, as views without a copy."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kiln.runtime.errors import ContractError


def merged(out: Any, shards: Sequence[int]) -> tuple[Any, ...]:
    """The column views of a merged projection's output, one for each shard.

    Args:
        out: [..., N], any array that can be sliced: the output of a product with the shards' weights one below
            another, in this order.
        shards: columns of each, as (q, k, v) or (gate, up). Each view keeps the row stride of `out`.

    Raises:
        ContractError: a shard below 0, or shards that do not sum to N.
    """
    columns, total = int(out.shape[-1]), sum(shards)
    if any(n < 0 for n in shards) or total != columns:
        raise ContractError(
            f"merged: shards {list(shards)} sum to {total}, expected N={columns} of 0 or more columns each."
        )
    ends = list(accumulate(shards))
    return tuple(out[..., end - n : end] for end, n in zip(ends, shards, strict=True))
