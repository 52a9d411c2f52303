"""`kiln show OP`: what an op means and takes, then what the tree has of it: which calls it serves where, and
what was proved of the kernels that do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kiln.ir.spec import Op
from kiln.runtime.arguments import nearest
from kiln.runtime.entities import Kernel, Plan, Signature
from kiln.runtime.manifest import dump, parse_signature
from kiln.runtime.sheet import call_line, served, sheet
from kiln.tools.console import Cell, UsageError, plural, table, width
from kiln.tools.evidence import Proofs, Ran
from kiln.tools.states import artifact_state, op_states
from kiln.tools.trees import Tree


@dataclass(frozen=True)
class Place:
    """What a target of the tree has of an op."""

    kernels: int
    plans: int
    state: str
    """As in `kiln matrix`."""
    ran: tuple[str, ...]
    """Devices on which its very bytes met the contract."""
    cases: int
    """Calls that those kernels ran in."""
    timings: int


def show(
    name: str, ops: Mapping[str, Op], tree: Tree | None, options: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """The document and the text of one op.

    Args:
        ops: declarations, where they are at hand.
        tree: None where nothing is built.
        options: of the command line, for the commands that the text ends with.

    Raises:
        UsageError: neither has the op.
    """
    manifests = {t: m for t, m in (tree.manifests if tree else {}).items() if name in m.ops}
    if name not in ops and not manifests:
        raise UsageError(f"no op {name!r}; {_nearest(name, ops, tree)}")
    sig = next((m.ops[name] for m in manifests.values()), None) or _declared(name, ops[name])
    places = {t: _place(name, t, tree) for t in manifests} if tree else {}
    calls = _calls({t: _candidates(name, m.kernels, m.recipes) for t, m in manifests.items()})
    declared = _location(ops[name]) if name in ops else None
    document = {
        "op": name, "call": call_line(name, sig), **dump(sig), "declared": declared,
        "served": [{"call": call, "targets": targets} for call, targets in calls.items()],
        "targets": {t: asdict(p) for t, p in places.items()},
    }  # fmt: skip
    return document, "\n".join(
        [
            sheet(name, sig),
            "",
            *_text(name, sig, places, calls, declared),
            *_commands(name, sig, places, options),
        ]
    )


def _nearest(name: str, ops: Mapping[str, Op], tree: Tree | None) -> str:
    about = {n: f"{o.doc} {o.family}" for n, o in ops.items()}
    for manifest in tree.manifests.values() if tree else ():
        about |= {n: f"{sig.doc} {sig.family}" for n, sig in manifest.ops.items()}
    return nearest(name, about, about)


def _declared(name: str, op: Op) -> Signature:
    from kiln.compiler.signatures import signature_json

    return parse_signature(signature_json(op), f"op {name}")


def _location(op: Op) -> str:
    """file:line of what it computes."""
    source = op.body or op.reference or op.steps
    code = getattr(source, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _candidates(name: str, kernels: Iterable[Kernel], plans: Iterable[Plan]) -> list[Kernel | Plan]:
    everything: list[Kernel | Plan] = [*kernels, *plans]
    return [c for c in everything if c.op == name]


def _place(name: str, target: str, tree: Tree) -> Place:
    manifest, evidence = tree.manifests[target], tree.evidence[target]
    kernels = [k for k in manifest.kernels if k.op == name]
    proofs: list[Proofs] = [evidence.of(digest) for digest in sorted({k.sha256 for k in kernels})]
    ran: list[Ran] = [p.ran for p in proofs if p.ran is not None and p.ran.contract_met]
    state = op_states(manifest, evidence).get(name)
    timings = sum(m.op == name for p in proofs for m in p.measured)
    plans = sum(p.op == name for p in manifest.recipes)
    lowest = state if state is not None else min(map(artifact_state, proofs), default=None)
    return Place(
        len(kernels), plans, "-" if lowest is None else lowest.name, tuple(sorted({r.device for r in ran})),
        sum(r.cases for r in ran), timings,
    )  # fmt: skip


def _calls(candidates: Mapping[str, list[Kernel | Plan]]) -> dict[str, list[str]]:
    """Types, attributes and absent operands that calls may have -> targets that serve them."""
    found: dict[str, list[str]] = {}
    for target, of_target in candidates.items():
        for call in served(of_target):
            found.setdefault(call, []).append(target)
    return found


def _text(
    name: str,
    sig: Signature,
    places: Mapping[str, Place],
    calls: Mapping[str, list[str]],
    declared: str | None,
) -> list[str]:
    lines = [f"{sig.kind} of {sig.family}{f', declared at {declared}' if declared else ''}"]
    if not places:
        return [*lines, "no tree has it yet; kiln build makes one"]
    alike: dict[Place, list[str]] = {}
    for target, place in places.items():
        alike.setdefault(place, []).append(target)
    rows: list[list[Cell]] = [
        [_places(ts, ()), p.kernels, p.plans, p.state, _proved(p)] for p, ts in alike.items()
    ]
    lines += ["", table(["targets", "kernels", "plans", "state", "proved on a device"], rows, width())]
    listed = [[call or "any", _places(targets, tuple(places))] for call, targets in calls.items()]
    lines += ["", table(["calls that are served", "targets"], listed, width())]
    return lines


def _commands(name: str, sig: Signature, places: Mapping[str, Place], options: Sequence[str]) -> list[str]:
    """What to ask next."""
    if not places:
        return []
    target, more = list(places)[-1], "".join(f" {o}" for o in options)
    tree = "".join(f" {o}" for o in options if not o.startswith("--catalog"))
    sizes = " ".join(f"{d}=…" for d in sorted(sig.names["dim"]))
    rows = [
        [f"kiln explain {name} --target {target}{tree} {sizes} …", "which kernel a call takes, and why"],
        [
            f"kiln show {name} --target {target}{more} --source",
            "or --ir, --ptx, --sass, --resources, --launch",
        ],
        [f"kiln test --op {name}{more}", "every kernel on this machine against the declaration"],
    ]
    size = max(len(row[0]) for row in rows)
    return ["", *(f"{command.ljust(size)}  {what}" for command, what in rows)]


def _proved(p: Place) -> str:
    if not p.ran:
        return "-"
    timed = f", timed {plural(p.timings, 'time')}" if p.timings else ""
    return f"{plural(p.cases, 'case')} on {', '.join(p.ran)}{timed}"


def _places(targets: list[str], everywhere: tuple[str, ...]) -> str:
    return "all" if len(targets) == len(everywhere) > 1 else " ".join(targets)
