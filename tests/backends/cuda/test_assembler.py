"""An assembler that is missing, broken or another's: its kernels fail by name, or it is not looked at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.backends.cuda.compile import ptxas_version
from kiln.compiler.backend import Job
from kiln.compiler.workers import run_job


def script(folder: Path, text: str, mode: int = 0o755) -> str:
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def ask(job: Job) -> str:
    """A job that asks an assembler for its version, as every job that compiles a kernel does."""
    return ptxas_version(job.payload["ptxas"])


def reason(ptxas: str) -> str:
    """Why a job with this assembler fails."""
    job = Job("sm_80", "add", "v", "0" * 64, f"{__name__}:ask", {"ptxas": ptxas})
    built, why, _ = run_job(job)
    assert built is None
    return why


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("echo release 12, V12.9.86", 0o644, "Permission denied"),
        ("exit 3", 0o755, "exit status 3"),
        ("kill -SEGV $$", 0o755, "died with"),
        ("echo nonsense", 0o755, "does not state a version"),
    ],
    ids=["not executable", "failing", "crashing", "of no version"],
)
def test_an_assembler_that_is_none(tmp_path: Path, text: str, mode: int, why: str) -> None:
    assert why in reason(script(tmp_path, text, mode))


def test_an_assembler_that_is_missing(tmp_path: Path) -> None:
    assert "No such file" in reason(str(tmp_path / "ptxas"))


def test_a_good_assembler(tmp_path: Path) -> None:
    good = script(tmp_path, "echo release 12.9, V12.9.86")
    assert ptxas_version(good) == "12.9.86"
    assert "returned str, expected Built" in reason(good)


KNOBS = """
import os
from kiln.backends.cuda.compile import private_environment
private_environment()
from triton.backends.nvidia.compiler import get_ptxas
print(get_ptxas(80).path)
"""


def test_another_assembler_in_the_environment_is_not_used(tmp_path: Path) -> None:
    theirs = script(tmp_path, "echo release 12.9, V12.9.86")
    paths = dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), theirs)
    env = {**os.environ, **paths, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", KNOBS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ptxas" in done.stdout
    assert done.stdout.strip() != theirs
