"""How states derive from manifests and evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.recipes.matrix import FAMILIES
from kiln.tests.tools.synthetic import (
    Json,
    digest,
    interpreted,
    kernel,
    manifest,
    measured,
    plan,
    ran,
    write_tree,
)
from kiln.tools.states import Row, State, op_states, rows
from kiln.tools.trees import read_tree

FAMILY = "KERNEL-EW-NORM-ACT"


def states(
    tmp_path: Path, kernels: list[Json], plans: list[Json], artifacts: dict[str, Json]
) -> dict[str, str]:
    evidence = {digest(file): proofs for file, proofs in artifacts.items()}
    tree = read_tree(
        write_tree(tmp_path / "t", manifest("sm_90a", kernels, plans), evidence={"sm_90a": evidence})
    )
    found = op_states(tree.manifests["sm_90a"], tree.evidence["sm_90a"])
    return {op: state.name for op, state in found.items()}


@pytest.mark.parametrize(
    ("proofs", "state"),
    [
        ({"compiled": {"launch_proof": True, "budgets": True}}, "COMPILED"),
        ({"interpreted": interpreted()}, "INTERPRETED"),
        ({"interpreted": interpreted(contract_met=False)}, "COMPILED"),
        ({"ran": ran()}, "RAN"),
        ({"ran": ran(contract_met=False), "interpreted": interpreted()}, "INTERPRETED"),
        ({"ran": ran(), "measured": [measured("add")]}, "MEASURED"),
        ({"measured": [measured("add")]}, "COMPILED"),
    ],
)
def test_an_artifact_is_as_far_as_its_proofs(tmp_path: Path, proofs: Json, state: str) -> None:
    assert states(tmp_path, [kernel("add")], [], {"add.generic.cubin": proofs}) == {"add": state}


def test_evidence_of_other_bytes_counts_for_nothing(tmp_path: Path) -> None:
    assert states(tmp_path, [kernel("add")], [], {"add.older.cubin": {"ran": ran()}}) == {"add": "COMPILED"}


def test_an_op_is_as_far_as_its_least_artifact(tmp_path: Path) -> None:
    both = [kernel("add", "a"), kernel("add", "b")]
    timing = [measured("add", "a")]
    proofs: dict[str, Json] = {"add.a.cubin": {"ran": ran(), "measured": timing}}
    assert states(tmp_path / "1", both, [], proofs) == {"add": "COMPILED"}
    proofs["add.b.cubin"] = {"ran": ran()}
    assert states(tmp_path / "2", both, [], proofs) == {"add": "MEASURED"}


def test_a_plan_is_as_far_as_its_steps(tmp_path: Path) -> None:
    plans = [plan("div", "add", "mul"), plan("exp", "div")]
    proofs = {"add.generic.cubin": {"ran": ran(), "measured": [measured("add")]}}
    kernels = [kernel("add"), kernel("mul")]
    found = states(tmp_path / "1", kernels, plans, proofs)
    assert (found["div"], found["exp"]) == ("COMPILED", "COMPILED")
    found = states(tmp_path / "2", kernels, plans, {**proofs, "mul.generic.cubin": {"ran": ran()}})
    assert (found["div"], found["exp"]) == ("RAN", "RAN")


def find(found: list[Row], family: str) -> Row:
    return next(r for r in found if r.family == family)


def test_every_family_has_a_row_in_order(tree: Path) -> None:
    found = rows({}, read_tree(tree), ("sm_80", "sm_90a", "cpu-x86_64"))
    assert [r.family for r in found] == list(FAMILIES)
    assert len(found) == 60
    row = find(found, FAMILY)
    assert row.ops == ("add", "div", "mul", "sub")
    assert {t: s.name for t, s in row.targets.items()} == {
        "sm_80": "DECLARED",
        "sm_90a": "INTERPRETED",
        "cpu-x86_64": "DECLARED",
    }
    assert row.op_states["add"]["sm_90a"] is State.MEASURED
    assert row.state is State.INTERPRETED
    assert find(found, "KERNEL-CONV3D").state is State.INVENTORIED


def test_an_op_that_is_only_declared_holds_its_family_back(tree: Path) -> None:
    found = rows({"log": FAMILY, "mine": "MY-FAMILY"}, read_tree(tree), ("sm_90a",))
    assert find(found, FAMILY).targets == {"sm_90a": State.DECLARED}
    assert (found[-1].family, found[-1].state) == ("MY-FAMILY", State.DECLARED)


def _pairs(tmp_path: Path, *, steps_on_cpu: bool) -> Row:
    """A family of `pairs`, which is launched as `tiles` and `merge` on CUDA and whole on the CPU."""
    launches = {**plan("pairs", "tiles", "merge"), "tier": "primitive"}
    isa = {"tier": "x86-64", "features": []}
    on_cpu = [kernel(op, file=f"{op}.so", isa=isa) for op in ["pairs"] + ["tiles"] * steps_on_cpu]
    tree = write_tree(
        tmp_path / "t",
        manifest("sm_90a", [kernel("merge"), kernel("tiles")], [launches]),
        manifest("cpu-x86_64", on_cpu),
        evidence={"cpu-x86_64": {digest("pairs.generic.cubin"): {"ran": ran()}}},
    )
    declared = dict.fromkeys(["pairs", "tiles", "merge"], FAMILY)
    return find(rows(declared, read_tree(tree), ("sm_80", "sm_90a", "cpu-x86_64")), FAMILY)


def test_a_launch_of_another_op_counts_where_it_is_called(tmp_path: Path) -> None:
    row = _pairs(tmp_path / "1", steps_on_cpu=False)
    assert row.targets == {"sm_80": State.DECLARED, "sm_90a": State.COMPILED, "cpu-x86_64": State.RAN}
    assert row.op_states["merge"]["cpu-x86_64"] is State.DECLARED
    # Where it is there, it counts as any op does.
    assert _pairs(tmp_path / "2", steps_on_cpu=True).targets["cpu-x86_64"] is State.COMPILED


def test_the_step_of_a_composite_is_an_op_of_its_own(tmp_path: Path) -> None:
    """`mul` is called by a composite on one target; where it is missing its family is not complete."""
    tree = write_tree(
        tmp_path / "t",
        manifest("sm_80", [kernel("add")]),
        manifest("sm_90a", [kernel("add"), kernel("mul")], [plan("div", "add", "mul")]),
    )
    declared = {"add": FAMILY, "mul": FAMILY, "div": "KERNEL-FUSION-FRAMEWORK"}
    found = rows(declared, read_tree(tree), ("sm_80",))
    assert find(found, FAMILY).targets == {"sm_80": State.DECLARED}


DISPATCH = "KERNEL-CUDA-DISPATCH-AOT"


@pytest.mark.parametrize(
    ("add", "sub", "state"),
    [
        ({}, {}, "COMPILED"),
        ({"interpreted": interpreted()}, {"interpreted": interpreted()}, "COMPILED"),
        ({"ran": ran()}, {"interpreted": interpreted()}, "COMPILED"),
        ({"ran": ran()}, {"ran": ran()}, "RAN"),
        ({"ran": ran(), "measured": [measured("add")]}, {"ran": ran()}, "MEASURED"),
        ({"ran": ran()}, {"ran": ran(contract_met=False)}, "COMPILED"),
    ],
)
def test_dispatch_is_as_far_as_the_kernels_it_launched(
    tmp_path: Path, add: Json, sub: Json, state: str
) -> None:
    proofs = {digest("add.generic.cubin"): add, digest("sub.generic.cubin"): sub}
    tree = write_tree(
        tmp_path / "t",
        manifest("sm_90a", [kernel("add"), kernel("sub")]),
        evidence={"sm_90a": {d: p for d, p in proofs.items() if p}},
    )
    row = find(rows({}, read_tree(tree), ("sm_80", "sm_90a", "cpu-x86_64")), DISPATCH)
    assert {t: s.name for t, s in row.targets.items()} == {
        "sm_80": "DECLARED",
        "sm_90a": state,
        "cpu-x86_64": "DECLARED",
    }
    assert (row.ops, row.capability, row.state.name) == ((), "cuda_dispatch", state)


@pytest.mark.parametrize(("proofs", "state"), [({"ran": ran()}, State.RAN), ({}, State.COMPILED)])
def test_a_capability_is_no_further_than_its_own_op_where_that_is(
    tmp_path: Path, proofs: Json, state: State
) -> None:
    """`sub` belongs to the row, and one of two targets has it."""
    walk, scratch = "gated_delta_rule_chunk_walk", "KERNEL-GDN-SCRATCH"
    evidence: Json = {digest(f"{walk}.generic.cubin"): {"ran": ran()}}
    if proofs:
        evidence[digest("sub.generic.cubin")] = proofs
    tree = write_tree(
        tmp_path / "t",
        manifest("sm_80", [kernel(walk)]),
        manifest("sm_90a", [kernel(walk), kernel("sub")]),
        evidence={t: evidence for t in ("sm_80", "sm_90a")},
    )
    row = find(rows({"sub": scratch}, read_tree(tree), ("sm_80", "sm_90a", "cpu-x86_64")), scratch)
    assert row.ops == ("sub",)
    assert row.targets == {"sm_80": State.RAN, "sm_90a": state, "cpu-x86_64": State.DECLARED}


def test_kernels_of_a_cpu_say_nothing_about_cuda(tmp_path: Path) -> None:
    on_cpu = kernel("add", file="add.so", isa={"tier": "x86-64", "features": []})
    evidence = {"cpu-x86_64": {digest("add.generic.cubin"): {"ran": ran()}}}
    tree = write_tree(tmp_path / "t", manifest("cpu-x86_64", [on_cpu]), evidence=evidence)
    found = rows({}, read_tree(tree), ("cpu-x86_64",))
    assert find(found, DISPATCH).targets == {"cpu-x86_64": State.DECLARED}
    assert find(found, FAMILY).targets == {"cpu-x86_64": State.RAN}


def test_without_a_tree_everything_is_declared_at_most() -> None:
    found = rows({"log": FAMILY}, None, ("sm_90a",))
    assert {r.state for r in found} == {State.INVENTORIED, State.DECLARED}
