"""Catalogs: Python packages that declare ops. Kiln's own is `kiln.recipes`; users bring theirs, with no
line of Kiln changed.

A catalog package has a function `catalog() -> Catalog`. Nothing is registered by importing.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from kiln.compiler.digest import module_closure, side_of
from kiln.compiler.errors import CheckError
from kiln.compiler.validate import validate
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.record import expressible
from kiln.ir.spec import Op
from kiln.runtime.errors import KilnError

OWN = "kiln.recipes"


@dataclass(frozen=True)
class Catalog:
    """What one package declares: ops, and hand-written realizations (a backend takes those of its own
    kind).
    """

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

    def sources(self, op: str) -> tuple[Path, ...]:
        """Files that an op's meaning depends on: its module, and what that imports of any catalog."""
        return module_closure(self.modules[op], self._sides)

    @cached_property
    def expressible(self) -> frozenset[str]:
        """Ops that one row can run; asking records a recipe's body, so it is asked once for all targets."""
        return frozenset(name for name, op in self.ops.items() if expressible(op))

    @cached_property
    def _sides(self) -> frozenset[str]:
        return frozenset({OWN, *map(side_of, self.modules.values())})


def _package(name: str) -> Catalog:
    try:
        module = importlib.import_module(name)
        factory = getattr(module, "catalog", None)
        made: Any = factory() if factory is not None else None
    except ImportError as error:
        raise CheckError(
            f"catalog {name} cannot be imported: {error}; install it, or put the folder that holds it on "
            "PYTHONPATH"
        ) from error
    except (DeclarationError, KilnError):
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}:{error.offset}"
        raise CheckError(f"catalog {name} does not parse: {where}: {error.msg}") from error
    except Exception as error:  # its code is not ours: anything may be wrong with it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        raise CheckError(f"catalog {name} fails with {type(error).__name__} at {where}: {error}") from error
    if factory is None:
        raise CheckError(
            f"package {name} has no function catalog(); a catalog declares `def catalog() -> Catalog`"
        )
    if not hasattr(made, "ops"):
        raise CheckError(
            f"{name}.catalog() returned {type(made).__name__}; expected kiln.compiler.catalog.Catalog"
        )
    for listed in made.ops:
        if not isinstance(listed, Op):
            found = f"{name}.catalog() lists a {type(listed).__name__} among its ops, expected an Op"
            more = "; list its .op, and its .realizations beside the ops"
            raise CheckError(found + (more if hasattr(listed, "realizations") else ""))
    return Catalog(tuple(made.ops), tuple(getattr(made, "realizations", ())))


@lru_cache(maxsize=8)
def load(names: tuple[str, ...]) -> Loaded:
    """Every op of the named packages. Two catalogs may list the same declaration.

    Raises:
        CheckError: a package that is none, or two different ops of one name.
        DeclarationError: an op or recipe that does not hold together, at file:line.
    """
    ops: dict[str, Op] = {}
    realizations: list[Any] = []
    modules: dict[str, str] = {}
    for name in names:
        part = _package(name)
        for op in part.ops:
            if ops.setdefault(op.name, op) is not op:
                raise CheckError(
                    f"op {op.name} is declared twice (again in {name}); names are unique over all catalogs"
                )
            source = op.body or op.reference
            modules[op.name] = source.__module__ if source is not None else name
        realizations += [r for r in part.realizations if r not in realizations]
    validate(ops)
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
