"""The target table: adding a CUDA target is one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class IsaTier:
    """One instruction-set level of a CPU target: `cpu` is the compiler's name, `features` what
    /proc/cpuinfo or HWCAP must show.
    """

    name: str
    cpu: str
    features: tuple[str, ...]
    has_fma: bool


@dataclass(frozen=True)
class Target:
    """Where artifacts run."""

    name: str
    kind: Literal["cuda", "cpu"]
    capability: int = 0
    """CUDA: major * 10 + minor, as Triton names it."""
    features: frozenset[str] = frozenset()
    """Native instructions that kiln.ir.functions may use."""
    triple: str = ""
    tiers: tuple[IsaTier, ...] = ()
    extra_tiers: tuple[IsaTier, ...] = ()
    """For what names them: instructions that few kernels have a use for."""
    max_shared: int = 0
    """CUDA: opt-in shared memory per block in bytes."""


def _cuda(name: str, capability: int, max_shared: int, *features: str) -> Target:
    return Target(
        name, "cuda", capability, frozenset({*features, "canonical_nan", "e2m1_words"}), max_shared=max_shared
    )


V3 = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "lzcnt")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
X86_TIERS = (
    IsaTier("x86-64", "x86_64", (), has_fma=False),
    IsaTier("x86-64-v3", "x86_64_v3", V3, has_fma=True),
    IsaTier("x86-64-v4", "x86_64_v4", V4, has_fma=True),
)
X86_EXTRA_TIERS = (
    IsaTier("x86-64-v4-bf16", "x86_64_v4+avx512bf16", (*V4, "avx512_bf16", "sse4a"), has_fma=True),
    IsaTier("x86-64-v4-amx", "x86_64_v4+amx_tile+amx_bf16", (*V4, "amx_tile", "amx_bf16"), has_fma=True),
)
"""vdpbf16ps is asked for where it is fast: AMD's cores, which all have sse4a, issue one a cycle (Zen 4: 234
GFLOP/s where fused multiply-adds have 117), Sapphire Rapids one in two (87, where they have 174)."""
ARM_TIERS = (IsaTier("neon", "generic", ("asimd",), has_fma=True),)

TARGETS = {
    t.name: t
    for t in (
        _cuda("sm_80", 80, 166912),
        _cuda("sm_86", 86, 101376),
        _cuda("sm_87", 87, 166912),
        _cuda("sm_89", 89, 101376, "e4m3"),
        _cuda("sm_90a", 90, 232448, "e4m3"),
        _cuda("sm_100a", 100, 232448, "e4m3"),
        _cuda("sm_103a", 103, 232448, "e4m3"),
        _cuda("sm_110a", 110, 232448, "e4m3"),
        _cuda("sm_120a", 120, 101376, "e4m3"),
        _cuda("sm_121a", 121, 101376, "e4m3"),
        Target(
            "cpu-x86_64",
            "cpu",
            triple="x86_64-linux-gnu.2.17",
            tiers=X86_TIERS,
            extra_tiers=X86_EXTRA_TIERS,
        ),
        Target("cpu-aarch64", "cpu", triple="aarch64-linux-gnu.2.17", tiers=ARM_TIERS),
    )
}
"""Every target by name, in the order tables list them."""
