"""Linux's permission to use the tiles of AMX.

Their state is large, so that Linux (5.16 and later) has each process ask before an instruction may touch it;
without, the first one ends the process with SIGILL. Threads and forked children inherit what was granted.
"""

import ctypes
import os
from collections.abc import Iterable
from functools import lru_cache

from kiln.runtime.targets import feature_key

FEATURE = "amx_tile"
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XTILE_DATA = 0x1023, 18


def needs_tiles(features: Iterable[str]) -> bool:
    """Whether a kernel that needs these features uses tiles."""
    return feature_key(FEATURE) in map(feature_key, features)


@lru_cache(maxsize=1)
def tiles_refusal() -> str | None:
    """Why this process may not use tiles; None if it may. Linux is asked once, when they are first needed.

    What was granted cannot be given back, and raises the least size of signal stacks: hence not before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    asked = (ctypes.c_long(n) for n in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILE_DATA))
    if libc.syscall(*asked) == 0:
        return None
    return f"Linux does not let this process use AMX tiles (arch_prctl: {os.strerror(ctypes.get_errno())})"
