"""Real artifacts for tests: cubins that Triton and ptxas made, shared objects that zig made, all built once
a session."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CUDA_ARCHES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_120a": 120}


@dataclass(frozen=True)
class Compiled:
    """A cubin, and what Triton says of it."""

    name: str
    target: str
    data: bytes
    shared: int
    threads: int


_FOLDER = "CUBINS_OF_THIS_TEST_RUN"


def _compile() -> Path:
    """The folder of compiled cubins; made once in a test run, processes that tests start find it."""
    if _FOLDER not in os.environ:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        script = Path(__file__).with_name("cubin_kernels.py")
        env = dict(os.environ, TRITON_DISABLE_LINE_INFO="1", TRITON_CACHE_DIR=f"{folder}/cache")
        subprocess.run(
            [sys.executable, script, folder], env=env, check=True, capture_output=True, timeout=240
        )
        os.environ[_FOLDER] = folder
    return Path(os.environ[_FOLDER])


@functools.cache
def compiled() -> dict[tuple[str, str], Compiled]:
    """(kernel, target) -> cubin, for the kernels of cubin_kernels.py and six targets."""
    folder = _compile()
    facts = json.loads((folder / "facts.json").read_text())
    out = {}
    for target, arch in CUDA_ARCHES.items():
        for name in ("scaled_sum", "spilling", "doubled"):
            data = (folder / f"{name}.{arch}.cubin").read_bytes()
            out[name, target] = Compiled(name, target, data, **facts[f"{name}.{arch}"])
    return out


def nvidia_tool(name: str) -> str:
    """The path of a tool that the Triton wheel brings: ptxas, ptxas-blackwell, cuobjdump."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("these tests need Triton: install the extra [compiler]")
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)


@functools.cache
def assemble(ptx: str, arch: str, tool: str = "ptxas-blackwell", *options: str) -> bytes:
    """The cubin (or object) that an assembler makes of PTX text."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        command = [nvidia_tool(tool), *options, "-arch", arch, "-o", str(out), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return out.read_bytes()


@functools.cache
def shared_object(source: str, triple: str = "x86_64-linux-gnu.2.17", *options: str) -> bytes:
    """The shared object that zig makes of C text."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "k.c"), Path(folder, "k.so")
        path.write_text(source)
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            triple,
            "-O2",
            "-g0",
            "-s",
            "-shared",
            "-fPIC",
        ]
        env = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=f"{folder}/g", ZIG_LOCAL_CACHE_DIR=f"{folder}/l")
        command += ["-nostdlib", *options, "-o", str(out), str(path)]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
        return out.read_bytes()
