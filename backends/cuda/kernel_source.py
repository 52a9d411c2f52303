"""The parameters of a `@triton.jit` kernel, read from its source file: the kernel's module is never
imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kiln.ir.diagnostics import DeclarationError

DECIDED_AT_RUN_TIME = frozenset({"autotune", "heuristics"})
"""Decorators that choose constants when a kernel is launched: a compiled kernel has them fixed."""
MISSING = object()


@dataclass(frozen=True)
class KernelParameter:
    """One parameter of a kernel."""

    name: str
    line: int
    is_constexpr: bool
    default: Any = MISSING
    """A literal default, or MISSING."""


@dataclass(frozen=True)
class KernelSource:
    """A kernel's parameters in order, and where they stand."""

    path: Path
    line: int
    parameters: tuple[KernelParameter, ...]

    @property
    def location(self) -> str:
        """file:line of the function."""
        return f"{self.path}:{self.line}"

    def at(self, parameter: KernelParameter) -> str:
        """file:line of a parameter."""
        return f"{self.path}:{parameter.line}"


@lru_cache(maxsize=256)
def read_kernel(kernel: str) -> KernelSource:
    """The source of `module:function`.

    Raises:
        DeclarationError: no such module or function, not decorated with `triton.jit`, autotuned, or a
        parameter
            list with `*`.
    """
    module, colon, name = kernel.partition(":")
    if not colon or not name:
        raise DeclarationError(
            f"kernel {kernel!r} is no module:function; write 'my_kernels.kernels:my_kernel'"
        )
    path = _source_path(module, kernel)
    tree = ast.parse(path.read_text("utf-8"), str(path))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    found = next((f for f in functions if f.name == name), None)
    if found is None:
        names = ", ".join(f.name for f in functions) or "none"
        raise DeclarationError(f"no function named {name}; the file's functions are {names}", f"{path}:1")
    _check_decorators(found, path)
    if found.args.vararg or found.args.kwarg:
        raise DeclarationError(
            f"kernel {name} takes * arguments; name each parameter", f"{path}:{found.lineno}"
        )
    return KernelSource(path, found.lineno, _parameters(found.args))


def _source_path(module: str, kernel: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise DeclarationError(
            f"kernel {kernel}: there is no Python module {module}; give the file that holds it"
        )
    return Path(spec.origin)


def _check_decorators(function: ast.FunctionDef, path: Path) -> None:
    names = [_last_name(d) for d in function.decorator_list]
    where = f"{path}:{function.lineno}"
    fixed = sorted(DECIDED_AT_RUN_TIME.intersection(names))
    if fixed:
        raise DeclarationError(
            f"kernel {function.name} is decorated with {fixed[0]}, which chooses constants at run time; "
            "take it off and declare one Launch for each choice",
            where,
        )
    if "jit" not in names:
        raise DeclarationError(f"{function.name} is no kernel; decorate it with @triton.jit", where)


def _last_name(decorator: ast.expr) -> str:
    """`jit` of `@triton.jit`, `@jit` and `@triton.jit(...)`."""
    if isinstance(decorator, ast.Call):
        return _last_name(decorator.func)
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def _parameters(arguments: ast.arguments) -> tuple[KernelParameter, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    filled: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults: Sequence[ast.expr | None] = [*filled, *arguments.defaults, *arguments.kw_defaults]
    pairs = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return tuple(KernelParameter(a.arg, a.lineno, _is_constexpr(a.annotation), _literal(d)) for a, d in pairs)


def _is_constexpr(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.Constant):
        return str(annotation.value).endswith("constexpr")
    return annotation is not None and _last_name(annotation) == "constexpr"


def _literal(default: ast.expr | None) -> Any:
    if isinstance(default, ast.Constant) and isinstance(default.value, bool | int | float | str | None):
        return default.value
    return MISSING
