"""The import rules of the layers, over the files and in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("ir", "recipes", "compiler", "backends", "runtime", "tools", "aot_artifacts")
EVERY = frozenset(LAYERS)

ALLOWED: dict[str, frozenset[str]] = {
    "runtime": frozenset({"runtime"}),
    "ir": frozenset({"ir"}),
    "recipes": frozenset({"recipes", "ir"}),
    "compiler": frozenset({"compiler", "ir", "runtime"}),
    "backends": frozenset({"backends", "compiler", "recipes", "ir", "runtime"}),
    "tools": EVERY,
    "aot_artifacts": frozenset(),
}
"""What a file of a layer may import of kiln."""

HEAVY: dict[str, frozenset[str]] = {
    "runtime": frozenset({"triton", "mlir", "torch", "jinja2", "networkx", "rich", "ziglang"}),
    "recipes": frozenset({"triton", "mlir", "torch", "jinja2", "networkx", "rich", "ziglang", "cuda"}),
    "ir": frozenset({"triton", "torch", "jinja2", "rich", "ziglang", "cuda"}),
    "compiler": frozenset({"torch", "cuda"}),
}
"""Distributions that a layer must not import."""

DOORS = {("runtime", "torch.py"): "torch"}
"""The one file of a layer that is for one of them; nothing else may import that file."""


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import statement; a relative one starts with a dot.

    `from kiln import x` counts as `kiln.x`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"kiln.{alias.name}" for alias in node.names] if module == "kiln" else [module]
            yield from ((node.lineno, name) for name in names)


def faults(layer: str, source: str, name: str = "example.py") -> list[str]:
    """One sentence for each import that the layer may not make."""
    found = []
    for line, module in imported_modules(source):
        where = f"{layer}/{name}:{line}"
        parts = module.split(".")
        if module.startswith("."):
            found.append(f"{where} imports {module} relatively; write kiln.{layer}.…")
        elif parts[0] in EVERY or parts[0] == "tests":
            found.append(f"{where} imports {module}; write kiln.{module}")
        elif layer == "runtime" and module == "kiln.runtime.torch":
            found.append(f"{where} imports {module}, which is for callers that have PyTorch")
        elif parts[0] == "kiln" and (len(parts) < 2 or parts[1] not in ALLOWED[layer]):
            found.append(f"{where} imports {module}; {layer} may import {sorted(ALLOWED[layer])} of kiln")
        elif parts[0] in HEAVY.get(layer, ()) and DOORS.get((layer, name)) != parts[0]:
            found.append(f"{where} imports {module}, which {layer} must do without")
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_every_file_keeps_to_its_layer(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files or layer == "aot_artifacts", f"no Python file in {layer}/"
    found = []
    for path in files:
        found += faults(layer, path.read_text("utf-8"), path.relative_to(ROOT / layer).as_posix())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("runtime", "import kiln.compiler.backend"),
        ("runtime", "from kiln import ir"),
        ("runtime", "import triton"),
        ("runtime", "import torch"),
        ("runtime", "import kiln.runtime.torch"),
        ("ir", "from kiln.recipes.norm import RMS_NORM"),
        ("recipes", "from kiln.compiler.target import TARGETS"),
        ("recipes", "import mlir.ir"),
        ("compiler", "from kiln.backends.cuda import compile"),
        ("compiler", "from kiln.recipes import catalog"),
        ("backends", "from kiln.tools.cli import main"),
        ("tools", "from . import cli"),
        ("tools", "import runtime"),
        ("aot_artifacts", "import kiln.runtime"),
    ],
)
def test_a_forbidden_import_is_found(layer: str, line: str) -> None:
    assert len(faults(layer, f"def f():\n    {line}\n")) == 1


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("runtime", "from kiln.runtime.errors import KilnError"),
        ("compiler", "from kiln.runtime.manifest import Kernel"),
        ("backends", "from kiln.recipes.norm import RMS_NORM"),
        ("tools", "from kiln.backends.cuda.compile import run"),
        ("ir", "import mlir.ir"),
    ],
)
def test_an_allowed_import_passes(layer: str, line: str) -> None:
    assert faults(layer, line) == []


BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[0] in HEAVY or (parts[0] == "kiln" and len(parts) > 1 and parts[1] != "runtime"):
            raise ImportError("blocked: " + name)
HEAVY = {"triton", "mlir", "torch", "jinja2", "networkx", "rich", "ziglang", "cuda"}
sys.meta_path.insert(0, Block())
"""


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT / ".typing"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env, cwd="/", timeout=120
    )


@pytest.mark.parametrize("flags", [(), ("-OO",)], ids=["plain", "OO"])
def test_runtime_imports_with_everything_else_blocked(flags: tuple[str, ...]) -> None:
    done = run_python(BLOCKER + "import kiln.runtime\nprint('imported')", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported\n", "")


@pytest.mark.parametrize("module", ["kiln.ir.spec", "triton"])
def test_the_blocker_blocks(module: str) -> None:
    done = run_python(BLOCKER + f"import {module}")
    assert done.returncode == 1
    assert f"blocked: {module.rsplit('.', 1)[0]}" in done.stderr
