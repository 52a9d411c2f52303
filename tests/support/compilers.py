"""The C and C++ compilers of the machine, for tests that build what engines build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
_ZIG = [sys.executable, "-m", "ziglang"] if find_spec("ziglang") else None
_COMMANDS: dict[str, list[str] | None] = {
    "gcc": ["gcc", "-std=c11"],
    "g++": ["g++", "-std=c++17"],
    "clang": ["clang", "-std=c11"],
    "clang++": ["clang++", "-std=c++17"],
    "zig cc": _ZIG and [*_ZIG, "cc", "-std=c11"],
    "zig c++": _ZIG and [*_ZIG, "c++", "-std=c++17"],
}
C = ("gcc", "clang", "zig cc")
CXX = ("g++", "clang++", "zig c++")


def available(name: str) -> bool:
    """Whether this machine has the compiler."""
    command = _COMMANDS[name]
    return command is not None and shutil.which(command[0]) is not None


def command_of(name: str) -> list[str]:
    """How to call a compiler, its language standard included; skips the test where it is not installed."""
    command = _COMMANDS[name]
    if command is None or not available(name):
        pytest.skip(f"{name} is not installed")
    return command


def first_of(*names: str) -> str:
    """The first of these compilers that is installed; skips the test where none is."""
    for name in names:
        if available(name):
            return name
    pytest.skip(f"none of {', '.join(names)} is installed")


def run(command: Sequence[str | Path], cwd: Path, **env: str) -> str:
    """stdout of a command that must succeed, in an environment of `env` alone where that is given."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env or None, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(name: str, cwd: Path, *arguments: str | Path) -> str:
    """Compile with all warnings as errors; what the compiler printed on stdout."""
    return run([*command_of(name), *STRICT, *arguments], cwd)


def build_all(name: str, folder: Path, sources: Sequence[Path], *flags: str) -> list[Path]:
    """Compile sources into objects in `folder`, as many at once as there are processors."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    assert len(set(objects)) == len(sources)
    command_of(name)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pairs = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: build(name, folder, *flags, "-c", pair[0], "-o", pair[1]), pairs))
    return objects
