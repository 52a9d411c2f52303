"""Compile kernels into an artifact tree. What the tree already holds with unchanged inputs is reused;
targets and ops that aren't selected stay as they are; a target is replaced as a whole, or not at all.

With catalogs of your own, kernels of Kiln's that your recipes call come from the tree of the package where
their inputs are the same, digest by digest; --reuse names another tree for that."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kiln.compiler.errors import FailedJobs, Failure
from kiln.compiler.pipeline import build, source_folders
from kiln.compiler.report import BuildReport, KernelReport
from kiln.compiler.stamp import inputs_key, leave_stamp, standing
from kiln.runtime.verify import INDEX
from kiln.tools.backends import all_backends
from kiln.tools.console import Cell, UsageError, emit, note, plural, size, table, width
from kiln.tools.declared import KILN, add_catalog_option, catalogs
from kiln.tools.header import header, write_if_changed
from kiln.tools.progress import shown
from kiln.tools.trees import add_selection_options, shipped

LISTED = 40
"""Kernels that the summary lists one by one; --all lists more."""
UNSIGNED = "the old signature is gone, it was of another INDEX.json: run kiln sign again"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln build`."""
    add_selection_options(parser)
    add_catalog_option(parser)
    parser.add_argument(
        "--out", default="aot_artifacts", metavar="DIR", help="the tree (default: aot_artifacts)"
    )
    parser.add_argument(
        "--c-header", type=Path, metavar="PATH", help="also write what kiln header writes for the tree"
    )
    parser.add_argument("--jobs", type=positive, metavar="N", help="worker processes (default: one a CPU)")
    parser.add_argument(
        "--reuse",
        type=Path,
        metavar="DIR",
        help="a tree whose kernels are taken where their inputs are the same (default: with a --catalog of "
        "your own, the one that comes with the package)",
    )
    parser.add_argument("--all", action="store_true", help="list every kernel, reused ones too")


def positive(text: str) -> int:
    """A count of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1 up")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Build, and print what came of it."""
    try:
        report = built(args)
    except FailedJobs as failed:
        if args.json or failed.report is not None:
            emit(args, failures(failed), summary(failed.report, args.all) if failed.report else "")
        note(f"kiln build: {failed}")
        return 2
    if args.c_header is not None:
        write_if_changed(args.c_header, header(report.out)[0])
    emit(args, document(report), lambda: summary(report, args.all))
    return 0


def reusable(args: argparse.Namespace) -> Path | None:
    """The tree that kernels may come from instead of the compiler.

    Raises:
        UsageError: --reuse names no tree.
    """
    if args.reuse is None:
        return shipped() if set(catalogs(args)) != {KILN} else None
    if not (args.reuse / INDEX).is_file():
        raise UsageError(f"no artifact tree in {args.reuse} (no {INDEX} there) to reuse kernels of")
    path: Path = args.reuse
    return path


def built(args: argparse.Namespace) -> BuildReport:
    """What a build did, or would do: one of Kiln's own catalog and all of its ops leaves a stamp, by which
    the next one knows that there is nothing to do.

    Raises as `kiln.compiler.pipeline.build`.
    """
    names, reuse = catalogs(args), reusable(args)
    key = inputs_key(source_folders(names), args.target) if (names, args.op) == ((KILN,), None) else None
    report = None if key is None else standing(args.out, key)
    if report is not None:
        return report
    with shown() as progress:
        report = build(
            names,
            args.target,
            args.out,
            backends=all_backends(),
            ops=args.op,
            jobs=args.jobs,
            progress=progress,
            reuse=reuse,
        )
    if key is not None:
        leave_stamp(key, report)
    return report


def failures(failed: FailedJobs) -> dict[str, Any]:
    """What scripts get of a build in which kernels failed."""
    listed = [{"target": f.target, "kernel": f"{f.op}.{f.variant}", "why": f.why} for f in failed.failures]
    done = {} if failed.report is None else document(failed.report)
    return {**done, "error": {"class": "FailedJobs", "message": str(failed)}, "failures": listed}


