"""The Triton source of every expressible op, in Triton's interpreter: bits equal to the oracle's.

One specialization an op, for a target with and for one without e4m3 conversions; `kiln test --interpret` runs
the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from kiln.compiler.catalog import load
from kiln.ir.record import expressible
from kiln.tools.cli import main
from kiln.tools.interpreted import Judged, interpret_first, pool
from kiln.tools.trees import read_tree

OWN = ("kiln.recipes",)
OPS = sorted(
    name for name, op in load(OWN).ops.items() if expressible(op) and not all(s.rare for s in op.ship)
)
CATALOGS = Path(__file__).resolve().parents[2] / "catalogs"


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    """Processes whose Triton interprets."""
    with pool(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def judged(workers: Executor) -> dict[str, list[Judged]]:
    """What came of every op's first specialization."""
    waiting = {op: workers.submit(interpret_first, op, OWN, ("sm_80", "sm_90a")) for op in OPS}
    return {op: future.result() for op, future in waiting.items()}


@pytest.mark.parametrize("op", OPS)
def test_bits_are_the_oracles(judged: dict[str, list[Judged]], op: str) -> None:
    assert judged[op]
    for j in judged[op]:
        assert j.faults == ()
        assert j.cases >= 3
        assert j.error == 0
        assert {target for target, _, _ in j.artifacts} <= {"sm_80", "sm_90a"}


def test_a_target_with_e4m3_has_a_source_of_its_own(judged: dict[str, list[Judged]]) -> None:
    assert len(judged["quant_fp8_static"]) == 2
    assert len(judged["add"]) == 1


def test_another_catalog_is_interpreted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CATALOGS), prepend=":")
    monkeypatch.setattr(sys, "path", [*sys.path, str(CATALOGS)])
    with pool(1) as executor:
        found = executor.submit(interpret_first, "above", ("twins_right",), ("sm_80",)).result()
    assert [j.faults for j in found] == [()]


def test_proofs_are_of_artifacts_from_these_sources(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert main(["build", "--target", "sm_80", "--op", "sigmoid", "--out", str(tree)]) == 0
    test = ["test", "--interpret", "--op", "sigmoid", "--evidence", "--tree", str(tree)]
    assert main([*test, "--target", "sm_89"]) == 0
    assert not (tree / "sm_80" / "EVIDENCE.json").exists()
    assert main(test) == 0
    read = read_tree(tree)
    (kernel,) = {k.sha256 for k in read.manifests["sm_80"].kernels}
    seen = read.evidence["sm_80"].of(kernel).interpreted
    assert seen is not None
    assert seen.contract_met
    assert seen.cases >= 3
