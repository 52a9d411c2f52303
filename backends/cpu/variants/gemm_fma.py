"""Matrix products by fused multiply-adds on cores with 32 vectors of registers, for the fast mode: C files and
objects of their own."""

from dataclasses import replace

from kiln.backends.cpu.primitive import CpuPrimitive
from kiln.backends.cpu.variants.gemm import LAYOUTS, MIXES, Mix, product

TIERS = ("x86-64-v4",)
ROWS, COLS, DEPTH = 384, 192, 128
"""A tile's rows and columns; steps of k that are widened at once. 512 KiB of stack."""


def _row(op: str, mix: Mix) -> CpuPrimitive:
    return replace(
        product(op, mix, "fast"),
        variant=f"{mix.name}_fma",
        template="gemm_fma.c.j2",
        entry=f"kiln_{op}_fma",
        grid=["mul", ["cdiv", ["dim", "M"], ROWS], ["cdiv", ["dim", "N"], COLS]],
        constants={"layout": LAYOUTS[op], "rows": ROWS, "cols": COLS, "depth": DEPTH},
        priority=1,
        tiers=TIERS,
        part="fma",
    )


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(_row(op, mix) for op in LAYOUTS for mix in MIXES)
