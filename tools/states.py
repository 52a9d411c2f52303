"""The states of the kernel-family matrix, derived from declarations, manifests and evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kiln.recipes.matrix import CAPABILITIES, FAMILIES, LACKING
from kiln.runtime.manifest import Manifest
from kiln.tools.capabilities import EXERCISES, Exercises
from kiln.tools.evidence import Evidence, Proofs
from kiln.tools.trees import Tree


class State(IntEnum):
    """How far something has come; each state includes the ones before it."""

    INVENTORIED = 0
    """A row of the matrix, nothing more."""
    DECLARED = 1
    """Has ops: signature, semantics, contract, reference."""
    COMPILED = 2
    """Has artifacts in the tree."""
    INTERPRETED = 3
    """Its kernel source met the contract in an interpreter."""
    RAN = 4
    """The very bytes in the tree met the contract on a device."""
    MEASURED = 5
    """And were timed on one."""


@dataclass(frozen=True)
class Row:
    """A family: its ops, and per target how far they have come."""

    family: str
    title: str
    ops: tuple[str, ...]
    op_states: Mapping[str, Mapping[str, State]]
    """op -> target -> state."""
    targets: Mapping[str, State]
    """target -> the state of the op that is least far there: a family is no further than any of its ops."""
    capability: str | None = None
    """What the row is about instead of ops."""

    @property
    def lacks(self) -> str | None:
        """What its title names and its ops do not cover; the states are those of its ops."""
        return LACKING.get(self.family) if self.ops else None

    @property
    def state(self) -> State:
        """The best state over targets."""
        floor = State.DECLARED if self.ops or self.capability else State.INVENTORIED
        return max([floor, *self.targets.values()])


def artifact_state(proofs: Proofs) -> State:
    """The state of an artifact that is in a manifest."""
    if proofs.ran is not None and proofs.ran.contract_met:
        return State.MEASURED if proofs.measured else State.RAN
    if proofs.interpreted is not None and proofs.interpreted.contract_met:
        return State.INTERPRETED
    return State.COMPILED


def together(found: Collection[State]) -> State:
    """The state of what several artifacts show: see `op_states`."""
    return min(found) if min(found) < State.RAN else max(found)


def capability_state(exercises: Exercises, manifest: Manifest, evidence: Evidence) -> State:
    """How far a capability has come on a target: as far as the kernels that exercise it. An interpreter does
    not: it runs source, and passes the loader by.
    """
    found = [artifact_state(evidence.of(k.sha256)) for k in manifest.kernels if exercises(manifest.target, k)]
    state = together(found) if found else State.DECLARED
    return State.COMPILED if state is State.INTERPRETED else state


def internal_steps(manifests: Iterable[Manifest]) -> frozenset[str]:
    """Ops that are launches of another op: the steps of primitive plans, on whichever target has them."""
    plans = [p for m in manifests for p in m.recipes if p.tier == "primitive"]
    return frozenset(step.op for p in plans for step in p.steps)


def op_states(manifest: Manifest, evidence: Evidence) -> dict[str, State]:
    """State of every op of a target.

    An op is as far as the artifact that is least far, but MEASURED as soon as all ran and one was timed:
    nobody times every variant. An op that only has a plan is as far as the ops it calls, RAN at most: its
    own time was not taken.
    """
    artifacts: dict[str, list[State]] = {}
    for kernel in manifest.kernels:
        artifacts.setdefault(kernel.op, []).append(artifact_state(evidence.of(kernel.sha256)))
    states = {op: together(found) for op, found in artifacts.items()}
    pending = {p.op: {s.op for s in p.steps} for p in manifest.recipes if p.op not in states}
    while ready := [op for op, steps in pending.items() if steps <= states.keys()]:
        for op in ready:
            states[op] = min([State.RAN, *(states[s] for s in pending.pop(op))])
    return states


def families(declared: Mapping[str, str], tree: Tree | None) -> dict[str, str]:
    """Op -> family, from declarations and, where those are not at hand, from the manifests."""
    manifests = tree.manifests.values() if tree else ()
    return {op: sig.family for m in manifests for op, sig in m.ops.items()} | dict(declared)


def rows(declared: Mapping[str, str], tree: Tree | None, targets: tuple[str, ...]) -> list[Row]:
    """Every row of the matrix, in its order; families of user catalogs follow.

    Args:
        declared: op -> family.
        tree: the tree whose artifacts count; None for declarations alone.
        targets: the columns.
    """
    family_of = families(declared, tree)
    extra = sorted(set(family_of.values()) - FAMILIES.keys())
    held = tree or Tree(Path(), "", {}, {})
    there = {t: op_states(m, held.evidence[t]) for t, m in held.manifests.items()}
    internal = internal_steps(held.manifests.values())
    found = []
    for family in [*FAMILIES, *extra]:
        ops = tuple(sorted(op for op, f in family_of.items() if f == family))
        if family in CAPABILITIES:
            found.append(_capability_row(family, ops, there, held, targets))
        else:
            found.append(_op_row(family, ops, there, targets, internal))
    return found


def _capability_row(
    family: str,
    ops: tuple[str, ...],
    there: Mapping[str, Mapping[str, State]],
    tree: Tree,
    targets: tuple[str, ...],
) -> Row:
    """Ops of such a row prepare what the kernels take: where a target has them they count as well."""
    name = CAPABILITIES[family]
    states = {op: {t: there.get(t, {}).get(op, State.DECLARED) for t in targets} for op in ops}
    cells = {
        t: min([
            capability_state(EXERCISES[name], tree.manifests[t], tree.evidence[t]),
            *(states[op][t] for op in ops if op in there[t]),
        ])
        for t in targets
        if t in tree.manifests
    }
    return Row(family, FAMILIES[family], ops, states, dict.fromkeys(targets, State.DECLARED) | cells, name)


def _op_row(
    family: str,
    ops: tuple[str, ...],
    there: Mapping[str, Mapping[str, State]],
    targets: tuple[str, ...],
    internal: frozenset[str],
) -> Row:
    states = {op: {t: there.get(t, {}).get(op, State.DECLARED) for t in targets} for op in ops}
    default = State.DECLARED if ops else State.INVENTORIED
    cells = {
        # A launch of another op is missed only where that op runs by it.
        t: min((states[op][t] for op in ops if op not in internal or op in there.get(t, ())), default=default)
        for t in targets
    }
    return Row(family, FAMILIES.get(family, ""), ops, states, cells)
