"""Say which variant a call takes, and why not the others: the runtime's own choice, made without arrays.

The call is described by key=value words: every dimension (M=16), the element type of a type variable or an
operand (T=bf16, x=f32, bias=none for an absent one), a row stride in elements (x.stride=8192), numbers
(eps=1e-5) and attributes (gemma=true). Providers of one's own are judged too, with --providers; several trees
are searched in order, with --tree once for each. Nothing is loaded or launched. Exit code 1 if nothing may
run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiln.compiler.backend import TUNED
from kiln.runtime.entities import Kernel
from kiln.runtime.load import Library, load
from kiln.runtime.select import Explanation
from kiln.tools.console import UsageError, cut, emit, nearest
from kiln.tools.extensions import add_providers_option, register_providers
from kiln.tools.pretend import attrs_of, describe, given, parse_call, scalar_of, view_of
from kiln.tools.trees import default_tree

LONGEST = 200
"""Columns of a candidate's line; --json has reasons whole."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln explain`."""
    parser.add_argument("op", metavar="OP")
    parser.add_argument("words", nargs="*", metavar="key=value")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--target", metavar="T", help="pretend a device of this target")
    where.add_argument("--device", metavar="D", help="a real one: cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--mode", choices=("exact", "fast"), default="exact", help="the numerics mode (default: exact)"
    )
    parser.add_argument(
        "--tier", help="only candidates of this tier: fast, fused, generated, primitive, composite, provider"
    )
    parser.add_argument("--variant", help="only this variant")
    parser.add_argument("--isa", help="only kernels of this CPU tier")
    add_providers_option(parser)
    parser.add_argument(
        "--tree",
        action="append",
        type=Path,
        metavar="DIR",
        help="an artifact tree; may be repeated (default: ./aot_artifacts, else the one of the package)",
    )


def run(args: argparse.Namespace) -> int:
    """Print every candidate of a call, in order."""
    with load(args.tree or default_tree(), args.target or args.device or "cpu") as library:
        register_providers(library, args.providers)
        if args.op not in library.ops:
            raise UsageError(nearest(args.op, library.ops, "op"))
        text, found = explain(library, args)
        basis = bases(library, args.op)
        notes = [] if found.chosen is None else why_chosen(library, args, basis, found.chosen.variant)
    listed = "\n".join(cut(line, LONGEST) for line in str(found).splitlines())
    emit(args, document(text, found, basis, notes), "\n".join([text, listed, *(f"  {n}" for n in notes)]))
    return 0 if found.chosen else 1


def explain(library: Library, args: argparse.Namespace) -> tuple[str, Explanation]:
    """The call in words, and what the runtime says of it."""
    sig = library.op(args.op).sig
    call = parse_call(args.op, sig, args.words)
    named: dict[str, Any] = dict(attrs_of(sig, call))
    named |= {s.name: scalar_of(s, call) for s in sig.scalars}
    named |= {t.name: view_of(t, call, library.device.ordinal) for t in sig.tensors if given(t, sig, call)}
    wanted = {"mode": args.mode, "tier": args.tier, "variant": args.variant, "isa": args.isa}
    return describe(args.op, sig, call), library.explain(args.op, **named, **wanted)


def bases(library: Library, op: str) -> dict[str, str]:
    """By variant: what its place in the order rests on, where candidates were chosen among."""
    kernels = (c for c in library.op(op).candidates if isinstance(c, Kernel))
    return {k.variant: str(k.specialization[TUNED]) for k in kernels if TUNED in k.specialization}


def why_chosen(
    library: Library, args: argparse.Namespace, basis: Mapping[str, str], variant: str
) -> list[str]:
    """Sentences on the choice of a tuned variant: what it rests on, and the samples where they are at
    hand."""
    if variant not in basis:
        return []
    said = {
        "measured": "it was measured fastest on the target, or close enough to be a tie",
        "stale": "it was measured fastest on the target, but its kernel has changed since",
        "model": "the cost model ranks it first; nobody measured it on this target",
        "default": "nothing was chosen for this call; it is the first default that the operands admit",
    }
    sentences = [f"{variant} ({basis[variant]}): {said[basis[variant]]}"]
    try:
        from kiln.tools.tune_show import samples
    except ModuleNotFoundError:
        return sentences  # only the runtime is installed
    dims = parse_call(args.op, library.op(args.op).sig, args.words).dims
    return sentences + samples(args.op, library.targets[0], variant.partition(".")[0], dims)


def document(text: str, found: Explanation, basis: Mapping[str, str], notes: Sequence[str]) -> dict[str, Any]:
    """What scripts get: candidates in the order they are tried; `why` is null for one that may run, `tuned`
    for one that no tuning placed."""
    listed = [
        {"variant": v.variant, "tier": v.tier, "isa": v.isa, "why": v.why, "tuned": basis.get(v.variant)}
        for v in found.verdicts
    ]
    chosen = found.chosen
    return {
        "op": found.op,
        "device": found.device,
        "call": text,
        "chosen": chosen.variant if chosen else None,
        "candidates": listed,
        "notes": [*found.notes, *notes],
    }
