"""Results of a build that has not written its tree yet: kept beside the tree until it has, so that a build
that failed, was interrupted or was killed is gone on with.

A result is found by its job's whole identity, inputs digest included, and proved anew before it is used, as
one of the tree's is. An entry that is torn, altered or another job's counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from kiln.compiler.backend import Built, Job
from kiln.runtime.errors import KilnError
from kiln.runtime.files import Folder

MAX_BYTES = 1 << 30
"""Of one entry."""


class Kept:
    """The folder `.NAME.unfinished` beside the tree NAME. The caller holds the tree's lock.

    Failing to keep fails no build: `why` says what the system answered, and nothing more is kept.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f".{out.name}.unfinished")
        self.why = self._unsafe()

    def _unsafe(self) -> str:
        """Why what lies there can't be trusted or used, or "". Whoever can write there chooses what a tree is
        made of."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return ""
        except OSError as e:
            return f"{self.path}: {e.strerror}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{self.path} is no folder; remove it"
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return f"{self.path} can be written by another user; remove it"
        return ""

    def _made_unsafe(self) -> str:
        """Make the folder, unless it is there; why it can't be used, or ""."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as e:
            return f"{self.path}: {e.strerror or e}"
        return self._unsafe()  # jobs take minutes, in which another user may have made it

    def get(self, job: Job) -> Built | None:
        """What the job gave in an earlier build; None if nothing sound is there."""
        if self.why or self._unsafe():
            return None
        try:
            with Folder.open_root(self.path) as folder:
                return _unpacked(job, folder.read(_name(job), MAX_BYTES))
        except (KilnError, ValueError, KeyError, TypeError):
            return None

    def keep(self, job: Job, built: Built) -> None:
        """Keep the result of a job; not synced, as an entry that is torn counts as none."""
        self.why = self.why or self._made_unsafe()
        if self.why:
            return
        place = self.path / _name(job)
        staging = place.with_name(f"{place.name}~")
        try:
            staging.write_bytes(_packed(job, built))
            staging.replace(place)
        except OSError as e:
            self.why = f"{self.path}: {e.strerror or e}"
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)

    def settle(self, target: str, ops: Iterable[str] | None, wanted: Iterable[Job]) -> None:
        """Of a target's ops (None: all) keep only what these jobs gave. The folder goes when it is empty."""
        if self.why or not self.path.exists() or self._unsafe():
            return
        mine, names = None if ops is None else frozenset(ops), set(map(_name, wanted))
        with contextlib.suppress(OSError):  # the next build settles it
            for entry in self.path.iterdir():
                of_target, _, rest = entry.name.partition(".")
                is_ours = of_target == target and (mine is None or rest.partition(".")[0] in mine)
                if is_ours and entry.name not in names:
                    entry.unlink()
            self.path.rmdir()


def _identity(job: Job) -> list[str]:
    return [job.target, job.op, job.variant, job.inputs_digest, job.runner]


def _name(job: Job) -> str:
    """One file name a job; target and op first, for `settle`."""
    digest = hashlib.sha256(json.dumps(_identity(job)).encode()).hexdigest()
    return f"{job.target}.{job.op}.{digest}"


def _packed(job: Job, built: Built) -> bytes:
    """A line with the digest of the rest, a line of JSON, then the bytes of the files one after another."""
    header = {
        "job": _identity(job),
        "kernels": built.kernels,
        "files": {name: len(data) for name, data in built.files.items()},
        "sources": {name: len(data) for name, data in built.sources.items()},
    }
    parts = [json.dumps(header).encode(), b"\n", *built.files.values(), *built.sources.values()]
    body = b"".join(parts)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpacked(job: Job, data: bytes) -> Built | None:
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    text, _, rest = body.partition(b"\n")
    header = json.loads(text)
    if header["job"] != _identity(job):
        return None
    files, rest = _cut(header["files"], rest)
    sources, rest = _cut(header["sources"], rest)
    return None if rest else Built(tuple(header["kernels"]), files, sources)


def _cut(sizes: Mapping[str, int], data: bytes) -> tuple[dict[str, bytes], bytes]:
    """Files of these sizes from the front of `data`, and what is left of it."""
    out = {}
    for name, size in sizes.items():
        out[name], data = data[:size], data[size:]
    return out, data
