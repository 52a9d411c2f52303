"""Compile the extension of runtime/native for every machine: `make native`.

The modules are committed: who only runs kernels needs no compiler. The same sources give the same bytes
anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from kiln.backends.cpu.toolchain import FLAGS, SHARED, run_compiler
from kiln.compiler.errors import BuildError
from kiln.compiler.target import TARGETS

FOLDER = Path(__file__).resolve().parents[1] / "runtime" / "native"
MACHINES = {"x86_64": "cpu-x86_64", "aarch64": "cpu-aarch64"}
"""What `platform.machine()` says -> the target of its compiler."""


def sources() -> dict[str, str]:
    """Every file of the extension's source."""
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(FOLDER.glob("*.[ch]"))}


def compiled(machine: str, *options: str, files: Mapping[str, str] | None = None) -> bytes:
    """The extension for a machine. CPython's functions, and memcpy, are found in the process that loads it.

    Args:
        machine: as in MACHINES.
        options: more for the compiler.
        files: the source, by file name; that of the checkout by default.

    Raises:
        BuildError: the compiler is missing, or refused.
    """
    target = TARGETS[MACHINES[machine]]
    flags = (*FLAGS, *SHARED, "-fvisibility=hidden", *options)
    return run_compiler(files or sources(), target.triple, target.tiers[0].cpu, *flags, name="runtime/native")


def path(machine: str) -> Path:
    """Where the extension for a machine is."""
    return FOLDER / f"native-{machine}-linux-gnu.abi3.so"


def main() -> int:
    """Compile for every machine and say what has changed."""
    try:
        made = {machine: compiled(machine) for machine in MACHINES}
    except BuildError as e:
        print(f"native: {e}", file=sys.stderr)
        return 2
    for machine, data in made.items():
        file = path(machine)
        changed = not file.exists() or file.read_bytes() != data
        if changed:
            file.write_bytes(data)
        print(f"{file.name}: {len(data)} bytes{'' if changed else ', as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
