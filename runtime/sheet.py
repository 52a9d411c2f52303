"""An op in words, from what a manifest says of it: how it is called, what each operand is, what is promised
and what is refused. `print(lib.rms_norm)` and `kiln show rms_norm` print it."""

from collections.abc import Iterable, Iterator

from kiln.runtime.entities import Attr, Contract, DTypeVar, Kernel, Plan, Scalar, Signature, Tensor
from kiln.runtime.expr import Expr, render

PROMISES = {
    "exact": "exact: the same bits on every CPU and GPU, fused or not",
    "exact_on_target": "exact on a target: the same bits whichever way it runs there",
    "envelope": "from float64 within {rel_l2:.2g} (relative L2) and {max_eps:g} epsilons of the output's "
    "type (worst element)",
}
LAYOUTS = {
    "rows": "",
    "dense": "contiguous",
    "strided": "any strides",
    "nvfp4_128x4": "in swizzled blocks of 128 x 4",
}
"""What is asked of memory beyond rows of neighbouring elements."""
ROLES = {"in": "read", "inout": "read and written", "out": "written"}


def sheet(name: str, sig: Signature) -> str:
    """Everything that callers of an op need, in some ten lines."""
    lines = [call_line(name, sig), *_sentences(sig.doc), ""]
    lines += _columns([*map(_tensor, sig.tensors), *map(_scalar, sig.scalars), *map(_attr, sig.attrs)])
    types = {t.dtype.var: t.dtype.choices for t in sig.tensors if isinstance(t.dtype, DTypeVar)}
    facts = [[f"type {v}", ", ".join(choices)] for v, choices in types.items()]
    if any(len(t.shape) > 1 and t.shape[0] == ("dim", sig.rows) for t in sig.tensors):
        facts.append([sig.rows, "stands for any number of leading dimensions"])
    facts.append(["numerics", promise(sig.contract)])
    facts += [["requires", sentence] for _, sentence in sig.constraints]
    return "\n".join([*lines, "", *_columns(facts)])


def call_line(name: str, sig: Signature) -> str:
    """The call as Python writes it; operands may be given by position or name, attributes by name."""
    words = [_argument(o) for o in sig.operands if isinstance(o, Scalar) or o.role != "out"]
    words += [f"{a.name}={a.default!r}" for a in sig.attrs]
    return f"{name}({', '.join(words)}) -> {', '.join(sig.returns)}"


def promise(contract: Contract) -> str:
    """A numerics contract in words."""
    return PROMISES[contract.kind].format(rel_l2=contract.rel_l2, max_eps=contract.max_eps)


def served(candidates: Iterable[Kernel | Plan]) -> list[str]:
    """The element types, attributes and absent operands that candidates are for, each once, in the words of
    `kiln explain`: "x=bf16 weight=none gemma=true"."""
    return list(dict.fromkeys(" ".join(_words(c.when)) for c in candidates))


def _words(when: object) -> Iterator[str]:
    match when:
        case ("and", *parts):
            for part in parts:
                yield from _words(part)
        case ("dtype", str(name), str(dtype)):
            yield f"{name}={dtype}"
        case ("absent", str(name)):
            yield f"{name}=none"
        case ("attr", str(name), value):
            yield f"{name}={_said(value)}"


def _argument(o: Tensor | Scalar) -> str:
    if isinstance(o, Tensor):
        return f"{o.name}=None" if o.optional else o.name
    return o.name if o.default is None else f"{o.name}={_number(o)}"


def _tensor(t: Tensor) -> list[str]:
    dtype = t.dtype if isinstance(t.dtype, str) else t.dtype.var
    shape = ", ".join(map(_extent, t.shape))
    about = [ROLES[t.role], "may be None" if t.optional else "", LAYOUTS[t.layout], _flat(t.doc)]
    return [t.name, f"{dtype}[{shape}]", "; ".join(filter(None, about))]


def _extent(e: Expr) -> str:
    text = render(e)
    return text[1:-1] if text.startswith("(") else text


def _scalar(s: Scalar) -> list[str]:
    least = s.minimum if s.minimum is not None else 0.0 if s.positive else None
    bound = "" if least is None else f"more than {least:g}" if s.positive else f"{least:g} or more"
    default = "" if s.default is None else f"default {_number(s)}"
    return [s.name, s.dtype, "; ".join(filter(None, (default, bound, _flat(s.doc))))]


def _attr(a: Attr) -> list[str]:
    choices = " | ".join(map(repr, a.choices))
    return [a.name, choices, "; ".join(filter(None, (f"default {a.default!r}", _flat(a.doc))))]


def _number(s: Scalar) -> str:
    if s.default is not None and s.dtype == "bool":
        return str(bool(s.default))
    return f"{s.default:g}" if s.dtype in ("f32", "f64") else str(s.default)


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _sentences(doc: str) -> list[str]:
    from textwrap import wrap

    return wrap(_flat(doc), 108)


def _columns(rows: list[list[str]]) -> list[str]:
    """Rows as lines, every column but the last padded."""
    sizes = [max((len(r[i]) for r in rows), default=0) for i in range(max(map(len, rows), default=1) - 1)]
    return [
        "  " + "  ".join([*(c.ljust(n) for c, n in zip(r, sizes, strict=False)), r[-1]]).rstrip()
        for r in rows
    ]
