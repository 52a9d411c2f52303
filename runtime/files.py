"""Reading a tree without trusting it: no link is followed, nothing but a regular file is opened, bytes are
read once.

What is returned is what was hashed; no path is opened twice.
"""

import errno
import os
import stat

from kiln.runtime.errors import IntegrityError, UnavailableError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)


class Folder:
    """An open folder of a tree: every read goes through its descriptor, so that a later rename cannot
    redirect it.

    Only `open_root` resolves links: the root is the caller's own choice.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    def open_root(cls, path: str | os.PathLike[str]) -> "Folder":
        """The root of a tree.

        Raises:
            UnavailableError: no such folder, or not readable.
        """
        name = os.fspath(path)
        try:
            return cls(os.open(name, _FOLDER), os.path.abspath(name))
        except (OSError, ValueError) as e:
            why = _reason(e)
            raise UnavailableError(
                f"{name!r}: {why}; expected the folder of a built tree. Run kiln build, or pass its path."
            ) from None

    def folder(self, name: str) -> "Folder":
        """A folder directly inside this one.

        Raises:
            IntegrityError: missing, a link, or no folder.
        """
        try:
            return Folder(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd), f"{self.path}/{name}")
        except (OSError, ValueError) as e:
            raise IntegrityError(
                f"{self.path}/{name}: {_reason(e)}; expected a folder that is no link. Rebuild the tree."
            ) from None

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a regular file of at most `most` bytes directly inside this folder.

        Raises:
            IntegrityError: missing, a link, not a regular file, not readable or too big.
        """
        where = f"{self.path}/{name}"
        try:
            fd = os.open(name, _FILE, dir_fd=self._fd)
        except (OSError, ValueError) as e:
            raise IntegrityError(
                f"{where}: {_reason(e)}; expected a regular file. Rebuild the tree."
            ) from None
        try:
            return _read_all(fd, where, most)
        finally:
            os.close(fd)

    def read_exact(self, name: str, size: int, sha256: str) -> bytes:
        """The bytes of a file that must have this size and this SHA-256.

        Raises:
            IntegrityError: as for `read`, or other bytes than promised.
        """
        data = self.read(name, size)
        check_bytes(data, size, sha256, f"{self.path}/{name}")
        return data

    def close(self) -> None:
        """Give the descriptor back; closing twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_bytes(data: bytes, size: int, sha256: str, where: str) -> None:
    """Refuse bytes that are not those a manifest promised.

    Raises:
        IntegrityError: another size or another SHA-256.
    """
    if len(data) != size:
        raise IntegrityError(
            f"{where}: found {len(data)} bytes, expected {size}. Rebuild or restore the tree."
        )
    import hashlib

    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise IntegrityError(
            f"{where}: found sha256 {found}, expected {sha256}. Rebuild or restore the tree."
        )


def _read_all(fd: int, where: str, most: int) -> bytes:
    try:
        return _read_regular(fd, where, most)
    except OSError as e:
        raise IntegrityError(f"{where}: {_reason(e)} while reading. Restore the tree.") from None


def _read_regular(fd: int, where: str, most: int) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise IntegrityError(f"{where}: not a regular file; expected one. Rebuild the tree.")
    if status.st_size > most:
        raise IntegrityError(
            f"{where}: found {status.st_size} bytes, expected at most {most}. Rebuild the tree."
        )
    parts, total = [], 0
    while total <= most and (part := os.read(fd, min(1 << 20, most + 1 - total))):
        parts.append(part)
        total += len(part)
    if total > most:
        raise IntegrityError(
            f"{where}: found more than {most} bytes, expected at most that. Rebuild the tree."
        )
    return b"".join(parts)


_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "missing",
    PermissionError: "not readable by this user",
    NotADirectoryError: "no folder",
    IsADirectoryError: "a folder",
}


def _reason(e: Exception) -> str:
    if type(e) in _REASONS:
        return _REASONS[type(e)]
    if isinstance(e, OSError) and e.errno == errno.ELOOP:
        return "a symbolic link"
    return e.strerror or str(e) if isinstance(e, OSError) else str(e)
