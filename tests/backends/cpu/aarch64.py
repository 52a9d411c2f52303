"""Entries for aarch64 run under qemu-user: linked with a main program of no library, operands through stdin
and stdout."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kiln.backends.cpu.toolchain import FLAGS, run_compiler
from kiln.tests.backends.cpu.guarded import Array

QEMU = shutil.which("qemu-aarch64")
MISSING = "qemu-aarch64 (Debian's qemu-user) is not installed"
PROGRAM = """
static long call3(long number, long a, long b, long c)
{
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}
static _Alignas(64) char memory[16 << 20];
void _start(void);
void _start(void)
{
  const int64_t *head = (const int64_t *)memory;
  long size = 0;
  for (long got; (got = call3(63, 0, (long)(memory + size), (long)sizeof memory - size)) > 0;) size += got;
  const int64_t pointers = head[0], integers = head[1], begin = head[3], end = head[4];
  void *ptrs[16];
  for (int64_t i = 0; i < pointers; ++i) ptrs[i] = memory + head[5 + i];
  const int64_t *ints = head + 5 + pointers;
  *(int64_t *)memory = ENTRY(ptrs, ints, (const double *)(ints + integers), begin, end);
  for (long done = 0; done < size;) done += call3(64, 1, (long)(memory + done), size - done);
  call3(93, 0, 0, 0);
}
"""


@dataclass(frozen=True)
class Outcome:
    """Status and memory of each pointer after the call."""

    status: int
    memory: tuple[bytes, ...]


@cache
def program(source: str, entry: str, cpu: str) -> bytes:
    """The executable for one entry."""
    text = f"{source}\n#define ENTRY {entry}\n{PROGRAM}"
    options = ("-static", "-nostdlib", "-fno-pie", "-no-pie", "-s")
    flags = [f for f in FLAGS if f != "-fPIC"]
    return run_compiler(text, "aarch64-linux-musl", cpu, *flags, *options, name=entry)


def call(
    folder: Path,
    source: str,
    entry: str,
    arrays: Sequence[Array],
    ints: Sequence[int],
    floats: Sequence[float],
    rows: int,
) -> Outcome:
    """Call `entry` on copies of contiguous arrays for rows [0, rows)."""
    head = 8 * (5 + len(arrays) + len(ints) + len(floats))
    offsets, at = [], -(-head // 64) * 64
    for a in arrays:
        offsets.append(at)
        at = -(-(at + a.nbytes) // 64) * 64
    data = bytearray(at)
    struct.pack_into(
        f"<{5 + len(arrays) + len(ints)}q",
        data,
        0,
        len(arrays),
        len(ints),
        len(floats),
        0,
        rows,
        *offsets,
        *ints,
    )
    struct.pack_into(f"<{len(floats)}d", data, head - 8 * len(floats), *floats)
    for offset, a in zip(offsets, arrays, strict=True):
        data[offset : offset + a.nbytes] = a.tobytes()
    path = folder / "program"
    path.write_bytes(program(source, entry, "generic"))
    path.chmod(0o755)
    done = subprocess.run(
        [QEMU or "", "-cpu", "cortex-a76", str(path)],
        input=bytes(data),
        capture_output=True,
        timeout=60,
        check=True,
    )
    out = done.stdout
    parts = tuple(out[o : o + a.nbytes] for o, a in zip(offsets, arrays, strict=True))
    return Outcome(struct.unpack_from("<q", out)[0], parts)
