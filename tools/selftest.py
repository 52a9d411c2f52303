"""Run every kernel and plan of a tree that this device may run, on small seeded calls, in seconds.

No compiler and no declarations are needed, so there is no oracle: `kiln test` has one. Each candidate must
write all of its outputs and nothing else, twice the same; and the ways to run an op (ISA tiers, fused
kernels, plans) must agree, to the bit where its contract is exact. A CUDA device is compared with this CPU's
kernels as well, where the tree has them. Exit code 1 if anything is wrong, or nothing ran."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from kiln.runtime.arrays import CPU
from kiln.runtime.errors import KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.selftest import SelftestReport
from kiln.tools.console import emit, note
from kiln.tools.trees import add_tree_option, default_tree, matches, require_matches


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln selftest`."""
    add_tree_option(parser)
    parser.add_argument("--op", action="append", metavar="GLOB", help="only ops that match; may be repeated")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default: cpu)")


def run(args: argparse.Namespace) -> int:
    """Test, and print what was found."""
    root = args.tree or default_tree()
    with ExitStack() as stack:
        library = stack.enter_context(load(root, args.device))
        require_matches(args.op, library.ops)
        against = None if library.device.ordinal == CPU else _host(root, stack)
        report = library.selftest([n for n in library.ops if matches(n, args.op)], against=against)
    emit(args, document(report), str(report))
    return 0 if report.ok else 1


def _host(root: Any, stack: ExitStack) -> Library | None:
    try:
        return stack.enter_context(load(root, "cpu"))
    except KilnError as error:
        note(f"not compared with this CPU: {error}")
        return None


def document(report: SelftestReport) -> dict[str, Any]:
    """What scripts get."""
    return {
        "ok": report.ok,
        "device": report.device,
        "seconds": round(report.seconds, 3),
        "alone": list(report.alone),
        "results": [asdict(r) for r in report.results],
    }
