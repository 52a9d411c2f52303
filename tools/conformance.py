"""Run every kernel and plan of a tree on the device at hand against the declarations.

The tree is verified first. Then, for every variant, calls are derived from its predicate that select exactly
it: ragged sizes, strided and aliased operands, NaN, infinities, zeros, denormals and ties. Outputs are
poisoned, memory around operands is watched, each call runs twice. `exact` ops must give the oracle's bits,
others must stay in their envelope. Nothing is passed by not running: a variant without a case has failed.
With --interpret no device is used: generated Triton sources, and kernels that your catalogs bring, run in
Triton's interpreter.

Exit code 1 if any variant fails."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kiln.runtime.files import Folder
from kiln.runtime.load import Library, load
from kiln.runtime.manifest import parse_index
from kiln.runtime.select import FURTHER
from kiln.runtime.verify import INDEX, MAX_INDEX_BYTES, verify_target
from kiln.tools.campaign import Campaign, Result, targets_of
from kiln.tools.console import Cell, UsageError, emit, note, plural, table, width
from kiln.tools.declared import add_catalog_option, catalogs, declared
from kiln.tools.evidence import Proofs, Ran
from kiln.tools.machine import describe
from kiln.tools.memory import rig_for
from kiln.tools.trees import (
    add_selection_options,
    add_tree_option,
    default_tree,
    matches,
    record_proofs,
    require_matches,
)

SHOWN = 20
"""Faults that the summary prints; --json has all."""
EVERY = 5.0
"""Seconds between two lines of progress."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln test`."""
    add_tree_option(parser)
    add_selection_options(parser)
    add_catalog_option(parser)
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--evidence", action="store_true", help="record in the tree what was seen, by artifact digest"
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="run Triton sources in Triton's interpreter instead",
    )
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="on CUDA: capture every kernel in a graph as its first use, compare replays with eager calls; "
        "scratch, streams and contexts too",
    )
    parser.add_argument(
        "--soak",
        type=int,
        default=0,
        metavar="N",
        help="on CUDA: N mixed launches, equal bits, no memory lost",
    )


def run(args: argparse.Namespace) -> int:
    """Test, print a summary, and record evidence if asked to."""
    if args.interpret:
        from kiln.tools.interpreted import run as interpret

        return interpret(args)
    root: Path = args.tree or default_tree()
    if args.graphs or args.soak:
        from kiln.tools.graphs import run as look

        if not args.device.startswith("cuda"):
            raise UsageError("--graphs and --soak are for CUDA devices; give --device cuda")
        return look(args, root)
    began = time.perf_counter()
    ops = declared(catalogs(args))
    with load(root, args.device) as library:
        targets = targets_of(library, args.target)
        require_matches(args.op, library.ops)
        faults = damage(root, targets)
        if faults:
            emit(
                args,
                {"ok": False, "damage": faults},
                "\n".join([*faults, "the tree is damaged: nothing was run"]),
            )
            return 1
        results = test(library, targets, ops, args.op)
        label = describe(library.device)
    if args.evidence:
        for target in targets:
            record_proofs(root, target, proofs([r for r in results if r.target == target], *label))
    seconds = time.perf_counter() - began
    emit(args, document(results, label, seconds), lambda: summary(results, label, seconds))
    return 0 if all(r.passed or r.skipped for r in results) and any(r.passed for r in results) else 1


def damage(root: Path, targets: Sequence[str]) -> list[str]:
    """What is wrong with the chosen targets' files."""
    with Folder.open_root(root) as folder:
        index = parse_index(folder.read(INDEX, MAX_INDEX_BYTES), str(root / INDEX))
        return [f"{f.file}: {f.why}" for t in targets for f in verify_target(folder, t, index)]


def test(library: Library, targets: Sequence[str], ops: Any, globs: Sequence[str] | None) -> list[Result]:
    """The results of every selected kernel and plan."""
    rig = rig_for(library.device)
    note(f"operands are {rig.kind} on {library.device.label}")
    last = time.monotonic()
    done = 0

    def tell(result: Result) -> None:
        nonlocal last, done
        done += 1
        for fault in result.faults[:1]:
            note(f"FAILED {result.target} {result.op}.{result.variant}: {fault}")
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            note(f"[{done}] {result.target} {result.op}.{result.variant}")

    found: list[Result] = []
    for target in targets:
        found += Campaign(library, target, ops, rig, lambda op: matches(op, globs), tell).run()
    return found


def proofs(results: Sequence[Result], device: str, driver: str) -> dict[str, Proofs]:
    """What was seen of each artifact; nothing of a file of which any kernel was not run."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    by_digest: dict[str, list[Result]] = {}
    for r in results:
        if r.digest is not None and r.skipped != FURTHER:
            by_digest.setdefault(r.digest, []).append(r)
    return {
        digest: Proofs(ran=_ran(of_file, device, driver, date))
        for digest, of_file in by_digest.items()
        if all(r.cases for r in of_file)
    }


def _ran(of_file: Sequence[Result], device: str, driver: str, date: str) -> Ran:
    worst = max(r.error for r in of_file)
    worst = worst if worst < float("inf") else 1e300
    return Ran(device, driver, date, sum(r.cases for r in of_file), worst, all(r.passed for r in of_file))


def document(results: Sequence[Result], label: tuple[str, str], seconds: float) -> dict[str, Any]:
    """What scripts get."""
    listed = [
        {
            "target": r.target,
            "op": r.op,
            "variant": r.variant,
            "digest": r.digest,
            "contract": r.contract.kind,
            "cases": r.cases,
            "max_error": r.error if r.error < float("inf") else None,
            "passed": r.passed,
            "skipped": r.skipped,
            "faults": r.faults,
        }
        for r in results
    ]
    ok = all(r.passed or r.skipped for r in results) and any(r.passed for r in results)
    return {"ok": ok, "device": label[0], "driver": label[1], "seconds": round(seconds, 3), "results": listed}


def summary(results: Sequence[Result], label: tuple[str, str], seconds: float) -> str:
    """A table of ops, then faults, then one sentence."""
    rows: list[list[Cell]] = []
    for target, op in dict.fromkeys((r.target, r.op) for r in results):
        of_op = [r for r in results if (r.target, r.op) == (target, op)]
        failed = sum(not (r.passed or r.skipped) for r in of_op)
        ran = [r for r in of_op if not r.skipped]
        worst = max((r.error for r in ran), default=0.0)
        kinds = "/".join(sorted({r.contract.kind for r in ran}))
        rows.append(
            [target, op, len(ran), len(of_op) - len(ran), sum(r.cases for r in ran), kinds, worst, failed]
        )
    heads = ["target", "op", "variants", "skipped", "cases", "contract", "worst", "failed"]
    faults = [f"{r.op}.{r.variant}: {fault}" for r in results for fault in r.faults]
    lines = [table(heads, rows, width()), ""]
    lines += [*faults[:SHOWN], f"… and {len(faults) - SHOWN} more faults"] if len(faults) > SHOWN else faults
    reasons = sorted({r.skipped for r in results if r.skipped})
    lines += [f"skipped: {reason}" for reason in reasons]
    failed = sum(not (r.passed or r.skipped) for r in results)
    verdict = f"{plural(failed, 'variant')} failed" if failed else "all passed"
    total = plural(sum(r.cases for r in results), "case")
    lines.append(f"{verdict}: {total} of {plural(len(results), 'variant')} on {label[0]} ({seconds:.1f} s)")
    return "\n".join(lines)
