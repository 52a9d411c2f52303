"""Matrix products of bf16 on the tiles of AMX, for the fast mode: C files and objects of their own."""

from dataclasses import replace

from kiln.backends.cpu.primitive import CpuPrimitive
from kiln.backends.cpu.variants.gemm import LAYOUTS, MIXES, Mix, product
from kiln.ir.dtypes import BF16

TIER = "x86-64-v4-amx"
ROWS, PANEL = 256, 64
"""A tile's rows and columns."""
RUN, DEPTH = 6, 256
"""Tiles of the same rows that are computed, and steps of k that are laid out, at once. 544 KiB of stack."""
LEAST_M = 5
"""Up to 4 rows the dot products of the general code read weight faster."""


def _row(op: str, mix: Mix) -> CpuPrimitive:
    usual = product(op, mix, "fast")
    return replace(
        usual,
        variant=f"{mix.name}_amx",
        template="gemm_amx.c.j2",
        entry=f"kiln_{op}_amx",
        grid=["mul", ["cdiv", ["dim", "M"], ROWS], ["cdiv", ["dim", "N"], PANEL]],
        when=[*usual.when, ["ge", ["dim", "M"], LEAST_M]],
        constants={"layout": LAYOUTS[op], "rows": ROWS, "panel": PANEL, "run": RUN, "depth": DEPTH},
        tiers=(TIER,),
        part="amx",
    )


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(
    _row(op, mix) for op in LAYOUTS for mix in MIXES if mix.x is mix.weight is BF16
)
