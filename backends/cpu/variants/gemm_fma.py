"""Matrix products by fused multiply-adds on cores with 32 vectors of registers, for the fast mode: a C
file and an object of its own.

Only for weight as checkpoints have it: for the other layouts this way had 1.00 to 1.07 times the speed of the
general code (f32, 8 to 128 rows).
"""

from dataclasses import replace

from kiln.backends.cpu.primitive import CpuPrimitive
from kiln.backends.cpu.variants.gemm import MIXES, Mix, product

OP = "matmul_bt"
TIERS = ("x86-64-v4",)
ROWS, COLS, DEPTH = 384, 192, 128
"""A tile's rows and columns; steps of k that are widened at once. 512 KiB of stack."""
LEAST_M = 5
"""Up to 4 rows the general code's dot products read weight as fast: 0.8 to 1.2 times this way's time."""


def _row(mix: Mix) -> CpuPrimitive:
    usual = product(OP, mix, "fast")
    return replace(
        usual,
        variant=f"{mix.name}_fma",
        template="gemm_fma.c.j2",
        when=[*usual.when, ["ge", ["dim", "M"], LEAST_M]],
        entry=f"kiln_{OP}_fma",
        grid=["mul", ["cdiv", ["dim", "M"], ROWS], ["cdiv", ["dim", "N"], COLS]],
        constants={"rows": ROWS, "cols": COLS, "depth": DEPTH},
        priority=1,
        tiers=TIERS,
        part="fma",
    )


PRIMITIVES: tuple[CpuPrimitive, ...] = tuple(map(_row, MIXES))
