"""Two system services of the tree writer: exchanging two folders in one step, and a lock between builders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kiln.compiler.errors import OutputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_WAIT_S = 0.05


def exchange(a: Path, b: Path) -> None:
    """Make each of two existing paths of one file system name what the other named.

    In one step where the system can (renameat2 of Linux 3.15); else in three renames through a name of `a`'s
    kind, so that whoever dies between them leaves something that is found again. Raises OSError.
    """
    if not _exchange_at_once(a, b):
        aside = a.with_name(a.name + "~")
        b.rename(aside)
        try:
            a.rename(b)
        except OSError:
            aside.rename(b)
            raise
        aside.rename(a)


def _exchange_at_once(a: Path, b: Path) -> bool:
    """False if the system or the file system has no such call."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


@contextlib.contextmanager
def hold_lock(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the exclusive lock of a folder, which ends with the process whatever happens to it.

    Raises OutputError if it can't be had within `timeout` seconds.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise OutputError(f"{folder}: {e.strerror}; give an output folder whose parent can be opened") from e
    try:
        until = time.monotonic() + timeout
        while not _try_lock(fd, folder):
            if time.monotonic() >= until:
                holder = _holder(fd)
                who = f" (process {holder})" if holder else ""
                raise OutputError(
                    f"another build{who} has held {folder} for {timeout:g} s; wait for it or end it"
                )
            time.sleep(_WAIT_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int, folder: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise OutputError(
            f"{folder}: {e.strerror} while locking; give an output folder on a local disk"
        ) from e
    return True


def _holder(fd: int) -> int | None:
    """The process that holds the lock, as far as the system tells."""
    inode = os.fstat(fd).st_ino
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as table:
            for line in table:
                words = line.split()
                if words[1:2] == ["FLOCK"] and words[5].endswith(f":{inode}"):
                    return int(words[4])
    except (OSError, ValueError, IndexError):
        return None
    return None
