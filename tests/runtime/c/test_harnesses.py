"""The fuzzing harnesses build and run, with sanitizers where the compiler has them: a few thousand mutations
of each corpus."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from kiln.tests.fuzz.c import seeds
from kiln.tests.runtime.c.core_build import CORE, SOURCES, compiler

HARNESSES = Path(__file__).parents[2] / "fuzz" / "c"
RUNS = 3000


def run(command: list[str], folder: Path) -> str:
    """The output of a command that must succeed."""
    env = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=str(folder / "zig"), ZIG_LOCAL_CACHE_DIR=str(folder / "zig"))
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The compiler with its options; zig brings no AddressSanitizer."""
    sanitizers = (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if "gcc" in compiler()[0] else []
    )
    return [
        *compiler(),
        "-std=c11",
        "-O0",
        "-Wall",
        "-Wextra",
        "-Werror",
        *sanitizers,
        f"-I{SOURCES}",
        f"-I{SOURCES / 'include'}",
    ]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, command: list[str]) -> Path:
    """A folder with the core's objects and all corpora."""
    folder = tmp_path_factory.mktemp("fuzz")
    run([*command, "-c", *(str(SOURCES / f"{name}.c") for name in CORE)], folder)
    seeds.write(folder / "seeds")
    return folder


@pytest.mark.parametrize("name", seeds.CORPORA)
def test_harness(built: Path, command: list[str], name: str) -> None:
    parts = [str(HARNESSES / f"fuzz_{name}.c"), str(HARNESSES / "driver.c"), *(f"{c}.o" for c in CORE)]
    run([*command, "-o", f"fuzz_{name}", *parts], built)
    files = sorted(map(str, (built / "seeds" / name).iterdir()))
    told = run([f"./fuzz_{name}", str(RUNS), *files], built)
    found = re.fullmatch(r"(\d+) executions, the slowest took (\d+\.\d+) s\n", told)
    assert found is not None
    assert int(found[1]) == RUNS + len(files)
    assert float(found[2]) < 1
