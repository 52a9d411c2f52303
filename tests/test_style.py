"""Limits on size, and words that have no place in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("backends", "compiler", "ir", "recipes", "runtime", "tools", "tests")
FILE_LINES = 600
FUNCTION_LINES = 80
KERNEL_LINES = 120
TEXT = {".py", ".j2", ".h", ".c", ".cpp", ".md", ".toml", ".json", ".lock", ".txt", ".cmake", ".in", ""}
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
HOMES = "|".join(("work", "root", r"home/\w+", "tmp/env", "opt/pypi"))
PLACES = re.compile(rf"(?<![\w.])/(?:{HOMES})/|(?<!torch)\.libr" + r"ary\b")


def sources(*suffixes: str) -> list[Path]:
    files = (p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")))
    return [p for p in files if p.suffix in suffixes and "__pycache__" not in p.parts and p.is_file()]


def long_functions(source: str, limit: int) -> list[str]:
    """`name: lines` of each function over the limit; decorators don't count."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    sizes = ((n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes)
    return [f"{name}: {size} lines, limit {limit}" for name, size in sizes if size > limit]


def test_files_are_short() -> None:
    counts = {p: p.read_bytes().count(b"\n") for p in sources(".py", ".c", ".cpp", ".h", ".j2")}
    assert {str(p.relative_to(ROOT)): n for p, n in counts.items() if n > FILE_LINES} == {}


def test_functions_are_short() -> None:
    found = []
    for path in sources(".py"):
        limit = KERNEL_LINES if path.parent == ROOT / "backends" / "cuda" / "kernels" else FUNCTION_LINES
        names = long_functions(path.read_text("utf-8"), limit)
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert not found, "\n".join(found)


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n" * FUNCTION_LINES
    assert long_functions("def f():\n" + body, FUNCTION_LINES) == ["f: 81 lines, limit 80"]
    assert long_functions("def f():\n" + body, KERNEL_LINES) == []


def repository_files() -> list[Path]:
    """Text files that git tracks or would track; every file outside a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return sources(*TEXT)
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [p for p in paths if p.suffix in TEXT and p.is_file() and not p.is_symlink()]


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in repository_files():
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_nothing_is_left_unfinished() -> None:
    assert lines_matching(UNFINISHED) == []


def test_no_path_of_the_machine_it_was_written_on() -> None:
    assert lines_matching(PLACES) == []


@pytest.mark.parametrize("line", ["# FIX" + "ME later", "x = 1  # TO" + "DO"])
def test_unfinished_words_are_found(line: str) -> None:
    assert UNFINISHED.search(line)


@pytest.mark.parametrize("line", ['open("/wo' + 'rk/main/x")', "see /ro" + "ot/.cache", ".libr" + "ary/env"])
def test_machine_paths_are_found(line: str) -> None:
    assert PLACES.search(line)


@pytest.mark.parametrize("line", ["a/work/b", "/usr/bin/env", "the library", "framework/", "torch.library"])
def test_ordinary_text_passes(line: str) -> None:
    assert not PLACES.search(line)
