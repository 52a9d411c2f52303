"""Which target a device gets: the compatibility table, and CPU features from /proc/cpuinfo text."""

import pytest

from kiln.runtime.errors import TargetError
from kiln.runtime.targets import (
    capability,
    cpu_features,
    cpu_target,
    legal_targets,
    missing_features,
    parse_cpuinfo,
)

SHIPPED = [
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90a",
    "sm_100a",
    "sm_103a",
    "sm_110a",
    "sm_120a",
    "sm_121a",
    "cpu-x86_64",
]

TABLE = [
    ((7, 5), None),
    ((8, 0), "sm_80"),
    ((8, 6), "sm_86"),
    ((8, 7), "sm_86"),
    ((8, 9), "sm_89"),
    ((9, 0), "sm_90a"),
    ((10, 0), "sm_100a"),
    ((10, 1), None),
    ((10, 3), "sm_103a"),
    ((11, 0), "sm_110a"),
    ((12, 0), "sm_120a"),
    ((12, 1), "sm_121a"),
    ((12, 2), None),
    ((13, 0), None),
]


@pytest.mark.parametrize(("cc", "best"), TABLE)
def test_best_of_the_shipped_targets(cc: tuple[int, int], best: str | None) -> None:
    legal = legal_targets(cc, SHIPPED)
    assert (legal[0] if legal else None) == best


FAMILIES = [
    ((10, 3), ["sm_100f", "sm_120f", "sm_80"], ["sm_100f"]),
    ((10, 0), ["sm_103f"], []),
    ((12, 1), ["sm_120f"], ["sm_120f"]),
    ((9, 0), ["sm_90", "sm_90a"], ["sm_90a", "sm_90"]),
    ((12, 0), ["sm_121a"], []),
    (
        (10, 3),
        ["sm_100", "sm_100f", "sm_103", "sm_103f", "sm_103a"],
        ["sm_103a", "sm_103f", "sm_103", "sm_100f", "sm_100"],
    ),
    ((8, 9), ["sm_80", "sm_86", "sm_89", "sm_87"], ["sm_89", "sm_87", "sm_86", "sm_80"]),
]


@pytest.mark.parametrize(("cc", "available", "expected"), FAMILIES)
def test_order_of_legal_targets(cc: tuple[int, int], available: list[str], expected: list[str]) -> None:
    assert legal_targets(cc, available) == expected
    assert legal_targets(cc, list(reversed(available))) == expected


def test_capability_of_a_name() -> None:
    assert capability("sm_121a") == (12, 1, "a")
    assert capability("sm_80") == (8, 0, "")
    for name in ("sm_9", "sm_90b", "sm90", "SM_90", "sm_1000a", "compute_90", "sm_90a "):
        with pytest.raises(TargetError, match="expected sm_"):
            capability(name)


def test_cpu_of_a_machine() -> None:
    assert cpu_target("x86_64") == cpu_target("AMD64") == "cpu-x86_64"
    assert cpu_target("aarch64") == "cpu-aarch64"
    with pytest.raises(TargetError, match="riscv64"):
        cpu_target("riscv64")


def test_features_are_those_of_every_processor() -> None:
    first = "processor: 0\nflags\t\t: fpu sse2 avx2 avx512_bf16 sse4_1 abm\n\n"
    text = first + "processor: 1\nflags : fpu sse2 avx2 sse4_1 abm\n"
    found = parse_cpuinfo(text)
    assert missing_features("cpu-x86_64", ["sse2", "avx2", "sse4.1", "lzcnt"], found) == []
    assert missing_features("cpu-x86_64", ["avx512_bf16"], found) == ["avx512_bf16"]
    arm = parse_cpuinfo("Features\t: fp asimd asimddp i8mm\n")
    assert missing_features("cpu-aarch64", ["neon", "dotprod", "i8mm", "sve"], arm) == ["sve"]


def test_unreadable_cpuinfo_leaves_the_baseline() -> None:
    assert parse_cpuinfo("") == frozenset()
    assert missing_features("cpu-x86_64", ["sse2"], frozenset()) == []
    assert missing_features("cpu-x86_64", ["avx2"], frozenset()) == ["avx2"]
    assert cpu_features()
