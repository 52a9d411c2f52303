"""List targets: what each runs on, and what the tree holds for it; and whether C answers calls here."""

from __future__ import annotations

import argparse
from typing import Any

from kiln.compiler.target import TARGETS
from kiln.runtime.fastcall import native
from kiln.runtime.manifest import Manifest
from kiln.runtime.targets import CPU_TIERS, capability
from kiln.tools.console import emit, size, table, width
from kiln.tools.trees import add_tree_option, tree_or_none


def target_names() -> tuple[str, ...]:
    """Every target that Kiln compiles for, in the table's order."""
    return tuple(TARGETS)


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln targets`."""
    add_tree_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print every target."""
    tree = tree_or_none(args.tree)
    manifests = tree.manifests if tree else {}
    listed = [entry(name, manifests.get(name)) for name in dict.fromkeys([*target_names(), *manifests])]
    calls = {"native": native().module is not None, "why_not": native().why}
    emit(args, {"targets": listed, "calls": calls}, lambda: f"{_text(listed)}\n{_calls(native().why)}")
    return 0


def entry(name: str, manifest: Manifest | None) -> dict[str, Any]:
    """What scripts get of a target."""
    known = TARGETS.get(name)
    is_cpu = name in CPU_TIERS
    files = manifest.files().values() if manifest else ()
    return {
        "name": name,
        "kind": "cpu" if is_cpu else "cuda",
        "runs_on": _runs_on(name),
        "tiers": [t.name for t in known.tiers] if known else [],
        "ops": len(manifest.ops) if manifest else 0,
        "kernels": len(manifest.kernels) if manifest else 0,
        "bytes": sum(f.bytes for f in files),
    }


def _runs_on(name: str) -> str:
    if name in CPU_TIERS:
        return f"{name.removeprefix('cpu-')}, Linux"
    major, minor, suffix = capability(name)
    if suffix == "a":
        return f"compute capability {major}.{minor} only"
    return f"compute capability {major}.{minor} and later {major}.x"


def _calls(why_not: str | None) -> str:
    if why_not is None:
        return "calls from Python: layouts that were met before are answered in C (runtime/native)"
    return f"calls from Python: answered in Python, without the extension runtime/native: {why_not}"


def _text(listed: list[dict[str, Any]]) -> str:
    rows = [[t["name"], t["runs_on"], t["ops"], t["kernels"], size(t["bytes"])] for t in listed]
    return table(["target", "runs on", "ops", "kernels", "size"], rows, width())
