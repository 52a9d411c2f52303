"""libkiln as an engine gets it: built and installed with CMake, beside a tree and the header of its calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kiln.compiler.c_header import c_header
from kiln.tests.support.compilers import run
from kiln.tools.trees import read_tree, shipped

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "runtime" / "c"
EXAMPLE = SOURCE / "example"
WARNINGS = "-Wall -Wextra -Werror"
TOOLS = ("cmake", "make", "ninja", "cc", "c++", "gcc", "g++", "as", "ld", "ar", "ranlib", "pkg-config", "uname", "sh")


def bare_path(folder: Path) -> str:
    """A PATH with what builds C and C++, and no Python."""
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    assert not any(p.name.startswith("python") for p in folder.iterdir())
    return str(folder)


@dataclass(frozen=True)
class Engines:
    """Where engines are built: an installed libkiln, and tools without Python."""

    prefix: Path
    headers: Path
    path: str

    def run(self, *command: str | Path, cwd: Path = ROOT, **env: str) -> str:
        """stdout of a command that must succeed and finds no Python."""
        return run(command, cwd, PATH=self.path, **env)

    def configure(self, source: Path, build: Path, *options: str | Path) -> str:
        """Run CMake's configuration of a project that uses the installed library."""
        defines = (f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DKILN_HEADERS={self.headers}")
        return self.run("cmake", "-S", source, "-B", build, *defines, *options)

    def build(self, source: Path, build: Path, *options: str | Path) -> None:
        """Configure and build a project that uses the installed library."""
        self.configure(source, build, *options)
        self.run("cmake", "--build", build)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """libkiln, built without a warning, installed into a folder of its own."""
    for tool in ("cmake", "cc", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("engines")
    tools, headers = folder / "tools", folder / "headers"
    tools.mkdir()
    headers.mkdir()
    tree = read_tree(shipped())
    (headers / "kiln_ops.h").write_text(c_header(tree.manifests, tree.digest), "utf-8")
    made = Engines(folder / "prefix", headers, bare_path(tools))
    made.run("cmake", "-S", SOURCE, "-B", folder / "build", f"-DCMAKE_C_FLAGS={WARNINGS}")
    made.run("cmake", "--build", folder / "build", "--parallel", str(len(os.sched_getaffinity(0))))
    made.run("cmake", "--install", folder / "build", "--prefix", made.prefix)
    yield made
