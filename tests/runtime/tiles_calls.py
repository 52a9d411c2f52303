"""A process of its own that calls a kernel for which Linux is asked: TREE LIBKILN|- deny|allow.

Prints, as JSON: whether the process had the permission after an exact call, why each candidate of a fast call
is passed over, whether that call gave the same, and whether the process has the permission at the end.
"""

import ctypes
import errno
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

_ARCH_PRCTL, _GET_PERM, _REQ_PERM, _TILE_DATA = 158, 0x1022, 0x1023, 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def permitted() -> bool:
    """Whether this process may use tiles."""
    mask = ctypes.c_uint64()
    assert _LIBC.syscall(_ARCH_PRCTL, _GET_PERM, ctypes.byref(mask)) == 0
    return bool(mask.value >> _TILE_DATA & 1)


def deny() -> None:
    """From now on Linux answers a request for tiles with EPERM, as a container's filter may."""
    load, equal, give = 0x20, 0x15, 0x06
    program = [
        (load, 0, 0, 0),
        (equal, 0, 3, _ARCH_PRCTL),
        (load, 0, 0, 16),
        (equal, 0, 1, _REQ_PERM),
        (give, 0, 0, 0x00050000 | errno.EPERM),
        (give, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(code))
    no_new_privileges, seccomp, mode_filter = 38, 22, 2
    assert _LIBC.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert _LIBC.prctl(seccomp, mode_filter, filters, 0, 0) == 0


def opened(root: Path, libkiln: str) -> Any:
    """The tree in the Python runtime, or in this build of libkiln."""
    if libkiln == "-":
        import kiln.runtime as kiln

        return kiln.load(root)
    from kiln.tests.runtime.c import libkiln as library

    return library.Library(library.opened(Path(libkiln)), root)


def main(root: str, libkiln: str, wish: str) -> None:
    """See the module."""
    if wish == "deny":
        deny()
    x = np.ones((2, 3), np.float32)
    with opened(Path(root), libkiln) as lib:
        op = lib.op("negate")
        exact = np.asarray(op(x)).tolist()
        early = permitted()
        told = op.explain(x, mode="fast")
        fast = np.asarray(op(x, mode="fast")).tolist()
    print(json.dumps({"early": early, "told": str(told), "same": fast == exact, "late": permitted()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
