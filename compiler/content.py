"""What a target's folder is to hold, from the results of its jobs: files, and the manifest that accounts for
them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kiln.compiler.backend import Built, Job
from kiln.compiler.errors import BuildError, Failure
from kiln.compiler.reuse import Existing
from kiln.compiler.signatures import signature_json
from kiln.compiler.tree import TargetContent, check_content
from kiln.ir.spec import Op
from kiln.runtime.like import STORED
from kiln.runtime.manifest import ABI, SCHEMA, dump

State = Literal["reused", "built", "failed"]


@dataclass
class TargetPlan:
    """A target on its way: what is asked for, and what has come of it."""

    target: str
    toolchain: Mapping[str, str]
    jobs: list[Job]
    recipes: list[dict[str, Any]]
    """PLAN entries."""
    selected: frozenset[str]
    """Ops that this build is about."""
    is_partial: bool
    """Whether other ops stay as they are in the tree; else the tree holds exactly the declarations."""
    results: dict[tuple[str, str], tuple[Built, State, float]] = field(default_factory=dict)
    """By (op, variant) of the job: result, state, seconds."""
    failures: list[Failure] = field(default_factory=list)
    unserved: list[str] = field(default_factory=list)
    """Composites that this target can't run, and the op that is missing for each."""


def assemble(plan: TargetPlan, loaded: Mapping[str, Op], out: Path) -> TargetContent | None:
    """The content of the target's folder; None if a job failed (or fails here), or if there is nothing to
    hold."""
    if plan.failures:
        return None
    try:
        return _assemble(plan, loaded, out)
    except BuildError as e:
        plan.failures.append(Failure(plan.target, "MANIFEST", "json", str(e)))
        return None


def _assemble(plan: TargetPlan, loaded: Mapping[str, Op], out: Path) -> TargetContent | None:
    signatures = {name: signature_json(op) for name, op in loaded.items() if name in plan.selected}
    recipes = list(plan.recipes)
    parts = [built for built, _, _ in plan.results.values()]
    if plan.is_partial:
        parts += _others(plan, Existing.open(out, plan.target), signatures, recipes)
    kernels = [_with_toolchain(k, plan.toolchain) for part in parts for k in part.kernels]
    if not kernels:
        return None
    files: dict[str, bytes] = {}
    sources: dict[str, bytes] = {}
    for part in parts:
        _merge(files, part.files)
        _merge(sources, part.sources)
    kernels = _stored_once(kernels, files)
    declared, recipes = recipes, runnable(recipes, {k["op"] for k in kernels})
    plan.unserved = unserved(declared, recipes, {k["op"] for k in kernels}, plan.target)
    served = {entry["op"] for entry in (*kernels, *recipes)}
    manifest = {
        "schema": SCHEMA,
        "abi": ABI,
        "target": plan.target,
        "toolchain": dict(plan.toolchain),
        "ops": {name: signature for name, signature in signatures.items() if name in served},
        "kernels": sorted(kernels, key=_identity),
        "recipes": sorted(recipes, key=_identity),
        "sources": {
            n: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for n, data in sources.items()
        },
    }
    content = TargetContent(manifest, {**files, **sources})
    check_content(plan.target, content)
    return content


def _identity(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["op"], entry["variant"]


def _others(
    plan: TargetPlan, existing: Existing, signatures: dict[str, Any], recipes: list[dict[str, Any]]
) -> list[Built]:
    """What the tree holds of unselected ops; their signatures and plans are added to the given ones."""
    parts: list[Built] = []
    if existing.manifest is None:
        return parts
    for name, signature in existing.manifest.ops.items():
        if name in plan.selected:
            continue
        built = existing.of_op(name)
        if built is None:
            raise BuildError(
                f"op {name} was not selected, and its artifacts in the tree are damaged; build it as well"
            )
        parts.append(built)
        signatures[name] = dump(signature)
        recipes += [dump(p) for p in existing.manifest.recipes if p.op == name]
    return parts


def runnable(recipes: list[dict[str, Any]], served: set[str]) -> list[dict[str, Any]]:
    """Plans all of whose steps can be run on this target; a plan may call ops that only have plans
    themselves."""
    known = set(served)
    while more := {p["op"] for p in recipes if all(s["op"] in known for s in p["steps"])} - known:
        known |= more
    return [p for p in recipes if all(s["op"] in known for s in p["steps"])]


def unserved(
    declared: list[dict[str, Any]], kept: list[dict[str, Any]], served: set[str], target: str
) -> list[str]:
    """A sentence for each plan that was dropped: which op its target has no realization of. Nothing is missed
    where a hand-written plan of another target's kernels goes and its op is served all the same."""
    known = served | {p["op"] for p in kept}
    return [
        f"{p['op']}.{p['variant']} can't run on {target}: {step['op']} has no realization there"
        for p in declared
        if p not in kept and not (p["tier"] == "primitive" and p["op"] in known)
        for step in p["steps"]
        if step["op"] not in known
    ]


def _stored_once(kernels: list[dict[str, Any]], files: dict[str, bytes]) -> list[dict[str, Any]]:
    """The entries with those files that are a copy of another said to be stored as that one, the first by
    name; the copies are taken out of `files`."""
    first: dict[bytes, str] = {}
    copies = {name: there for name in sorted(files) if (there := first.setdefault(files[name], name)) != name}
    for name in copies:
        del files[name]
    return [{**k, STORED: copies[k["file"]]} if k["file"] in copies else k for k in kernels]


def _with_toolchain(entry: Mapping[str, Any], common: Mapping[str, str]) -> dict[str, Any]:
    """The entry with only those tools that differ from the manifest's."""
    own = {name: version for name, version in entry["toolchain"].items() if common.get(name) != version}
    return {**entry, "toolchain": own}


def _merge(into: dict[str, bytes], more: Mapping[str, bytes]) -> None:
    for name, data in more.items():
        if into.setdefault(name, data) != data:
            raise BuildError(f"two jobs made different files named {name}; give them different names")
