"""inputs_digest: one hash over everything that determines an artifact's bytes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import kiln.compiler
import kiln.ir


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
def module_closure(name: str) -> tuple[Path, ...]:
    """A module's file and those of the modules it imports from the same package (recipes import recipes)."""
    package = name.rpartition(".")[0]
    seen: dict[str, Path] = {}
    pending = [name]
    while pending:
        current = pending.pop()
        spec = importlib.util.find_spec(current)
        if current in seen or spec is None or spec.origin is None:
            continue
        seen[current] = Path(spec.origin)
        for value in vars(import_module(current)).values():
            inner = getattr(value, "__name__", "") if hasattr(value, "__path__") or hasattr(value, "__spec__") else getattr(value, "__module__", "")
            if package and isinstance(inner, str) and inner.startswith(f"{package}.") and inner != current:
                pending.append(inner)
    return tuple(seen[k] for k in sorted(seen))


def inputs_digest(sources: Iterable[Path], payload: Mapping[str, Any], toolchain: Mapping[str, str]) -> str:
    """sha256 over source contents by file name, the job's data and the tools' versions."""
    files = sorted((p.parent.name + "/" + p.name, file_hash(p)) for p in set(sources))
    text = json.dumps([files, payload, dict(toolchain)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=32)
def package_version(name: str) -> str:
    """Installed version of a distribution, or "absent"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
