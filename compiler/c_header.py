"""Typed calls of a tree's ops as one C header: text, from manifests alone.

An id is a place in the header's own table, because devices differ in the ops that they have; the header finds
every op by name once, and compares how it is called with what it was written for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kiln.compiler.c_names import Names, comment, identifier, literal
from kiln.compiler.errors import BuildError
from kiln.runtime.entities import Attr, Manifest, Operand, Scalar, Signature, Tensor

TEMPLATE = "c_header.h.j2"
_FIXED = ("ops", "arguments", "choice", "stream", "call", "error")
"""Parameters and variables of every generated function."""
_SCALARS = {"f32": ("double", "NUMBER"), "f64": ("double", "NUMBER"), "bool": ("bool", "BOOL")}
"""C type and KILN_ macro of a scalar's type; integers are the rest."""
_INTEGER = ("int64_t", "INTEGER")


@dataclass(frozen=True)
class Choice:
    """A value of an attribute that has an enum."""

    name: str
    argument: str
    """The kiln_argument that passes it."""


@dataclass(frozen=True)
class Enum:
    """The choices of an attribute that are not all integers or all bool."""

    name: str
    attribute: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a generated function."""

    declaration: str
    name: str
    argument: str
    """The kiln_argument that passes it."""
    about: str


@dataclass(frozen=True)
class Default:
    """The default of a scalar or attribute, as a macro."""

    name: str
    value: str


@dataclass(frozen=True)
class Call:
    """An op as the template sees it."""

    name: str
    id: str
    count: str
    """Name of the constant that is the number of its arguments."""
    signature: str
    everywhere: bool
    doc: str
    enums: tuple[Enum, ...]
    defaults: tuple[Default, ...]
    parameters: tuple[Parameter, ...]

    @property
    def declared(self) -> str:
        """The parameters as a function declares them."""
        return _wrapped([p.declaration for p in self.parameters], "    ")

    @property
    def passed(self) -> str:
        """The parameters as a call passes them."""
        return _wrapped([p.name for p in self.parameters], "      ")


def _wrapped(items: Sequence[str], indent: str) -> str:
    """The items with commas, lines broken between items only."""
    glued = ", ".join(i.replace(" ", "\0") for i in items)
    lines = textwrap.wrap(
        glued, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def how_called(name: str, signature: Signature) -> str:
    """How an op is called, as `kiln_op_signature` of libkiln says it: operands, then names of attributes."""
    operands = ", ".join(_operand(o) for o in signature.operands)
    attrs = ", ".join(a.name for a in signature.attrs)
    return f"{name}({operands}; {attrs})" if attrs else f"{name}({operands})"


def _operand(o: Operand) -> str:
    if isinstance(o, Scalar):
        return f"{o.dtype} {o.name}"
    return f"{o.role}{'?' if o.optional else ''} {o.name}"


def c_header(manifests: Mapping[str, Manifest], digest: str, prefix: str = "kiln") -> str:
    """The header for a tree.

    Args:
        manifests: by target.
        digest: SHA-256 of its INDEX.json, in hex.
        prefix: of every name that the header defines; a lower-case identifier.

    Raises:
        BuildError: targets disagree on how an op is called.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    calls = calls_of(manifests, prefix)
    longest = max(len(c.signature) for c in calls)
    template = environment.get_template(TEMPLATE)
    return template.render(prefix=prefix, PREFIX=prefix.upper(), digest=digest, calls=calls, longest=longest)


def calls_of(manifests: Mapping[str, Manifest], prefix: str) -> list[Call]:
    """Every op of these targets, sorted by name."""
    names = Names()
    found = _signatures(manifests)
    return [_call(n, s, all(n in m.ops for m in manifests.values()), prefix, names) for n, s in found.items()]


def _signatures(manifests: Mapping[str, Manifest]) -> dict[str, Signature]:
    found: dict[str, tuple[str, Signature]] = {}
    for target, manifest in sorted(manifests.items()):
        for name, signature in manifest.ops.items():
            first, known = found.setdefault(name, (target, signature))
            ours, theirs = how_called(name, signature), how_called(name, known)
            if (ours, signature.attrs) != (theirs, known.attrs):
                raise BuildError(
                    f"{target} has {ours}, {first} has {theirs}, or other choices of an attribute; build "
                    "all targets from the same declarations."
                )
    return {name: signature for name, (_, signature) in sorted(found.items())}


def _call(name: str, signature: Signature, everywhere: bool, prefix: str, names: Names) -> Call:
    enums = tuple(_enum(name, a, prefix, names) for a in signature.attrs if _needs_enum(a))
    return Call(
        name=name,
        id=names.claim(f"{prefix}_op_{name}".upper()),
        count=names.claim(f"{prefix}_arguments_{name}".upper()),
        signature=literal(how_called(name, signature)),
        everywhere=everywhere,
        doc=comment(signature.doc),
        enums=enums,
        defaults=tuple(_defaults(name, signature, prefix, enums, names)),
        parameters=tuple(_parameters(signature, enums)),
    )