def document(report: BuildReport) -> dict[str, Any]:
    """What scripts get of a build."""
    return {
        "out": str(report.out),
        "root": report.root_digest,
        "generation": report.generation,
        "changed": list(report.changed),
        "unserved": list(report.unserved),
        "signature_removed": report.signature_removed,
        "kernels": [_kernel(k) for k in report.kernels],
    }


def _kernel(k: KernelReport) -> dict[str, Any]:
    wanted = ("file", "bytes", "sha256", "resources")
    return {
        "target": k.target,
        "op": k.op,
        "variant": k.variant,
        "state": k.state,
        "seconds": round(k.seconds, 3),
        **{key: k.entry[key] for key in wanted},
    }


def summary(report: BuildReport, everything: bool) -> str:
    """Tables for a person: kernels, targets, and where the tree is."""
    kernels = [k for k in report.kernels if everything or k.state != "reused"]
    parts = []
    if kernels and (everything or len(kernels) <= LISTED):
        parts.append(kernel_table(kernels))
    if report.kernels or report.failures:
        parts.append(target_table(report.kernels, report.failures))
    parts += ["\n".join(report.unserved)] if report.unserved else []
    return "\n\n".join([*parts, _outcome(report)])


def _outcome(report: BuildReport) -> str:
    """Where the tree is, and which; the last lines of a summary."""
    if not report.root_digest:
        return f"{report.out} is as it was: no target could be built"
    unwritten = {f.target for f in report.failures}
    held = sum(k.target not in unwritten for k in report.kernels)
    changed = f"changed: {', '.join(report.changed)}" if report.changed else "nothing changed"
    unsigned = f"\n{UNSIGNED}" if report.signature_removed else ""
    return (
        f"{plural(held, 'kernel')} in {report.out}, generation {report.generation}, {changed}\n"
        f"root {report.root_digest}{unsigned}"
    )


def kernel_table(kernels: Sequence[KernelReport]) -> str:
    """One line a kernel."""
    rows = [[k.target, f"{k.op}.{k.variant}", k.state, *_figures(k), k.seconds] for k in kernels]
    return table(["target", "kernel", "state", "size", "regs", "spills", "seconds"], rows, width())


def _figures(k: KernelReport) -> list[Cell]:
    resources = k.entry["resources"]
    return [size(k.entry["bytes"]), resources.get("registers"), _spills(k)]


def _spills(k: KernelReport) -> int | None:
    resources = k.entry["resources"]
    if "spill_stores" not in resources:
        return None
    return int(resources["spill_stores"]) + int(resources["spill_loads"])


def target_table(kernels: Sequence[KernelReport], failures: Sequence[Failure] = ()) -> str:
    """One line a target: counts, bytes of its artifacts, the most registers and spills of a kernel, work
    done; with failures also how many kernels failed."""
    failed = {t: len({(f.op, f.variant) for f in failures if f.target == t}) for t in _targets(failures)}
    targets = sorted({*_targets(kernels), *failed})
    rows = [
        _target_row(t, [k for k in kernels if k.target == t], failed.get(t, 0) if failed else None)
        for t in targets
    ]
    counts = ["kernels", "built", "reused", *(["failed"] if failed else [])]
    headers = ["target", *counts, "size", "most regs", "most spills", "seconds"]
    return table(headers, rows, width())


def _targets(of: Sequence[KernelReport | Failure]) -> set[str]:
    return {entry.target for entry in of}


def _target_row(target: str, own: Sequence[KernelReport], failed: int | None) -> list[Cell]:
    files = {k.entry["file"]: int(k.entry["bytes"]) for k in own}
    states = [sum(k.state == state for k in own) for state in ("built", "reused")]
    registers = _most(k.entry["resources"].get("registers") for k in own)
    seconds = sum(k.seconds for k in own)
    return [
        target,
        len(own),
        *states,
        *([] if failed is None else [failed]),
        size(sum(files.values())),
        registers,
        _most(map(_spills, own)),
        seconds,
    ]


def _most(values: Iterable[int | None]) -> int | None:
    return max((v for v in values if v is not None), default=None)
