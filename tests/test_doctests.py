"""Every example in a docstring runs and prints what it shows."""

from __future__ import annotations

import ast
import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("backends", "compiler", "ir", "recipes", "runtime", "tools")


def has_examples(source: str) -> bool:
    """Whether a docstring of the source holds a prompt."""
    if ">>> " not in source:
        return False  # parsing every file takes 2 s
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, holders))
    return any(">>> " in doc for doc in docs if doc)


def modules_with_examples() -> list[str]:
    files = (p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py")))
    return [
        "kiln." + ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in files
        if has_examples(p.read_text("utf-8"))
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_are_found() -> None:
    assert has_examples('def f():\n    """Doubles.\n\n    >>> f(1)\n    2\n    """\n')
    assert not has_examples('text = ">>> f(1)"\n')
