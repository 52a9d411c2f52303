"""Which targets a device may run, and in which order: the compatibility table, and the features of this
CPU."""

import os
import platform
import re
from collections.abc import Iterable, Mapping

from kiln.runtime.errors import TargetError

CPU_TIERS: Mapping[str, tuple[str, ...]] = {
    "cpu-x86_64": (
        *("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"),
        *("x86-64-v4-vnni", "x86-64-v4-bf16", "x86-64-v4-amx"),
    ),
    "cpu-aarch64": ("neon", "dotprod", "i8mm"),
}
"""ISA tiers of each CPU target, lowest first."""

TARGET_PATTERN = r"sm_[0-9]{2,3}[af]?|cpu-x86_64|cpu-aarch64"
_SM = re.compile(r"sm_([0-9]{1,2})([0-9])([af]?)", re.ASCII)
_SUFFIX_ORDER = {"a": 0, "f": 1, "": 2}


def tier_rank(target: str, tier: str) -> int:
    """Position of an ISA tier among those of its target; higher is preferred."""
    return CPU_TIERS[target].index(tier)


def capability(target: str) -> tuple[int, int, str]:
    """(major, minor, suffix) of a CUDA target: sm_100a is (10, 0, "a").

    Raises:
        TargetError: not a CUDA target name.
    """
    match = _SM.fullmatch(target)
    if match is None:
        raise TargetError(
            f"found the target {target!r}, expected sm_<major><minor> with an optional a or f, as in sm_90a."
        )
    return int(match[1]), int(match[2]), match[3]


def runs_on(target: str, cc: tuple[int, int]) -> bool:
    """Whether cubins of a CUDA target may run on a device of compute capability `cc`.

    `a` needs exactly its capability; `f` and plain targets the same major and at least their minor.
    """
    major, minor, suffix = capability(target)
    return (major, minor) == cc if suffix == "a" else major == cc[0] and minor <= cc[1]


def legal_targets(cc: tuple[int, int], available: Iterable[str]) -> list[str]:
    """The targets of `available` that a device of capability `cc` may run, best first.

    The exact minor comes before lower ones; at one minor, `a` before `f` before plain.
    """
    legal = [t for t in available if t.startswith("sm_") and runs_on(t, cc)]
    return sorted(legal, key=lambda t: (-capability(t)[1], _SUFFIX_ORDER[capability(t)[2]]))


def cpu_target(machine: str | None = None) -> str:
    """The CPU target of this machine, or of `machine` (a `uname -m` name).

    Raises:
        TargetError: a machine Kiln has no CPU target for.
    """
    found = (machine or platform.machine()).lower()
    names = {"x86_64": "cpu-x86_64", "amd64": "cpu-x86_64", "aarch64": "cpu-aarch64", "arm64": "cpu-aarch64"}
    if found not in names:
        raise TargetError(f"found a CPU of type {found}, expected x86_64 or aarch64; run on one of these.")
    return names[found]


_SAME = {"lzcnt": "abm", "sse3": "pni", "neon": "asimd", "dotprod": "asimddp", "fp16": "asimdhp"}


def feature_key(name: str) -> str:
    """One spelling for a feature: compilers and /proc/cpuinfo disagree on dots, underscores and a few
    names."""
    plain = name.lower().replace("_", "").replace(".", "")
    return _SAME.get(plain, plain)


def parse_cpuinfo(text: str) -> frozenset[str]:
    """The features that every processor of a /proc/cpuinfo text has, as `feature_key` spells them."""
    found: frozenset[str] | None = None
    for line in text.splitlines():
        label, colon, value = line.partition(":")
        if colon and label.strip() in ("flags", "Features"):
            here = frozenset(map(feature_key, value.split()))
            found = here if found is None else found & here
    return found or frozenset()


def cpu_features() -> frozenset[str]:
    """The features of this CPU that its kernel has enabled; empty where they cannot be read, so that only
    baselines run.

    /proc/cpuinfo is what Linux made of CPUID and the OS state (or HWCAP): a feature whose registers it does
    not save is not listed.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            return parse_cpuinfo(f.read())
    except OSError:
        return frozenset()


_BASELINE = {
    "cpu-x86_64": frozenset(map(feature_key, ("fpu", "cx8", "cmov", "mmx", "fxsr", "sse", "sse2"))),
    "cpu-aarch64": frozenset(map(feature_key, ("fp", "asimd"))),
}


def missing_features(target: str, needed: Iterable[str], present: frozenset[str]) -> list[str]:
    """Those of `needed` that are neither part of the architecture's baseline nor in `present`."""
    return [n for n in needed if (key := feature_key(n)) not in present and key not in _BASELINE[target]]


def cpu_count() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
