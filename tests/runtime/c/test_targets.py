"""Targets, ISA tiers, CPU features and element types: the same tables in C."""

import ctypes
import functools
from itertools import permutations

import pytest

from kiln.runtime.dtypes import CODES, DTYPES
from kiln.runtime.errors import TargetError
from kiln.runtime.targets import CPU_TIERS, missing_features, parse_cpuinfo, runs_on
from kiln.tests.runtime.c.core_build import Core
from kiln.tests.runtime.test_targets import FAMILIES, SHIPPED, TABLE


def best_first(core: Core, cc: tuple[int, int], available: list[str]) -> list[str]:
    legal = [t for t in available if core.lib.kiln_target_runs_on(t.encode(), *cc)]

    def order(a: str, b: str) -> int:
        return int(core.lib.kiln_target_compare(a.encode(), b.encode()))

    return sorted(legal, key=functools.cmp_to_key(order))


@pytest.mark.parametrize(("cc", "best"), TABLE)
def test_best_of_the_shipped_targets(libkiln_core: Core, cc: tuple[int, int], best: str | None) -> None:
    legal = best_first(libkiln_core, cc, SHIPPED)
    assert (legal[0] if legal else None) == best


@pytest.mark.parametrize(("cc", "available", "expected"), FAMILIES)
def test_order_of_legal_targets(
    libkiln_core: Core, cc: tuple[int, int], available: list[str], expected: list[str]
) -> None:
    for some in permutations(available):
        assert best_first(libkiln_core, cc, list(some)) == expected


@pytest.mark.parametrize(
    "name",
    ["sm_9", "sm_90b", "sm90", "SM_90", "sm_1000a", "compute_90", "sm_90a ", "sm_", "sm_90af", "", "cpu-x86"],
)
def test_no_target(libkiln_core: Core, name: str) -> None:
    assert not libkiln_core.lib.kiln_target_runs_on(name.encode(), 9, 0)
    with pytest.raises(TargetError):
        runs_on(name, (9, 0))


def test_tiers(libkiln_core: Core) -> None:
    for target, tiers in CPU_TIERS.items():
        ranks = [libkiln_core.lib.kiln_isa_rank(target.encode(), t.encode()) for t in tiers]
        assert ranks == list(range(len(tiers)))
        assert libkiln_core.lib.kiln_isa_rank(target.encode(), b"x86-64-v9") == -1
    assert libkiln_core.lib.kiln_isa_rank(b"sm_90a", b"neon") == -1


class Row(ctypes.Structure):
    """kiln_dtype_row"""

    _fields_ = (("name", ctypes.c_char_p), ("bytes", ctypes.c_int), ("code", ctypes.c_bool))


def test_element_types(libkiln_core: Core) -> None:
    rows = (Row * (len(DTYPES) + 1)).in_dll(libkiln_core.lib, "KILN_DTYPES")
    assert {r.name.decode(): r.bytes for r in rows[1:]} == DTYPES
    assert {r.name.decode() for r in rows[1:] if r.code} == CODES
    for i, name in enumerate(DTYPES, 1):
        assert libkiln_core.lib.kiln_dtype_named(name.encode()) == i
    assert libkiln_core.lib.kiln_dtype_named(b"f31") == 0


CPUINFO = [
    "processor: 0\nflags\t\t: fpu sse2 avx2 avx512_bf16 sse4_1 abm\n\nflags : fpu sse2 avx2 sse4_1 abm\n",
    "Features\t: fp asimd asimddp i8mm\nFeatures\t: fp asimd asimddp i8mm\n",
    *(
        "",
        "flags\t:\n",
        "flags: sse2",
        "flags: avx2\nflags: \n",
        "other: avx2\nflags avx2\n",
        "flags : AVX2  SSE4_2\t lzcnt \n\n",
    ),
]
FEATURES = [
    "sse2",
    "avx2",
    "sse4.1",
    "sse4_2",
    "lzcnt",
    "avx512_bf16",
    "neon",
    "dotprod",
    "i8mm",
    "sve",
    "fp16",
    "abm",
]


@pytest.mark.parametrize("text", CPUINFO)
@pytest.mark.parametrize("target", ["cpu-x86_64", "cpu-aarch64"])
def test_features_have_the_same_verdict(libkiln_core: Core, text: str, target: str) -> None:
    present = parse_cpuinfo(text)
    size, feature_at, count_at = (libkiln_core.lib.test_sizes(i) for i in (2, 4, 5))
    with libkiln_core.arena() as arena:
        made, data = ctypes.c_void_p(), text.encode()
        assert (
            libkiln_core.lib.kiln_cpu_features_of(
                arena, data, ctypes.c_size_t(len(data)), ctypes.byref(made), None
            )
            == 0
        )
        for needed in [*([f] for f in FEATURES), FEATURES, FEATURES[::-1], []]:
            names = (ctypes.c_char_p * max(len(needed), 1))(*[f.encode() for f in needed])
            kernel = (ctypes.c_char * size)()
            ctypes.c_void_p.from_buffer(kernel, feature_at).value = ctypes.addressof(names)
            ctypes.c_uint32.from_buffer(kernel, count_at).value = len(needed)
            missing = missing_features(target, needed, present)
            found = libkiln_core.lib.kiln_cpu_lacks(made, target.encode(), kernel)
            assert (None if found is None else found.decode()) == (missing[0] if missing else None)


def test_this_cpu_has_its_baseline(libkiln_core: Core) -> None:
    with libkiln_core.arena() as arena:
        made = ctypes.c_void_p()
        assert libkiln_core.lib.kiln_cpu_features(arena, ctypes.byref(made), None) == 0
        assert made.value
