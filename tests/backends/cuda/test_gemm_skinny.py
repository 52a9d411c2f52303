"""Candidates for few rows as data: they fit their kernels and every target; the largest compile for each."""

import ast
from pathlib import Path
from typing import Any

import pytest

from kiln.backends.cuda.compile import Source, assemble
from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.backends.cuda.variants.gemm_skinny import CANDIDATES, DEFAULTS, TILES
from kiln.compiler.target import TARGETS
from kiln.ir.dtypes import DTYPES

ROOT = Path(__file__).parents[3]
CUDA = tuple(t for t in TARGETS.values() if t.kind == "cuda")
OWN_BUFFERS = range(90, 120)
"""Capabilities whose matrix units read shared memory while the next step arrives: they need a buffer more."""
BY_NAME = {c.variant: c for c in CANDIDATES}


def _parameters(kernel: str) -> list[str]:
    module, _, name = kernel.partition(":")
    source = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [a.arg for a in found.args.args]


def _misfit(candidate: CudaPrimitive) -> str | None:
    """What of a row its kernel does not have, or the reverse."""
    wanted, given = _parameters(candidate.kernel), list(candidate.signature())
    if sorted(wanted) != sorted(given):
        return f"{set(wanted) ^ set(given)}"
    passed = [p.name for p in candidate.params]
    return None if passed == [n for n in wanted if n in passed] else "order"


def test_rows_fit_their_kernels() -> None:
    assert {_misfit(c) for c in CANDIDATES} == {None}


def test_a_row_without_a_constant_does_not_fit() -> None:
    row = CANDIDATES[-1]
    fewer = {k: v for k, v in row.constants.items() if k != "SPLIT"}
    assert (
        _misfit(CudaPrimitive(row.op, "v", row.kernel, row.params, fewer, row.grid, row.when)) == "{'SPLIT'}"
    )


def test_names_are_unique_and_defaults_are_candidates() -> None:
    assert len(BY_NAME) == len(CANDIDATES)
    assert set(DEFAULTS) <= BY_NAME.keys()


def test_hints_are_implied_by_the_predicate() -> None:
    for c in CANDIDATES:
        for p in c.params:
            if isinstance(p, Pointer) and p.hinted and ":" not in p.operand:
                assert ["aligned", p.operand, 16] in c.when
            if isinstance(p, Number) and p.hinted:
                assert ["divisible", p.value, 16] in c.when


def test_kernels_without_a_mask_ask_for_whole_steps() -> None:
    for c in CANDIDATES:
        whole = ["divisible", ["dim", "K"], c.constants["BLOCK_K"]] in c.when
        assert whole == bool(c.constants.get("EVEN_K"))


def test_sums_of_codes_are_promoted() -> None:
    for c in CANDIDATES:
        assert (c.constants.get("IMPRECISE") is not None) == (c.op != "matmul_bt")


def test_only_split_sums_have_scratch_and_its_counters_are_zeroed() -> None:
    for c in CANDIDATES:
        zeroed = {s.name: s.zeroed for s in c.scratch}
        assert zeroed == ({"partials": False, "arrivals": True} if c.constants.get("SPLIT", 1) > 1 else {})


def _staged(candidate: CudaPrimitive, capability: int) -> int:
    """Bytes of shared memory of its pipeline."""
    rows, features, step = (candidate.constants[f"BLOCK_{axis}"] for axis in "MNK")
    buffers = candidate.num_stages - (capability not in OWN_BUFFERS)
    return int((rows + features) * step * DTYPES[candidate.params[0].dtype].bytes * buffers)


def test_pipelines_fit_every_target() -> None:
    for c in CANDIDATES:
        for target in CUDA:
            if "SPLIT" in c.constants and c.min_sm <= target.capability <= c.max_sm:
                assert _staged(c, target.capability) <= target.max_shared, (c.variant, target.name)


def _largest() -> list[CudaPrimitive]:
    """Of each way to sum, the one with the most shared memory."""
    split = max(
        (c for c in CANDIDATES if c.op == "matmul_bt" and "SPLIT" in c.constants),
        key=lambda c: _staged(c, 80),
    )
    codes = max((c for c in CANDIDATES if c.op == "scaled_matmul_bt"), key=lambda c: _staged(c, 80))
    return [split, codes, next(c for c in CANDIDATES if "STAGES" in c.constants)]


def _assembled(row: CudaPrimitive, target: Any) -> Any:
    module, _, function = row.kernel.partition(":")
    source = Source(module, function, "", tuple(row.json_params()), row.constants, row.compile_options())
    return assemble(source, target)


@pytest.mark.parametrize("target", CUDA, ids=lambda t: t.name)
def test_the_largest_compile_without_spills(target: Any) -> None:
    for row in _largest():
        if row.min_sm <= target.capability <= row.max_sm:
            made = _assembled(row, target)
            assert (made.spill_stores, made.spill_loads) == (0, 0), row.variant
            assert made.shared <= target.max_shared, row.variant
            assert "cp.async.cg.shared.global" in made.asm["ptx"]


def test_every_tile_is_a_candidate_of_each_type() -> None:
    names = {tuple(c.constants.get(f"BLOCK_{axis}") for axis in "MN") for c in CANDIDATES}
    assert {(t.rows, t.features) for t in TILES} <= names