def _needs_enum(a: Attr) -> bool:
    return {type(c) for c in a.choices} not in ({bool}, {int})


def _enum(op: str, a: Attr, prefix: str, names: Names) -> Enum:
    stem = f"{prefix}_attr_{op}_{a.name}"
    choices = []
    for value in a.choices:
        wanted = f"{stem}_{identifier(str(value))}".upper()
        choices.append(Choice(names.claim(wanted), _attr_argument(a, value)))
    return Enum(names.claim(stem), a.name, tuple(choices))


def _attr_argument(a: Attr, value: bool | int | str) -> str:
    kind, text = {
        bool: ("BOOL", _shown(value)),
        int: ("INTEGER", _integer(value) if isinstance(value, int) else ""),
        str: ("TEXT", literal(str(value))),
    }[type(value)]
    return f"KILN_{kind}({literal(a.name)}, {text})"


def _integer(value: int) -> str:
    # The lowest has no literal of its own: -9223372036854775808 is the negation of one that is too big.
    return (
        "INT64_MIN" if value == -(1 << 63) else f"INT64_C({value})" if value >= 0 else f"-INT64_C({-value})"
    )


def _defaults(
    op: str, signature: Signature, prefix: str, enums: Sequence[Enum], names: Names
) -> list[Default]:
    values = [(s.name, _scalar_default(s)) for s in signature.scalars if s.default is not None]
    values += [(a.name, _attr_default(a, enums)) for a in signature.attrs]
    return [Default(names.claim(f"{prefix}_default_{op}_{n}".upper()), value) for n, value in values]


def _scalar_default(s: Scalar) -> str:
    assert s.default is not None
    if s.dtype == "bool":
        return "true" if s.default else "false"
    return f"({float(s.default)!r})" if s.dtype in _SCALARS else f"({_integer(int(s.default))})"


def _attr_default(a: Attr, enums: Sequence[Enum]) -> str:
    enum = next((e for e in enums if e.attribute == a.name), None)
    if enum is not None:
        same = [type(c) is type(a.default) and c == a.default for c in a.choices]
        return enum.choices[same.index(True)].name
    return _shown(a.default) if isinstance(a.default, bool) else f"({_integer(int(a.default))})"


def _parameters(signature: Signature, enums: Sequence[Enum]) -> list[Parameter]:
    names = Names(_FIXED)
    found = []
    for o in signature.operands:
        found += [_scalar(o, names)] if isinstance(o, Scalar) else _tensor(o, names)
    return found + [_attribute(a, next((e for e in enums if e.attribute == a.name), None), names)
                    for a in signature.attrs]  # fmt: skip


def _tensor(t: Tensor, names: Names) -> list[Parameter]:
    name = names.claim(t.name)
    dtype = t.dtype if isinstance(t.dtype, str) else f"{t.dtype.var} = {' | '.join(t.dtype.choices)}"
    about = f"{t.role} {dtype}{', NULL: absent' if t.optional else ''}{_said(t.doc)}"
    tensors = [
        Parameter(f"const kiln_tensor *{name}", name, f"KILN_TENSOR({literal(t.name)}, {name})", about)
    ]
    if t.role == "inout":
        to = names.claim(f"{t.name}_to")
        fill = f"KILN_WRITTEN({literal(t.name)}, {to})"
        tensors.append(
            Parameter(f"const kiln_tensor *{to}", to, fill, f"where {t.name} is written, NULL: in place")
        )
    return tensors


def _scalar(s: Scalar, names: Names) -> Parameter:
    name = names.claim(s.name)
    kind, macro = _SCALARS.get(s.dtype, _INTEGER)
    return Parameter(
        f"{kind} {name}", name, f"KILN_{macro}({literal(s.name)}, {name})", s.dtype + _said(s.doc)
    )


def _attribute(a: Attr, enum: Enum | None, names: Names) -> Parameter:
    name = names.claim(a.name)
    about = f"one of {', '.join(_shown(c) for c in a.choices)}{_said(a.doc)}"
    if enum is not None:
        return Parameter(f"{enum.name} {name}", name, f"{enum.name}_argument({name})", comment(about))
    kind, macro = ("bool", "BOOL") if isinstance(a.default, bool) else _INTEGER
    return Parameter(f"{kind} {name}", name, f"KILN_{macro}({literal(a.name)}, {name})", comment(about))


def _shown(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _said(doc: str) -> str:
    return f": {comment(doc)}" if doc.strip() else ""
