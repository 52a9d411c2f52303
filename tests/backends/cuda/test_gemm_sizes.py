"""Matrix products count rows, features and steps in 32 bits, up to the end of the block that the last one is
in: no call that comes so near 2**31 that a count would wrap is let through."""

from itertools import chain

import pytest

from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.variants import gemm, gemm_batched, gemm_fp8, gemm_hopper, gemm_skinny
from kiln.ir.spec import Op
from kiln.recipes import gemm as dense
from kiln.recipes import gemm_batched as batched
from kiln.recipes import gemm_fp8 as scaled
from kiln.runtime.expr import Env, names, parse_pred, why_not

OPS = {op.name: op for op in (*dense.OPS, *batched.OPS, *scaled.OPS)}
ROWS = (
    *gemm.CANDIDATES, *gemm.PRIMITIVES, *gemm_skinny.CANDIDATES, *gemm_hopper.CANDIDATES,
    *gemm_batched.PRIMITIVES, *gemm_fp8.CANDIDATES,
)  # fmt: skip


def takes(op: Op, dim: str, extent: int) -> bool:
    """Whether the constraints on this dimension alone hold."""
    env = Env()
    env.dims = {dim: extent}
    alone = [p for tree, _ in op.constraints if set(names(p := parse_pred(tree))) == {("dim", dim)}]
    assert alone, f"{op.name} has no bound of {dim}"
    return all(why_not(p, env) is None for p in alone)


def block(row: CudaPrimitive, dim: str) -> int:
    """How many of this dimension a step of the row's kernel takes; one where it has no block of them."""
    found = row.constants.get(f"BLOCK_{dim}", 1)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("dim", ["M", "N", "K"])
def test_no_count_wraps(dim: str) -> None:
    for row in ROWS:
        first_wrapped = 2**31 - block(row, dim) + 1
        assert not takes(OPS[row.op], dim, first_wrapped), f"{row.op}.{row.variant}"
        assert takes(OPS[row.op], dim, 2**16)


def test_every_row_was_looked_at() -> None:
    assert {row.op for row in ROWS} == set(OPS)
    assert (
        max(block(row, dim) for row, dim in chain.from_iterable(((r, d) for d in "MNK") for r in ROWS)) > 256
    )
