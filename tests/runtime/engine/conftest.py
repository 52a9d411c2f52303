"""libkiln as an engine gets it: README's commands, run in a folder with this repository's and no Python."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import pytest

from kiln.tests.support.compilers import run
from kiln.tests.support.readme import Shown, prints, session
from kiln.tools.cli import main

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "runtime" / "c"
EXAMPLE = SOURCE / "example"
WARNINGS = "-Wall -Wextra -Werror"
TOOLS = (
    "cmake",
    "make",
    "ninja",
    "cc",
    "c++",
    "gcc",
    "g++",
    "as",
    "ld",
    "ar",
    "ranlib",
    "gcc-ar",
    "gcc-ranlib",
    "pkg-config",
    "sh",
)


def bare_path(folder: Path) -> str:
    """A PATH with what builds C and C++, and no Python."""
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return str(folder)


@dataclass(frozen=True)
class Engines:
    """A folder in which engines are built, with an installed libkiln; commands find no Python."""

    folder: Path
    path: str

    @property
    def prefix(self) -> Path:
        """Where libkiln is installed."""
        return self.folder / "prefix"

    @property
    def objects(self) -> list[Path]:
        """What the libraries were made of."""
        return sorted((self.folder / "build" / "kiln").rglob("*.c.o"))

    def run(self, *command: str | Path, **env: str) -> str:
        """stdout of a command that must succeed."""
        return run(command, self.folder, PATH=self.path, **env)

    def follow(self, commands: Sequence[Shown], **env: str) -> None:
        """Run what README shows, and compare what it prints; `kiln` itself is the one of this interpreter."""
        for command, shown in commands:
            if command.startswith("kiln "):
                with chdir(self.folder):
                    assert main(command.split()[1:]) == 0, command
            else:
                found = self.run("sh", "-c", command, **env)
                assert not shown or prints(shown, found), f"{command}\n{found}"

    def configure(self, source: Path, build: Path, *options: str | Path) -> str:
        """Run CMake's configuration of a project that uses the installed library."""
        defines = (f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DKILN_HEADERS={self.folder}")
        return self.run("cmake", "-S", source, "-B", build, *defines, *options)

    def build(self, source: Path, build: Path, *options: str | Path) -> None:
        """Configure and build a project that uses the installed library."""
        self.configure(source, build, *options)
        self.run("cmake", "--build", build)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """libkiln, built without a warning and installed as README says."""
    for tool in ("cmake", "cc", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("engines")
    for name in ("runtime", "aot_artifacts"):
        (folder / name).symlink_to(ROOT / name)
    made = Engines(folder, bare_path(folder / "tools"))
    made.follow(session("cmake --install"), CFLAGS=WARNINGS)
    return made
