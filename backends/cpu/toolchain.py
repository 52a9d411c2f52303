"""The C compiler: clang of the `ziglang` package, run so that the same source gives the same bytes from any
folder and for any user."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from multiprocessing import util
from pathlib import Path

from kiln.compiler.errors import BuildError
from kiln.compiler.target import IsaTier, Target

FLAGS = (
    "-std=c11", "-O3", "-ffp-contract=off", "-fno-builtin", "-fno-math-errno", "-fno-stack-protector",
    "-fno-sanitize=all", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables",
    "-g0", "-fPIC", "-Wall", "-Wextra", "-Werror",
)  # fmt: skip
"""How C becomes code: IEEE operations as written, no call that the source does not make, no unwind tables,
for no exception passes through a kernel."""
SHARED = ("-shared", "-nostdlib", "-s", "-Wl,--build-id=none", "-Wl,--hash-style=gnu")
TIMEOUT_SECONDS = 300


@lru_cache(maxsize=1)
def compiler() -> Path:
    """The zig executable; BuildError without the package."""
    try:
        import ziglang
    except ImportError as error:
        raise BuildError(
            "C needs the package ziglang, which is not installed; pip install 'kernel-kiln[compiler]'"
        ) from error
    return Path(ziglang.__file__).parent / ("zig.exe" if os.name == "nt" else "zig")


@lru_cache(maxsize=1)
def private_folder() -> Path:
    """A folder of this process for the compiler's caches, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="kiln-cc-"))
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=1)
    return folder


def _environment() -> dict[str, str]:
    cache = private_folder() / "cache"
    folders = {
        "ZIG_GLOBAL_CACHE_DIR": str(cache / "global"),
        "ZIG_LOCAL_CACHE_DIR": str(cache / "local"),
        "HOME": str(cache),
    }
    return {"PATH": os.defpath, "LC_ALL": "C", "TMPDIR": str(private_folder()), **folders}


def run_compiler(
    source: str | Mapping[str, str], triple: str, cpu: str, *options: str, name: str = "kernel"
) -> bytes:
    """What the compiler makes of `source`, or of several files by name, with these options.

    Raises:
        BuildError: the compiler refused; the message has its first words.
    """
    with tempfile.TemporaryDirectory(prefix="job-", dir=private_folder()) as folder:
        files = {"kernel.c": source} if isinstance(source, str) else source
        for file, text in files.items():
            Path(folder, file).write_text(text, encoding="utf-8")
        command = [
            str(compiler()),
            "cc",
            "-target",
            triple,
            f"-mcpu={cpu}",
            *options,
            *sorted(f for f in files if f.endswith(".c")),
            "-o",
            "kernel.out",
        ]
        made = subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if made.returncode:
            raise BuildError(f"{name} for {triple} ({cpu}) does not compile: {made.stderr.strip()[:2000]}")
        return Path(folder, "kernel.out").read_bytes()


def shared_object(source: str, target: Target, tier: IsaTier, name: str) -> bytes:
    """The shared object of one ISA tier."""
    return run_compiler(source, target.triple, tier.cpu, *FLAGS, *SHARED, name=name)
