"""Choose among hand-scheduled candidates of an op by measurement: compiled anywhere, timed on the device by
the thin runtime, kept as samples in the tuning database, from which a build derives its dispatch.

`kiln tune OP` shows what is chosen and on what basis. `--out BUNDLE` compiles every candidate, without a GPU.
`--run BUNDLE` checks and times them on a device, and goes on where it was interrupted; it needs kiln's
runtime and tools, NumPy and cuda-bindings, no compiler. `--accept SAMPLES` merges what was measured into the
database; then build again. Exit code 1 if a candidate's numbers were wrong or it failed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kiln.tools.console import Cell, UsageError, emit, note, plural, table, width
from kiln.tools.declared import KILN
from kiln.tools.tune_plan import read_plans


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln tune`."""
    parser.add_argument("op", metavar="OP", nargs="?", help="an op that has candidates")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--out", type=Path, metavar="BUNDLE", help="compile the candidates into this folder")
    what.add_argument("--run", type=Path, metavar="BUNDLE", help="check and time a bundle's candidates here")
    what.add_argument(
        "--accept", type=Path, metavar="SAMPLES", action="append", help="merge samples into the database"
    )
    parser.add_argument("--target", action="append", metavar="T", help="only this target; may be repeated")
    parser.add_argument(
        "--shape", action="append", metavar="M=16,N=4096,K=4096",
        help="with --out, measure this call; may be repeated (default: the op's in recipes/tuning.py)",
    )  # fmt: skip
    parser.add_argument(
        "--candidate", action="append", metavar="GLOB", help="with --out, only candidates that match"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="with --out, worker processes")
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="with --run, where samples go (default: BUNDLE/samples.jsonl)",
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="with --run, stop after so long")
    parser.add_argument("--device", default="cuda", help="with --run, cuda or cuda:N (default: cuda)")
    parser.add_argument(
        "--database", type=Path, metavar="DIR", help="the database (default: the package's own)"
    )


def run(args: argparse.Namespace) -> int:
    """Do one of the four."""
    if args.run is not None:
        return _run(args)
    if args.accept:
        return _accept(args)
    if args.op is None:
        raise UsageError("name an op, such as matmul_bt, or give --run or --accept")
    return _bundle(args) if args.out is not None else _show(args)


def _bundle(args: argparse.Namespace) -> int:
    from kiln.tools.progress import shown
    from kiln.tools.tune_bundle import make_bundle

    if not args.target:
        raise UsageError("name the target to compile for, such as --target sm_90a")
    args.out.mkdir(parents=True, exist_ok=True)
    with shown() as progress:
        made = make_bundle(
            args.op, args.target, args.out, shapes(args.shape), args.candidate, args.jobs, progress
        )
    document = {
        "bundle": str(args.out),
        "root": made.root_digest,
        "targets": {
            p.target: {"candidates": sorted(p.candidates), "shapes": len(p.shapes)} for p in made.plans
        },
        "failures": [
            {"target": f.target, "kernel": f"{f.op}.{f.variant}", "why": f.why} for f in made.failures
        ],
    }
    lines = [f"{f.target} {f.op}.{f.variant} left out: {f.why}" for f in made.failures]
    for plan in made.plans:
        count = f"{plural(len(plan.candidates), 'candidate')} in {plural(len(plan.groups), 'group')}"
        lines.append(f"{plan.target}: {count}, {plural(len(plan.shapes), 'shape')}")
    emit(
        args, document, "\n".join([*lines, f"{args.out}: run kiln tune --run there; root {made.root_digest}"])
    )
    return 1 if made.failures else 0


def shapes(texts: list[str] | None) -> list[dict[str, int]] | None:
    """Calls as they were typed; None for the op's own."""
    if not texts:
        return None
    try:
        return [{k: int(v) for k, v in (part.split("=") for part in text.split(","))} for text in texts]
    except ValueError:
        raise UsageError(f"found --shape {texts}, expected sizes such as M=16,N=4096,K=4096") from None


def _run(args: argparse.Namespace) -> int:
    from kiln.tools.tune_run import measure, pick, spawn_worker

    kind, _, ordinal = args.device.partition(":")
    if kind != "cuda" or (ordinal and not ordinal.isdigit()):
        raise UsageError(f"found --device {args.device}, expected cuda or cuda:N")
    plan = pick(read_plans(args.run), args.target[0] if args.target else None)
    samples = args.samples or args.run / "samples.jsonl"
    report = measure(plan, args.run, samples, args.budget, int(ordinal or 0), spawn_worker)
    document = {
        "op": plan.op, "target": plan.target, "samples": str(samples), "measured": report.measured,
        "left": report.left, "failed": dict(report.failed),
    }  # fmt: skip
    lines = [f"{name}: {why}" for name, why in sorted(report.failed.items())]
    left = f", {report.left} left: run it again to go on" if report.left else ""
    lines.append(f"{plural(report.measured, 'sample')} in {samples}{left}")
    emit(args, document, "\n".join(lines))
    return 1 if report.failed else 0


def _accept(args: argparse.Namespace) -> int:
    from kiln.backends.cuda import tuned
    from kiln.compiler.tuning import database_bytes, merged
    from kiln.tools.tune_run import Journal

    folder: Path = args.database or tuned.folder()
    accepted: list[dict[str, Any]] = []
    for path in args.accept:
        if not path.is_file():
            raise UsageError(f"there is no samples file {path}")
        journal = Journal.open(path, resume=False)
        run_of = journal.run()
        op, target = str((journal.head or {})["op"]), str((journal.head or {})["target"])
        known = merged(tuned.database(op, target, folder), [run_of])
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f"{op}.{target}.json"
        data = database_bytes(known)
        changed = not place.is_file() or place.read_bytes() != data
        if changed:
            place.write_bytes(data)
        count = sum(len(row.times) for row in run_of.rows)
        accepted.append(
            {"op": op, "target": target, "file": str(place), "samples": count, "changed": changed}
        )
        for name, why in _stale(op, target, known):
            note(f"{op}.{name}: {why}")
    text = "\n".join(
        f"{a['file']}: {plural(a['samples'], 'sample')} of {a['op']} on {a['target']}"
        f"{'' if a['changed'] else ', nothing new'}"
        for a in accepted
    )
    emit(args, {"accepted": accepted}, f"{text}\nbuild again to ship what they choose")
    return 0


def _stale(op: str, target: str, known: Any) -> list[tuple[str, str]]:
    from kiln.backends.cuda import tuned
    from kiln.backends.cuda.backend import CudaBackend

    jobs = CudaBackend().candidate_jobs(op, (KILN,), target)
    return list(tuned.stale(known, {job.variant: job.inputs_digest for job in jobs}))


def _show(args: argparse.Namespace) -> int:
    from kiln.tools.tune_show import choices

    found = choices(args.op, args.target, args.database)
    rows: list[list[Cell]] = [
        [c["target"], c["group"], c["call"], c["candidate"], c["basis"], c["runner_up"], c["margin"]]
        for c in found
    ]
    heads = ["target", "group", "call", "candidate", "basis", "runner-up", "margin"]
    emit(args, {"op": args.op, "choices": found}, lambda: table(heads, rows, width()))
    return 0
