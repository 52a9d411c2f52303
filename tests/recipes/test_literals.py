"""Every worked number of the specifications has a test."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest

from kiln.tests.ir import test_interpret
from kiln.tests.recipes import (
    test_activation,
    test_fusion,
    test_gdn,
    test_gdn_calls,
    test_gdn_chunk,
    test_gdn_chunk_sizes,
    test_gdn_pack,
    test_gdn_replay,
    test_gemm,
    test_gemm_fp8,
    test_norm,
    test_quant,
    test_ssm,
    test_ssm_calls,
    test_topk,
)
from kiln.tests.recipes.literals import checked, expected, literal
from kiln.tests.runtime import test_delta_rule, test_projections

MODULES = (
    test_interpret, test_activation, test_fusion, test_gemm, test_gemm_fp8, test_norm, test_quant, test_topk,
    test_gdn, test_gdn_chunk, test_gdn_pack, test_gdn_replay, test_ssm, test_projections,
    test_gdn_calls, test_gdn_chunk_sizes, test_ssm_calls,
    test_delta_rule,
)  # fmt: skip


def test_every_worked_number_is_checked_once() -> None:
    counts = Counter(name for module in MODULES for name in checked(module))
    assert expected() - counts.keys() == set(), "no test checks these"
    assert counts.keys() - expected() == set(), "no specification has these"
    assert [name for name, n in counts.items() if n > 1] == []


def _module(**tests: object) -> ModuleType:
    module = ModuleType("numbers")
    vars(module).update(tests)
    return module


def test_only_tests_that_run_count() -> None:
    @literal("act/1.sum")
    @pytest.mark.parametrize("n", [1, pytest.param(2, marks=literal("act/1.eps"))])
    def counted(n: int) -> None: ...

    @pytest.mark.skip(reason="shows that this is not counted")
    @literal("act/2.sum")
    def skipped() -> None: ...

    assert sorted(checked(_module(test_a=counted, test_b=skipped, other=counted))) == [
        "act/1.eps",
        "act/1.sum",
    ]
