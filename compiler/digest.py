"""inputs_digest: one hash over everything that determines an artifact's bytes."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import lru_cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import kiln.compiler
import kiln.ir
from kiln.compiler.imports import import_statements


def _folder(module: Any) -> Path:
    return Path(next(iter(module.__path__)))


@lru_cache(maxsize=4096)
def file_hash(path: Path) -> str:
    """sha256 of a source file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def core_sources() -> tuple[Path, ...]:
    """What every expressible op goes through: the IR and the passes."""
    ir, compiler = _folder(kiln.ir), _folder(kiln.compiler)
    own = [compiler / f"{name}.py" for name in ("lower", "rowprogram", "legality")]
    return (*sorted(ir.glob("*.py")), *own, *sorted((compiler / "passes").glob("*.py")))


@lru_cache(maxsize=256)
def module_closure(name: str, others: frozenset[str] = frozenset()) -> tuple[Path, ...]:
    """A module's file, and those of the modules it imports from its own side or `others`, at any depth.

    Its own side: its top-level package (for Kiln's own modules the layer, `kiln.recipes`), and the folder it
    lies in. The files are parsed, not imported: a kernel's module would bring Triton in.
    """
    own = {side_of(name), *others}
    seen: dict[str, Path] = {}
    pending = [name]
    while pending:
        current = pending.pop()
        path = _source(current)
        if current in seen or path is None:
            continue
        seen[current] = path
        beside = path.parent
        for imported in _imports(path, current, own):
            if side_of(imported) in own or _lies_in(imported, beside):
                pending.append(imported)
    return tuple(dict.fromkeys(seen[k] for k in sorted(seen)))


def side_of(name: str) -> str:
    """The top-level package of a module; of Kiln's own the layer."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "kiln" else parts[:1])


def _source(name: str) -> Path | None:
    """The Python file of a module; None if it has none, or there is no such module."""
    spec = _spec(name)
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _spec(name: str) -> ModuleSpec | None:
    """None if there is no such module. Packages that it lies in are imported to find it, and nothing else."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules and not _is_package(parent):
        return None
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _is_package(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def _lies_in(name: str, folder: Path) -> bool:
    """Whether a top-level module is a file of this folder."""
    return "." not in name and (folder / f"{name}.py").is_file()


def _imports(path: Path, module: str, own: Set[str]) -> Iterator[str]:
    """Names that a file's import statements may load: modules, and what is taken from them.

    Only of packages on its `own` sides is what they hold looked up: that would import Triton.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in import_statements(path.read_bytes(), str(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            continue
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        # `from package import module` is about the module: what else the package lists does not count.
        taken = [f"{base}.{alias.name}" for alias in node.names]
        are_modules = side_of(base) in own and all(map(_source, taken))
        yield from taken if are_modules else (base, *taken)


def inputs_digest(sources: Iterable[Path], payload: Mapping[str, Any], toolchain: Mapping[str, str]) -> str:
    """sha256 over source contents by file name, the job's data and the tools' versions."""
    parts = (files_json(frozenset(sources)), _compact(payload), _compact(dict(toolchain)))
    return hashlib.sha256(f"[{','.join(parts)}]".encode()).hexdigest()


@lru_cache(maxsize=1024)
def files_json(sources: frozenset[Path]) -> str:
    """Names and hashes of source files; the jobs of an op share theirs over all targets."""
    return _compact(sorted((p.parent.name + "/" + p.name, file_hash(p)) for p in sources))


_compact = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@lru_cache(maxsize=32)
def package_version(name: str) -> str:
    """Installed version of a distribution, or "absent"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
