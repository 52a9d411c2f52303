"""Say whether declarations, toolchain, manifests and artifacts still agree, and classify each drift: debug-
only, code, resources, contract, missing, extra, stale-inputs, toolchain; stale-samples for what was measured
of kernels that have changed since. Exit code 0 without drift, 1 with, 2 if it could not be checked."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kiln.compiler.drift import Drift, check
from kiln.tools.backends import all_backends
from kiln.tools.build import positive
from kiln.tools.console import UsageError, emit, plural, table, width
from kiln.tools.declared import add_catalog_option, catalogs
from kiln.tools.progress import shown
from kiln.tools.trees import add_selection_options, add_tree_option, default_tree


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln check`."""
    add_tree_option(parser)
    add_selection_options(parser)
    add_catalog_option(parser)
    parser.add_argument(
        "--rebuild", action="store_true", help="compile again and compare bytes, not digests alone"
    )
    parser.add_argument(
        "--sample", type=positive, metavar="N", help="with --rebuild, N kernels, always the same ones"
    )
    parser.add_argument("--jobs", type=positive, metavar="N", help="worker processes (default: one a CPU)")


def run(args: argparse.Namespace) -> int:
    """Print every drift."""
    if args.sample is not None and not args.rebuild:
        raise UsageError("--sample chooses what to rebuild; add --rebuild")
    root = args.tree or default_tree()
    with shown() as progress:
        found = check(
            catalogs(args),
            root,
            args.target,
            args.rebuild,
            args.sample,
            backends=all_backends(),
            ops=args.op,
            jobs=args.jobs,
            progress=progress,
        )
    emit(args, document(found), lambda: _text(found, str(root)))
    return 1 if found else 0


def document(found: Sequence[Drift]) -> dict[str, Any]:
    """The shape that scripts rely on."""
    return {"drift": [{"target": d.target, "kernel": d.kernel, "class": d.cls, "why": d.why} for d in found]}


def _text(found: Sequence[Drift], root: str) -> str:
    if not found:
        return f"{root}: no drift"
    listing = table(
        ["target", "kernel", "class", "why"], [[d.target, d.kernel, d.cls, d.why] for d in found], width()
    )
    classes = ", ".join(f"{n} {cls}" for cls, n in sorted(Counter(d.cls for d in found).items()))
    return f"{listing}\n\n{root}: {plural(len(found), 'drift')}: {classes}"
