"""Figures of the specifications for the delta rule's kernels: registers and stack of upstream kernels that do
the same, cross-compiled for each target. `kiln show --resources` puts them beside what ships."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Resources of one upstream kernel on one target."""

    kernel: str
    """Its stage and, where several were compiled, its tile, warps and stages."""
    registers: int
    stack: int = 0


Figures = Mapping[str, tuple[Figure, ...]]
"""By target."""


def _one(kernel: str, registers: Mapping[str, int]) -> Figures:
    return {target: (Figure(kernel, n),) for target, n in registers.items()}


CHUNKED = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_121a")
"""What the sheet of the chunked stages was compiled for, with Triton 3.6 and 48 value heads."""
_STAGES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "kkt": ((96, 96, 127, 128, 109), (0,) * 5),
    "tril": ((174,) * 5, (0,) * 5),
    "wu": ((172, 174, 116, 112, 167), (0,) * 5),
    "delta_h 64 w4s3": ((255, 254, 234, 222, 255), (8, 0, 0, 0, 0)),
    "delta_h 32 w4s2": ((182, 179, 110, 142, 168), (0,) * 5),
    "chunk_o 64 w4s3": ((177, 154, 130, 146, 192), (0,) * 5),
    "chunk_o 128 w4s2": ((255, 255, 190, 166, 255), (24, 48, 0, 0, 80)),
}
"""Stage -> registers and stack for each target."""


def _stages(*names: str) -> Figures:
    return {
        target: tuple(Figure(n, _STAGES[n][0][i], _STAGES[n][1][i]) for n in names)
        for i, target in enumerate(CHUNKED)
    }


FIGURES: Mapping[str, Figures] = {
    "gated_delta_rule_packed_decode": _one(
        "upstream 32 w1", {
            "sm_80": 214, "sm_86": 230, "sm_89": 230, "sm_90a": 212, "sm_100a": 213, "sm_103a": 205,
            "sm_110a": 168, "sm_120a": 167, "sm_121a": 167,
        },
    ),
    "gated_delta_rule_replay_decode": {
        "sm_121a": (Figure("non-flush", 42), Figure("flush", 94), Figure("fused", 95)),
    },
    "gated_delta_rule_chunk_prepare": _stages("kkt", "tril", "wu"),
    "gated_delta_rule_chunk_state": _stages("delta_h 64 w4s3", "delta_h 32 w4s2"),
    "gated_delta_rule_chunk_output": _stages("chunk_o 64 w4s3", "chunk_o 128 w4s2"),
    "gated_delta_rule_chunk_solve": _stages("kkt", "tril"),
    "gated_delta_rule_chunk_walk": _stages("wu", "delta_h 64 w4s3", "chunk_o 64 w4s3"),
}  # fmt: skip
"""Op -> the figures beside its kernels: those of the stages that one of ours does."""


def beside(op: str, target: str) -> tuple[Figure, ...]:
    """The figures for an op on a target; none where no specification has any."""
    return FIGURES.get(op, {}).get(target, ())
