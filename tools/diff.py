"""Compare two trees: what was added and removed, and for what both hold, contracts, resources, bytes and
measured time. Exit code 1 if anything differs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kiln.runtime.manifest import Kernel, Manifest, Plan, dump
from kiln.tools.console import emit, plural, require, table, width
from kiln.tools.evidence import Measured
from kiln.tools.trees import Tree, add_selection_options, matches, read_tree

CONTRACT = (
    "tier",
    "mode",
    "entry",
    "params",
    "grid",
    "block",
    "cluster",
    "shared_bytes",
    "launch",
    "scratch",
    "when",
    "priority",
    "isa",
    "numerics",
    "budget",
)
"""The fields of a kernel that a caller or the launcher depends on."""
TOLERANCE = 0.02
"""Two medians closer than this part of the older one are the same speed."""


@dataclass(frozen=True)
class Difference:
    """One thing that differs; `kernel` is op.variant, an op for its signature, empty for a whole target."""

    target: str
    kernel: str
    kind: str
    """added, removed, contract, resources, bytes or speed."""
    field: str
    before: Any
    after: Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln diff`."""
    parser.add_argument("before", type=Path, metavar="A", help="the older tree")
    parser.add_argument("after", type=Path, metavar="B", help="the newer tree")
    add_selection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print what differs between two trees."""
    before, after = read_tree(args.before), read_tree(args.after)
    require(args.target or (), [*before.manifests, *after.manifests], "target")
    found = [d for d in differences(before, after) if _selected(d, args)]
    emit(args, {"differences": [asdict(d) for d in found]}, lambda: _text(found))
    return 1 if found else 0


def _selected(d: Difference, args: argparse.Namespace) -> bool:
    return (not args.target or d.target in args.target) and matches(d.kernel.split(".")[0], args.op)


def differences(before: Tree, after: Tree) -> list[Difference]:
    """Every difference, by target and kernel."""
    found = []
    for target in sorted(before.manifests.keys() | after.manifests.keys()):
        old, new = before.manifests.get(target), after.manifests.get(target)
        if old is None or new is None:
            found.append(_presence(target, "", old is None))
            continue
        found += _manifests(target, old, new)
        found += _speeds(target, before, after)
    return sorted(found, key=lambda d: (d.target, d.kernel, d.kind, d.field))


def _presence(target: str, kernel: str, added: bool) -> Difference:
    return Difference(target, kernel, "added" if added else "removed", "", not added, added)


def _manifests(target: str, old: Manifest, new: Manifest) -> Iterator[Difference]:
    if old.toolchain != new.toolchain:
        yield Difference(target, "", "bytes", "toolchain", dict(old.toolchain), dict(new.toolchain))
    for op in sorted(old.ops.keys() & new.ops.keys()):
        if old.ops[op] != new.ops[op]:
            yield from _fields(target, op, "contract", dump(old.ops[op]), dump(new.ops[op]))
    a, b = _entries(old), _entries(new)
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield _presence(target, name, name not in a)
        else:
            yield from _entry(target, name, dump(a[name]), dump(b[name]))


def _entries(manifest: Manifest) -> dict[str, Kernel | Plan]:
    entries: list[Kernel | Plan] = [*manifest.kernels, *manifest.recipes]
    return {f"{e.op}.{e.variant}": e for e in entries}


def _entry(target: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    if "sha256" not in old or "sha256" not in new:
        yield from _fields(target, name, "contract", old, new)
        return
    keys = (CONTRACT, ("bytes", "sha256"))
    for kind, wanted in zip(("contract", "bytes"), keys, strict=True):
        yield from _fields(target, name, kind, {k: old[k] for k in wanted}, {k: new[k] for k in wanted})
    yield from _fields(target, name, "resources", old["resources"], new["resources"])


def _fields(
    target: str, name: str, kind: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Difference]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield Difference(target, name, kind, key, old.get(key), new.get(key))


def _speeds(target: str, before: Tree, after: Tree) -> Iterator[Difference]:
    old, new = _timings(before, target), _timings(after, target)
    for key in sorted(old.keys() & new.keys()):
        a, b = old[key].median_us, new[key].median_us
        if abs(b - a) > TOLERANCE * a:
            shape = " ".join(f"{k}={v}" for k, v in sorted(old[key].shape.items()))
            yield Difference(target, f"{old[key].op}.{old[key].variant}", "speed", f"µs at {shape}", a, b)


def _timings(tree: Tree, target: str) -> dict[tuple[Any, ...], Measured]:
    """Timings by what makes them comparable: the call and the device."""
    return {
        (m.op, m.variant, m.device, tuple(sorted(m.shape.items()))): m
        for proofs in tree.evidence[target].artifacts.values()
        for m in proofs.measured
    }


def _text(found: list[Difference]) -> str:
    if not found:
        return "no difference"
    rows = [[d.target, d.kernel or "-", d.kind, d.field, _short(d.before), _short(d.after)] for d in found]
    listing = table(["target", "kernel", "what", "field", "before", "after"], rows, width())
    return f"{listing}\n\n{plural(len(found), 'difference')}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 32 else text[:31] + "…"
