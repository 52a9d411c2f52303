"""The stages of a kernel that are made from declarations: IR, source, PTX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kiln.compiler.backend import Job
from kiln.compiler.catalog import Loaded
from kiln.compiler.epilogue import Epilogue, epilogue_of
from kiln.compiler.target import Target
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Op, Ship
from kiln.tools.console import UsageError, nearest


@dataclass(frozen=True)
class Shown:
    """One stage, or several, of one kernel."""

    op: str
    variant: str
    parts: Mapping[str, str]
    """Title -> text."""
    comment: str = "//"
    """What starts a comment line between parts."""

    @property
    def text(self) -> str:
        """All parts; titles where there are several."""
        if len(self.parts) == 1:
            return next(iter(self.parts.values()))
        return "\n".join(
            f"{self.comment} ---- {title} ----\n{text.rstrip()}\n" for title, text in self.parts.items()
        )

    def document(self, stage: str, target: str) -> dict[str, Any]:
        """What scripts get."""
        return {
            "op": self.op,
            "variant": self.variant,
            "target": target,
            "stage": stage,
            "parts": dict(self.parts),
        }


def _ship(entry: Mapping[str, Any]) -> Ship:
    types = {k: DTYPES[v] for k, v in entry["types"].items()}
    return Ship(types, dict(entry["attrs"]), absent=tuple(entry["absent"]))


def ir_stages(op: Op, ops: Mapping[str, Op], job: Job, target: Target) -> Shown:
    """The IR of a CUDA kernel after every pass; of its epilogue where that is all of it that is generated.

    Raises:
        UsageError: it is written by hand.
    """
    if _has_epilogue(job):
        made = epilogue_of(op, _ship(job.payload))
        if isinstance(made, Epilogue):
            return Shown(op.name, job.variant, _lowered(made.op, ops, _ship(job.payload), target, fast=False))
    if "schedule" not in job.payload:
        raise UsageError(f"{op.name}.{job.variant} is written by hand, it has no IR; give --source")
    fast = job.payload["schedule"]["mode"] == "fast"
    return Shown(op.name, job.variant, _lowered(op, ops, _ship(job.payload), target, fast))


def _has_epilogue(job: Job) -> bool:
    """Whether a kernel is a primitive op's, with what a recipe does after it."""
    return "schedule" not in job.payload and "types" in job.payload


def _lowered(op: Op, ops: Mapping[str, Op], ship: Ship, target: Target, fast: bool) -> Mapping[str, str]:
    from kiln.compiler.lower import Request, lower

    return lower(Request(op, ship.dtypes, ship.attrs, ship.absent, target.features, fast), ops).stages


def cuda_source(op: Op, loaded: Loaded, job: Job, target: Target) -> Shown:
    """The Triton source of a kernel: generated, or its file."""
    if "schedule" in job.payload:
        from kiln.backends.cuda.compile import generated

        text = generated(op, loaded.ops, job.payload, target)[1].text
        return Shown(op.name, job.variant, {"triton": text}, "#")
    from kiln.backends.cuda.backend import hosted_pairs, primitives
    from kiln.backends.cuda.kernel_source import read_kernel

    if _has_epilogue(job):
        from kiln.backends.cuda.epilogue import epilogue_source

        pairs = hosted_pairs(op, loaded, target.capability)
        pair = next(p for p in pairs if p.variant == job.variant)
        own = epilogue_source(pair, loaded.ops, target.features).source
        kernel = read_kernel(pair.row.kernel).path.read_text("utf-8")
        return Shown(op.name, job.variant, {"epilogue": own, "kernel": kernel}, "#")
    row = next(p for p in primitives(loaded) if (p.op, p.variant) == (op.name, job.variant))
    return Shown(op.name, job.variant, {"triton": read_kernel(row.kernel).path.read_text("utf-8")}, "#")


def ptx(op: Op, loaded: Loaded, job: Job, target: Target) -> Shown:
    """The PTX that Triton makes of a kernel here."""
    from kiln.backends.cuda.compile import assemble, generated, handwritten, with_epilogue

    if "schedule" in job.payload:
        source = generated(op, loaded.ops, job.payload, target)[1]
    elif _has_epilogue(job):
        source = with_epilogue(op, loaded.ops, job.payload, loaded.names, target)
    else:
        source = handwritten(op, job.payload, loaded.names, target.capability)
    return Shown(op.name, job.variant, {"ptx": str(assemble(source, target).asm["ptx"])})


def cpu_source(op: Op, loaded: Loaded, job: Job, target: Target, variant: str, stage: str) -> Shown:
    """The C file of an op, or the entry or IR of one of its specializations.

    Raises:
        UsageError: no such variant, or one that is written by hand and has no IR.
    """
    from kiln.backends.cpu.compile import files_of, ships_of, source_text, variants
    from kiln.compiler.plan import variant_name

    entries = variants(op, loaded, job.payload, target)
    wanted = variant.removeprefix(f"{job.variant}.")
    for tier in (*target.tiers, *target.extra_tiers):
        wanted = wanted.removesuffix(f".{tier.name}")
    by_name = {v.name: v for v in entries}
    if wanted and wanted not in by_name:
        raise UsageError(nearest(variant, [f"{job.variant}.{n}" for n in by_name], f"variant of {op.name}"))
    if stage == "source":
        if wanted:
            return Shown(op.name, variant, {"c": by_name[wanted].text})
        files = files_of(op, entries).items()
        texts = {"c" if stem == op.name else f"{stem}.c": source_text(op, own) for stem, own in files}
        return Shown(op.name, job.variant, texts)
    ships = {variant_name(s): s for s in ships_of(job.payload)}
    name = wanted or next(iter(ships), "")
    if name not in ships:
        raise UsageError(
            f"{op.name}.{variant or job.variant} is written by hand, it has no IR; give --source"
        )
    return Shown(op.name, f"{job.variant}.{name}", _lowered(op, loaded.ops, ships[name], target, fast=False))
