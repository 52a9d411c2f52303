"""Catalogs: Python packages that declare ops. Kiln's own is `kiln.recipes`; users bring theirs, with no line of Kiln changed.

A catalog package has a function `catalog() -> Catalog`. Nothing is registered by importing.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kiln.compiler.errors import CheckError
from kiln.ir.spec import DTypeVar, Op, Scalar, Tensor

OWN = "kiln.recipes"


@dataclass(frozen=True)
class Catalog:
    """What one package declares: ops, and hand-written realizations (a backend takes those of its own kind)."""

    ops: tuple[Op, ...]
    realizations: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """All catalogs of a build together."""

    names: tuple[str, ...]
    ops: Mapping[str, Op]
    realizations: tuple[Any, ...]
    modules: Mapping[str, str]
    """The module that declares each op's body or reference."""


def _package(name: str) -> Catalog:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise CheckError(f"catalog {name} cannot be imported: {error}; give an importable package name") from error
    factory = getattr(module, "catalog", None)
    if factory is None:
        raise CheckError(f"package {name} has no function catalog(); a catalog declares `def catalog() -> Catalog`")
    made = factory()
    return Catalog(tuple(made.ops), tuple(getattr(made, "realizations", ())))


@lru_cache(maxsize=8)
def load(names: tuple[str, ...]) -> Loaded:
    """Every op of the named packages; CheckError for a package that is none, or two ops of one name."""
    ops: dict[str, Op] = {}
    realizations: list[Any] = []
    modules: dict[str, str] = {}
    for name in names:
        part = _package(name)
        for op in part.ops:
            if op.name in ops:
                raise CheckError(f"op {op.name} is declared twice (again in {name}); names are unique over all catalogs")
            ops[op.name] = op
            source = op.body or op.reference
            modules[op.name] = source.__module__ if source is not None else name
        realizations += part.realizations
    return Loaded(names, ops, tuple(realizations), modules)


def load_catalogs(names: Sequence[str]) -> dict[str, Op]:
    """Ops by name."""
    return dict(load(tuple(names)).ops)


def find(ops: Mapping[str, Op], name: str) -> Op:
    """The op, or a CheckError with the nearest names."""
    if name not in ops:
        near = difflib.get_close_matches(name, ops, 3)
        hint = f"; did you mean {', '.join(near)}?" if near else f"; known: {', '.join(sorted(ops))}"
        raise CheckError(f"no op or recipe named {name!r}{hint}")
    return ops[name]


def _tensor_json(t: Tensor) -> dict[str, Any]:
    variable = isinstance(t.dtype, DTypeVar)
    dtype = {"var": t.dtype.name, "choices": [c.name for c in t.dtype.choices]} if variable else t.dtype.name  # type: ignore[union-attr]
    return {
        "name": t.name, "kind": "tensor", "role": t.role, "dtype": dtype, "shape": list(t.dims), "layout": t.layout,
        "optional": t.optional, "doc": t.doc,
    }  # fmt: skip


def _scalar_json(s: Scalar) -> dict[str, Any]:
    return {
        "name": s.name, "kind": "scalar", "dtype": s.dtype.name, "default": s.default, "minimum": s.minimum, "positive": s.positive,
        "doc": s.doc,
    }  # fmt: skip


def signature_json(op: Op) -> dict[str, Any]:
    """The op's SIG entry of a manifest."""
    return {
        "family": op.family,
        "kind": "recipe" if op.is_recipe else "op",
        "rows": op.rows,
        "width": op.width,
        "operands": [_tensor_json(o) if isinstance(o, Tensor) else _scalar_json(o) for o in op.operands],
        "returns": [t.name for t in op.outputs],
        "attrs": [{"name": a.name, "choices": list(a.choices), "default": a.default, "doc": a.doc} for a in op.attrs],
        "constraints": [[predicate, sentence] for predicate, sentence in op.constraints],
        "contract": {"kind": op.contract.kind, "rel_l2": op.contract.rel_l2, "max_eps": op.contract.max_eps},
        "doc": op.doc,
    }


