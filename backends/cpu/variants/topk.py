"""CPU realization of top_k_pairs: a scan with a heap, one row a tile, per element type."""

from typing import Any, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.ir.dtypes import BF16, F16, F32, I32, DType
from kiln.recipes.topk import MAX_K

Expr: TypeAlias = Any


def _top_k_pairs(dtype: DType) -> CpuPrimitive:
    limit: Expr = ["sub", ["dim", "V"], ["arg", "num_org_vocab_padding"]]
    return CpuPrimitive(
        op="top_k_pairs",
        variant=dtype.name,
        template="topk.c.j2",
        entry=f"top_k_pairs_{dtype.name}",
        params=(
            CpuPointer("scores", "scores", dtype.name, dtype.bytes),
            CpuPointer("values", "values", dtype.name, dtype.bytes, "write"),
            CpuPointer("indices", "indices", I32.name, I32.bytes, "write"),
            CpuNumber("row_stride", "i64", ["stride", "scores"]),
            CpuNumber("limit", "i64", limit),
            CpuNumber("k", "i64", ["arg", "k"]),
        ),
        grid=["dim", "R"],
        when=["dtype", "scores", dtype.name],
        constants={"dtype": dtype.name, "max_k": MAX_K},
    )


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(_top_k_pairs(d) for d in (F32, BF16, F16))
