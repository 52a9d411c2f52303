"""Whether the parts of a manifest agree with each other: every name declared, nothing twice, every access in
role."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from kiln.runtime.entities import Kernel, Like, Manifest, Plan, Signature
from kiln.runtime.expr import Expr, Pred
from kiln.runtime.expr import names as names_in
from kiln.runtime.targets import CPU_TIERS

RESERVED_NAMES = frozenset({"out", "stream", "mode", "tier", "variant", "isa"})
"""Keywords of a call; an operand may not take one, except an output named `out`."""


def faults(m: Manifest) -> Iterator[str]:
    """Every way in which the parts of a manifest contradict each other."""
    yield from _identity_faults(m)
    yield from _cycle_faults(m)
    for name, sig in m.ops.items():
        yield from (f"op {name}: {f}" for f in _signature_faults(sig))
    for k in m.kernels:
        where = f"kernel {k.op}.{k.variant}"
        if k.op not in m.ops:
            yield f"{where}: its op is not declared; expected one of the manifest's ops."
            continue
        yield from (f"{where}: {f}" for f in _kernel_faults(k, m.ops[k.op], m.target))
    for p in m.recipes:
        where = f"plan {p.op}.{p.variant}"
        if p.op not in m.ops:
            yield f"{where}: its op is not declared; expected one of the manifest's ops."
            continue
        yield from (f"{where}: {f}" for f in _plan_faults(p, m.ops))


def _identity_faults(m: Manifest) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    owners: dict[str, tuple[int, str]] = {}
    entries: tuple[Kernel | Plan, ...] = (*m.kernels, *m.recipes)
    for k in entries:
        if (k.op, k.variant) in seen:
            yield f"{k.op}.{k.variant} is declared twice; expected each variant once."
        seen.add((k.op, k.variant))
    if list(m.kernels) != sorted(m.kernels, key=lambda k: (k.op, k.variant)):
        yield "the kernels are not sorted by op and variant; rebuild the tree."
    for k in m.kernels:
        if owners.setdefault(k.file, (k.bytes, k.sha256)) != (k.bytes, k.sha256):
            yield f"{k.file} has two sizes or digests; expected one."
    for name in m.sources:
        if name in owners:
            yield f"{name} is both an artifact and a source; expected one of them."


def _signature_faults(sig: Signature) -> Iterator[str]:
    seen: set[str] = set()
    for name in [o.name for o in sig.operands] + [a.name for a in sig.attrs]:
        if name in seen or (name in RESERVED_NAMES and not (name == "out" and _is_output(sig, name))):
            yield f"{name} is declared twice or reserved for the call itself; rename it."
        seen.add(name)
    written = [t.name for t in sig.tensors if t.role != "in"]
    if sorted(sig.returns) != sorted(written):
        yield f"returns {', '.join(sig.returns)}, expected each written operand once: {', '.join(written)}."
    for a in sig.attrs:
        if not any(type(c) is type(a.default) and c == a.default for c in a.choices):
            yield f"attribute {a.name}: its default {a.default!r} is not one of its choices."
    for pred, _ in sig.constraints:
        yield from _name_faults(pred, sig, "a constraint")
    for t in sig.tensors:
        for e in t.shape:
            yield from _name_faults(e, sig, f"the shape of {t.name}")


def _is_output(sig: Signature, name: str) -> bool:
    return any(t.name == name and t.role == "out" for t in sig.tensors)


def _name_faults(tree: Expr | Pred, sig: Signature, where: str) -> Iterator[str]:
    if type(tree) is not tuple:
        return
    for head, name in _names(tree):
        kind = head if head in sig.names else "operand"
        if name not in sig.names[kind]:
            yield f"{where} names {name!r}, which is no {kind} of the op."


@lru_cache(maxsize=4096)
def _names(tree: Expr | Pred) -> tuple[tuple[str, str], ...]:
    """The names in an expression; most kernels of a tree share theirs with others."""
    return tuple(dict.fromkeys(names_in(tree)))


_SOUND: dict[tuple[object, ...], tuple[object, ...]] = {}
"""Parts of kernels that agree, by their identity: kernels share theirs (`fields.once`), 3389 of a whole tree
have 1537. The parts are held, so that no other object takes their place."""
_MOST_SOUND = 4096


def _kernel_faults(k: Kernel, sig: Signature, target: str) -> Iterator[str]:
    """As `_part_faults`, of parts that are not known to agree."""
    parts = (k.when, k.grid, k.scratch, k.params, k.isa, sig)
    key = (*map(id, parts), target if target.startswith("cpu-") else "")
    if key in _SOUND:
        return
    found = list(_part_faults(k, sig, target))
    if not found:
        if len(_SOUND) >= _MOST_SOUND:
            _SOUND.clear()
        _SOUND[key] = parts
    yield from found


def _part_faults(k: Kernel, sig: Signature, target: str) -> Iterator[str]:
    trees: Iterable[tuple[Any, str]] = (
        (k.when, "when"),
        *((e, "grid") for e in k.grid),
        *((x.bytes, f"scratch {x.name}") for x in k.scratch),
        *((p.value, f"param {p.name}") for p in k.params if p.value is not None),
    )
    for tree, where in trees:
        yield from _name_faults(tree, sig, where)
    roles = {t.name: t.role for t in sig.tensors}
    scratch = {f"scratch:{x.name}" for x in k.scratch}
    for p in k.params:
        if p.kind != "ptr" or p.operand in scratch:
            continue
        role = roles.get(p.operand or "")
        if role is None:
            yield f"param {p.name} points to {p.operand!r}, which is no tensor or scratch of the op."
        elif (role == "out" and p.access == "read") or (role == "in" and p.access == "write"):
            yield (
                f"param {p.name} is a {p.access} of the {role} operand {p.operand}; expected the "
                "access to fit the role."
            )
    is_cpu = target.startswith("cpu-")
    if is_cpu != (k.isa is not None):
        yield (
            f"isa is {'missing' if is_cpu else 'given'} for target {target}; expected it on CPU "
            "targets alone."
        )
    if k.isa is not None and k.isa.tier not in CPU_TIERS.get(target, ()):
        yield f"isa tier {k.isa.tier!r}, expected one of {', '.join(CPU_TIERS.get(target, ()))}."


def _plan_faults(p: Plan, ops: Mapping[str, Signature]) -> Iterator[str]:
    sig = ops[p.op]
    temps = {f"temp:{t.name}" for t in p.temps}
    legal = {t.name for t in sig.tensors} | temps
    read_only = {t.name for t in sig.tensors if t.role == "in"}
    yield from _name_faults(p.when, sig, "when")
    for t in p.temps:
        if isinstance(t.dtype, Like) and t.dtype.like not in legal:
            yield f"temp {t.name} is like {t.dtype.like!r}, which is no operand of the op."
        for e in t.shape:
            yield from _name_faults(e, sig, f"temp {t.name}")
    for i, step in enumerate(p.steps):
        if step.op not in ops or step.op == p.op:
            yield f"step {i} calls {step.op!r}; expected another op of this manifest."
            continue
        callee = ops[step.op]
        expected = {t.name for t in callee.tensors}
        if step.bind.keys() != expected:
            yield (
                f"step {i} binds {', '.join(sorted(step.bind))}; expected the tensors of {step.op}: "
                f"{', '.join(sorted(expected))}."
            )
        for name in step.bind.values():
            if name is not None and name not in legal:
                yield f"step {i} binds {name!r}, which is no operand or temp of the plan."
        for name in (step.args.keys() - {o.name for o in callee.scalars}) | (
            step.attrs.keys() - {a.name for a in callee.attrs}
        ):
            yield f"step {i} gives {name!r}, which {step.op} does not take."
        for operand in callee.tensors:
            target = step.bind.get(operand.name)
            if operand.role != "in" and target in read_only:
                yield f"step {i} writes {target}, which is an input of the plan."
            if target is None and (operand.role == "out" or not operand.optional):
                yield f"step {i} binds {operand.name} to nothing, but {step.op} needs it."
        for e in step.args.values():
            yield from _name_faults(e, sig, f"step {i}")


def _cycle_faults(m: Manifest) -> Iterator[str]:
    calls: dict[str, set[str]] = {}
    for p in m.recipes:
        calls.setdefault(p.op, set()).update(step.op for step in p.steps)
    done: set[str] = set()
    while calls.keys() - done:
        ready = {op for op in calls.keys() - done if all(c in done or c not in calls for c in calls[op])}
        if not ready:
            yield f"the plans of {', '.join(sorted(calls.keys() - done))} call each other in a circle."
            return
        done |= ready
