"""A manifest as the Python reader understands it, in the words of dump.c."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kiln.runtime.dtypes import DTYPES
from kiln.runtime.expr import names
from kiln.runtime.manifest import (
    Attr,
    Contract,
    DTypeVar,
    Index,
    Kernel,
    Like,
    Manifest,
    Operand,
    Param,
    Plan,
    Signature,
    Step,
    Tensor,
)
from kiln.runtime.tensor_map import FILLS, INTERLEAVES, PROMOTIONS, SWIZZLES


def expr_text(tree: Any) -> str:
    """An expression or predicate."""
    if tree is True:
        return " true"
    if type(tree) is not tuple:
        return f" {tree}" if type(tree) is int else f" {tree:.17g}"
    head, *rest = tree
    if head == "attr" and len(rest) == 2:
        return f" (attr {rest[0]} {attr_text(rest[1])})"
    parts = "".join(f" {r}" if type(r) is str else expr_text(r) for r in rest)
    return f" ({head}{parts})"


def attr_text(value: bool | int | str) -> str:
    """A constant."""
    return str(value).lower() if type(value) is bool else f"'{value}'" if type(value) is str else str(value)


def _shape(shape: tuple[Any, ...]) -> str:
    return " shape" + "".join(map(expr_text, shape))


def _contract(c: Contract) -> str:
    return f"  contract {c.kind} {c.rel_l2:.17g} {c.max_eps:.17g}"


def _operand(o: Operand) -> str:
    if isinstance(o, Tensor):
        var = isinstance(o.dtype, DTypeVar)
        choices = " ".join(o.dtype.choices if isinstance(o.dtype, DTypeVar) else (o.dtype,))
        dtype = f"{o.dtype.var if isinstance(o.dtype, DTypeVar) and var else '-'} {choices}"
        return f"  tensor {o.name} {o.role} {o.layout} optional={o.optional:d} dtype {dtype}{_shape(o.shape)}"
    default = "" if o.default is None else f" default {o.default:.17g}"
    minimum = "" if o.minimum is None else f" minimum {o.minimum:.17g}"
    return f"  scalar {o.name} {o.dtype} positive={o.positive:d}{default}{minimum}"


def _attr(a: Attr) -> str:
    return f"  attr {a.name} default {' '.join(map(attr_text, (a.default, *a.choices)))}"


def _dims(sig: Signature) -> list[str]:
    """In the order in which shapes mention them, rows and width last. names() goes from the end."""
    found: dict[str, None] = {}
    for tensor in sig.tensors:
        for e in tensor.shape:
            found.update(dict.fromkeys(name for head, name in reversed(list(names(e))) if head == "dim"))
    return list(found | {sig.rows: None} | {sig.width: None})


def _op(name: str, sig: Signature) -> Iterator[str]:
    yield f"op {name} {sig.family} recipe={sig.kind == 'recipe':d} rows {sig.rows} width {sig.width}"
    yield f"  doc {sig.doc}"
    yield from map(_operand, sig.operands)
    yield from map(_attr, sig.attrs)
    yield from (f"  returns {r}" for r in sig.returns)
    yield from (f"  constraint{expr_text(p)} {sentence}" for p, sentence in sig.constraints)
    yield "  dims " + " ".join(_dims(sig))
    yield _contract(sig.contract)


def _param(p: Param) -> str:
    text = f"  param {p.kind} {p.name} {p.dtype}"
    if p.kind == "ptr":
        text += f" {p.operand} ({p.operand}) {p.access} {p.align}"
    if p.map is not None:
        m = p.map
        shape, strides = ("".join(map(expr_text, values)) for values in (m.shape, m.strides))
        box = "".join(f" {n}" for n in m.box)
        how = (SWIZZLES[m.swizzle], INTERLEAVES[m.interleave], PROMOTIONS[m.l2], FILLS[m.fill])
        text += f" {p.operand} ({p.operand}) {p.access} shape{shape} strides{strides} box{box}"
        text += " how " + " ".join(map(str, how))
    if p.kind in ("scalar", "dropped"):
        text += expr_text(p.value)
    if p.divisible_by is not None:
        text += f" divisible_by {p.divisible_by}"
    return text if p.equals is None else text + f" equals {p.equals}"


def _counts(what: str, counts: Mapping[str, int]) -> str:
    return f"  {what}" + "".join(f" {k}={v}" for k, v in counts.items())


def _three(what: str, n: tuple[int, int, int]) -> str:
    return f" {what} {n[0]} {n[1]} {n[2]}"


def _kernel(k: Kernel) -> Iterator[str]:
    head = f"kernel {k.op}.{k.variant} {k.tier} {k.mode} {k.entry} {k.file} {k.bytes} {k.sha256}"
    yield f"{head} ptxas {k.toolchain.get('ptxas', '-')}"
    flags = f"pdl={k.launch.get('pdl', False):d} cooperative={k.launch.get('cooperative', False):d}"
    shapes = _three("block", k.block) + _three("cluster", k.cluster)
    yield f" {shapes} shared {k.shared_bytes} {flags} priority {k.priority}"
    yield "  grid" + "".join(map(expr_text, k.grid)) + " when" + expr_text(k.when)
    yield from map(_param, k.params)
    yield from (f"  scratch {s.name} {s.align}{' zeroed' * s.zeroed}{expr_text(s.bytes)}" for s in k.scratch)
    yield "  isa " + ("-" if k.isa is None else " ".join((k.isa.tier, *k.isa.features)))
    yield _counts("resources", k.resources)
    yield _counts("budget", k.budget)
    yield _contract(k.numerics.contract)
    yield f"  seed {k.numerics.selftest.seed}"
    yield _counts("selftest", k.numerics.selftest.shape)


def _step(m: Manifest, s: Step) -> str:
    callee = m.ops[s.op]
    parts = [f"{t.name}={s.bind[t.name] or '-'}" for t in callee.tensors]
    parts += [f"{o.name}={expr_text(s.args[o.name])}" for o in callee.scalars if o.name in s.args]
    parts += [f"{a.name}={attr_text(s.attrs.get(a.name, a.default))}" for a in callee.attrs]
    return " ".join(("  step", s.op, *parts))


def _plan(m: Manifest, p: Plan) -> Iterator[str]:
    yield f"plan {p.op}.{p.variant} {p.tier} {p.mode} priority {p.priority} when{expr_text(p.when)}"
    for t in p.temps:
        dtype = f"like {t.dtype.like}" if isinstance(t.dtype, Like) else t.dtype
        assert isinstance(t.dtype, Like) or dtype in DTYPES
        yield f"  temp {t.name} {dtype}{_shape(t.shape)}"
    yield from (_step(m, s) for s in p.steps)


def manifest_text(m: Manifest) -> str:
    """The whole manifest."""
    lines = [f"target {m.target} ptxas {m.toolchain.get('ptxas', '-')}"]
    for name in sorted(m.ops):
        lines += _op(name, m.ops[name])
    for kernel in m.kernels:
        lines += _kernel(kernel)
    for plan in m.recipes:
        lines += _plan(m, plan)
    lines += [f"source {name} {s.bytes} {s.sha256}" for name, s in m.sources.items()]
    return "\n".join(lines) + "\n"


def index_text(x: Index) -> str:
    """An index."""
    entries = (f"{name} {e.manifest} {e.bytes} {e.sha256}" for name, e in x.targets.items())
    return "\n".join((f"generation {x.generation}", *entries)) + "\n"
