"""Whether a build would come to the tree that stands: known from everything that a build reads, without doing
it.

A build is a function of its inputs: Kiln's source files, the installed packages, the interpreter, and what
was asked for. A stamp beside the tree says which inputs a build had and which index it left. Where both are
the same again, and the tree holds what that index says, byte for byte, a build would find nothing to do: its
kernels were proved by this very code. Nothing goes by a file's time.

Whoever can write the stamp can have a build say that all is well, so that one which another user may write
is not read; its owner could change the sources as well. `kiln check` never looks at it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kiln.compiler.alike import whole
from kiln.compiler.kept import Kept
from kiln.compiler.report import BuildReport, KernelReport
from kiln.compiler.tree import locked
from kiln.runtime.errors import KilnError
from kiln.runtime.files import Folder
from kiln.runtime.like import STORED
from kiln.runtime.manifest import IndexEntry, parse_index
from kiln.runtime.verify import EVIDENCE, INDEX, MANIFEST, MAX_INDEX_BYTES

MAX_BYTES = 1 << 20
_INSTALLED = (".dist-info", ".egg-info")


def inputs_key(folders: Iterable[Path], asked: object) -> str:
    """sha256 over everything that a build reads: each file of the source folders, by name and content; the
    installed packages with their versions; the interpreter; and what is asked for, a JSON value."""
    files = {f"{folder.name}/{name}": _sha256(folder / name) for folder in folders for name in _files(folder)}
    interpreter = [sys.version, sys.implementation.cache_tag, platform.machine()]
    parts = json.dumps([asked, interpreter, sorted(_installed()), sorted(files.items())])
    return hashlib.sha256(parts.encode()).hexdigest()


def _files(folder: Path) -> Iterator[str]:
    """Paths below the folder of all its files but compiled modules."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in names)


def _sha256(path: Path) -> str:
    """Of a file's content; a word for what has none, such as the link by which an editor locks a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"


def _installed() -> Iterator[str]:
    """name-version of every installed distribution."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            yield from (name for name in os.listdir(folder or ".") if name.endswith(_INSTALLED))


def stamp_of(out: Path) -> Path:
    """Where the stamp of a tree lies."""
    return out.parent / f".{out.name}.stamp"


def leave_stamp(key: str, report: BuildReport) -> None:
    """Note that a build of these inputs left the tree of the report; failing to is no fault."""
    place = stamp_of(report.out)
    targets = sorted({k.target for k in report.kernels})
    text = json.dumps(
        {"inputs": key, "root": report.root_digest, "targets": targets, "unserved": report.unserved}
    )
    with contextlib.suppress(OSError):
        fd, staging = tempfile.mkstemp(".stamp", f".{report.out.name}.", place.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(staging, place)
        except BaseException:
            os.unlink(staging)
            raise


def standing(out: str | os.PathLike[str], key: str) -> BuildReport | None:
    """What a build of these inputs reports of the tree that stands; None where it has to run.

    Raises OutputError if another build holds the tree.
    """
    try:
        path = Path(out).resolve()
    except (OSError, RuntimeError, ValueError):
        return None  # the build says what is wrong with it
    noted = _read_stamp(stamp_of(path))
    if noted.get("inputs") != key or not path.is_dir():
        return None
    with locked(path):
        try:
            return None if os.path.lexists(Kept(path).path) else _intact(path, noted)
        except (KilnError, KeyError, TypeError):
            return None


def _read_stamp(place: Path) -> dict[str, Any]:
    """What the stamp says; nothing where there is none that is sound and the user's own."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            mine = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if not mine or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return {}
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _intact(out: Path, noted: Mapping[str, Any]) -> BuildReport | None:
    """The report of the tree that the stamp is of; None unless its targets hold all of their files, and no
    others."""
    with Folder.open_root(out) as root:
        data = root.read(INDEX, MAX_INDEX_BYTES)
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != noted["root"]:
            return None
        index = parse_index(data)
        kernels: list[KernelReport] = []
        for target in noted["targets"]:
            found = _kernels(root, target, index.targets[target])
            if found is None:
                return None
            kernels += found
    return BuildReport(
        out, noted["root"], index.generation, tuple(kernels), changed=(), unserved=tuple(noted["unserved"])
    )


def _kernels(root: Folder, target: str, entry: IndexEntry) -> list[KernelReport] | None:
    """The kernels of a target; None if its folder holds other files than they and their sources.

    Raises KilnError for a file that is missing or not what the index, or the manifest, says.
    """
    with root.folder(target) as folder:
        # The digest says that this is the manifest which a build wrote, so that its form needs no look.
        manifest = json.loads(folder.read_exact(MANIFEST, entry.bytes, entry.sha256))
        kernels = whole(manifest["kernels"])
        files = {k.get(STORED, k["file"]): k for k in kernels} | manifest["sources"]
        if not {MANIFEST, *files} <= set(os.listdir(folder.path)) <= {MANIFEST, EVIDENCE, *files}:
            return None
        for name, promised in files.items():
            folder.read_exact(name, promised["bytes"], promised["sha256"])
    own = ({name: value for name, value in k.items() if name != STORED} for k in kernels)
    return [KernelReport(target, k["op"], k["variant"], "reused", 0.0, k) for k in own]
