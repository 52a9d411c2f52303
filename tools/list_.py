"""List ops and recipes: what is declared, and for which targets the tree holds variants of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kiln.ir.spec import Op, Tensor
from kiln.runtime.manifest import Signature
from kiln.tools.console import emit, plural, table, width
from kiln.tools.declared import add_catalog_option, catalogs, declared
from kiln.tools.trees import (
    Tree,
    add_selection_options,
    add_tree_option,
    matches,
    require_matches,
    tree_or_none,
)

Entry = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln list`."""
    add_tree_option(parser)
    add_catalog_option(parser)
    add_selection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print every op and recipe that is selected."""
    tree = tree_or_none(args.tree)
    ops = entries(declared(catalogs(args)), tree)
    require_matches(args.op, ops)
    shown = [e for name, e in ops.items() if matches(name, args.op)]
    if args.target:
        shown = [e for e in shown if any(t in e["targets"] for t in args.target)]
    emit(args, {"ops": shown}, lambda: _text(shown))
    return 0


def entries(declarations: Mapping[str, Op], tree: Tree | None) -> dict[str, Entry]:
    """One entry an op, sorted by name: from its declaration, else from the manifests."""
    found = {name: _from_op(op) for name, op in declarations.items()}
    for target, manifest in (tree.manifests if tree else {}).items():
        for name, signature in manifest.ops.items():
            entry = found.setdefault(name, _from_signature(name, signature))
            variants = [k.variant for k in manifest.kernels if k.op == name]
            variants += [p.variant for p in manifest.recipes if p.op == name]
            entry["targets"][target] = sorted(variants)
    return dict(sorted(found.items()))


def _entry(name: str, family: str, kind: str, call: str, doc: str, declared_here: bool) -> Entry:
    return {
        "name": name,
        "kind": kind,
        "family": family,
        "call": call,
        "doc": doc.strip().split("\n")[0],
        "declared": declared_here,
        "targets": {},
    }


def _from_op(op: Op) -> Entry:
    operands = [
        (o.name, o.optional if isinstance(o, Tensor) else o.default is not None)
        for o in op.operands
        if not (isinstance(o, Tensor) and o.role == "out")
    ]
    call = _call(op.name, operands, [a.name for a in op.attrs], [t.name for t in op.outputs])
    return _entry(op.name, op.family, "recipe" if op.is_recipe else "op", call, op.doc, True)


def _from_signature(name: str, sig: Signature) -> Entry:
    operands = [(t.name, t.optional) for t in sig.tensors if t.role != "out"]
    operands += [(s.name, s.default is not None) for s in sig.scalars]
    call = _call(name, operands, [a.name for a in sig.attrs], list(sig.returns))
    return _entry(name, sig.family, sig.kind, call, sig.doc, False)


def _call(name: str, operands: list[tuple[str, bool]], attrs: list[str], returns: list[str]) -> str:
    needed = [n for n, optional in operands if not optional]
    optional = [f"{n}=" for n, may in operands if may] + [f"{a}=" for a in attrs]
    return f"{name}({', '.join(needed + optional)}) -> {', '.join(returns)}"


def _text(shown: list[Entry]) -> str:
    rows = [
        [e["name"], e["kind"], sum(map(len, e["targets"].values())), len(e["targets"]), e["call"]]
        for e in shown
    ]
    kinds = [plural(sum(e["kind"] == k for e in shown), k) for k in ("op", "recipe")]
    return table(["name", "kind", "variants", "targets", "call"], rows, width()) + f"\n\n{', '.join(kinds)}"
