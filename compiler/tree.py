"""The writer of artifact trees: deterministic, and atomic as seen by anyone who reads or is killed.

Everything that can fail (writing, syncing, running out of space) happens in staging folders beside the
targets. Then come renames only: each target folder is exchanged whole, INDEX.json is replaced last. A reader
in between finds that index and manifest disagree and refuses; a builder that is killed in between is undone
by the next one, because a staging folder keeps the old target until the new index stands.

A signature is of one index. A build that replaces the index takes its signature away, and says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kiln.compiler.alike import brief, whole
from kiln.compiler.errors import BuildError, OutputError
from kiln.compiler.exchange import exchange, hold_lock
from kiln.runtime import strictjson
from kiln.runtime.errors import IntegrityError, KilnError
from kiln.runtime.files import Folder, check_bytes
from kiln.runtime.manifest import (
    INDEX_SCHEMA,
    Manifest,
    canonical_json,
    dump,
    parse_index,
    parse_manifest,
    read_manifest,
)
from kiln.runtime.schema import MAX_MANIFEST_BYTES
from kiln.runtime.signature import SIGNATURE
from kiln.runtime.verify import EVIDENCE, EVIDENCE_LEVELS, INDEX, MANIFEST, MAX_INDEX_BYTES, STAGING

MAX_EVIDENCE_BYTES = 64 << 20
_IGNORED = ("__init__.py", "py.typed", "__pycache__")


@dataclass(frozen=True)
class TargetContent:
    """What a target's folder is to hold: its manifest as a JSON value, and every file that the manifest
    names."""

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]

    @cached_property
    def text(self) -> bytes:
        """MANIFEST.json."""
        return strictjson.tabular({**self.manifest, "kernels": brief(self.manifest["kernels"])})

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """sha256 of each file, in hex: taken once, checked before and while writing."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


@dataclass(frozen=True)
class Written:
    """What a write did."""

    root_digest: str
    """"sha256:…" of INDEX.json, which a loader can pin."""
    generation: int
    changed: tuple[str, ...]
    """Targets whose folders were replaced."""
    signature_removed: bool = False
    """Whether the tree was signed before and is not any more."""


@dataclass(frozen=True)
class _Staged:
    """A target that is ready beside its place."""

    target: str
    staging: Path
    entry: dict[str, Any]


def claim_output(out: str | os.PathLike[str], sources: Iterable[Path] = ()) -> Path:
    """The resolved output folder, made if it is missing.

    Raises OutputError if it lies in, is or holds one of the source folders, or exists and is no tree of
    Kiln's.
    """
    try:
        path = Path(out).resolve()
    except (OSError, RuntimeError) as e:
        raise OutputError(f"{os.fspath(out)}: {e}; give another output folder") from e
    for source in (s.resolve() for s in sources):
        if path == source or path.is_relative_to(source) or source.is_relative_to(path):
            raise OutputError(
                f"the output folder {path} and the source folder {source} overlap; give another one"
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
        fault = _foreign(path)
    except OSError as e:
        raise OutputError(f"{path}: {e.strerror}; give a folder that can be written") from e
    if fault:
        raise OutputError(
            f"{path} exists and is not a tree of Kiln's: {fault}. Remove it or give another folder"
        )
    return path


def _foreign(path: Path) -> str | None:
    """Why an existing folder is not ours, or None."""
    names = sorted(
        e.name for e in os.scandir(path) if e.name not in _IGNORED and not e.name.startswith(STAGING)
    )
    if INDEX in names:
        try:
            read_index(path)
        except KilnError as e:
            return str(e)
        return None
    # Without an index only what a first build can leave behind when it is killed is ours.
    for name in names:
        try:
            with Folder.open_root(path) as root, root.folder(name) as folder:
                parse_manifest(folder.read(MANIFEST, strictjson.MAX_BYTES), name)
        except KilnError:
            return f"it holds {name!r} and no {INDEX}"
    return None


def read_index(out: Path) -> dict[str, Any] | None:
    """INDEX.json as a JSON value, None if there is none.

    Raises KilnError if it can't be trusted to be one.
    """
    if not os.path.lexists(out / INDEX):
        return None
    with Folder.open_root(out) as root:
        return dict(dump(parse_index(root.read(INDEX, MAX_INDEX_BYTES))))


@contextlib.contextmanager
def locked(out: Path, timeout: float = 600.0) -> Iterator[None]:
    """Hold the tree's lock (of this machine, on the folder that holds the tree, so that no lock file is
    needed).

    Leftovers of killed builders are removed first, what they had half committed is undone. Raises OutputError
    if another builder holds it for `timeout` seconds.
    """
    with hold_lock(out.parent, timeout):
        recover(out)
        yield


def recover(out: Path) -> None:
    """Undo what a killed builder had half committed, and remove its staging folders. The caller holds the
    lock.

    Raises OutputError if that is not possible.
    """
    try:
        index = read_index(out)
        leftovers = sorted(p for p in out.iterdir() if p.name.startswith(STAGING))
        for leftover in leftovers:
            if leftover.name.startswith(_ASIDE):
                _put_signature_back(out, leftover)
            else:
                _put_back(out, leftover, index)
        for leftover in leftovers:
            _remove(leftover)
    except OSError as e:
        raise OutputError(
            f"{out}: {e.strerror} while removing what a killed build left; give a writable folder"
        ) from e


def _put_back(out: Path, leftover: Path, index: Mapping[str, Any] | None) -> None:
    """If the leftover is the folder that the index means, exchange it with what stands in its place."""
    target = leftover.name.removeprefix(STAGING).rpartition(".")[0]
    entry = (index or {"targets": {}})["targets"].get(target)
    if entry is None or _digest(out / target / MANIFEST) == entry["sha256"]:
        return
    if _digest(leftover / MANIFEST) == entry["sha256"]:
        swap_in(leftover, out / target)


def _digest(path: Path) -> str | None:
    try:
        with Folder.open_root(path.parent) as folder:
            return hashlib.sha256(folder.read(path.name, strictjson.MAX_BYTES)).hexdigest()
    except KilnError:
        return None


_ASIDE = f"{STAGING}{SIGNATURE}."
"""How a signature is named while its index is replaced: this, then the digest of what it signs."""


def _put_signature_aside(out: Path) -> Path | None:
    if not os.path.lexists(out / SIGNATURE):
        return None
    aside = out / f"{_ASIDE}{_digest(out / INDEX)}"
    (out / SIGNATURE).replace(aside)
    return aside


def _put_signature_back(out: Path, aside: Path) -> None:
    """If what it signs still stands."""
    if os.path.lexists(aside) and aside.name.removeprefix(_ASIDE) == _digest(out / INDEX):
        aside.replace(out / SIGNATURE)


def write_signature(out: Path, signature: bytes) -> None:
    """Put a signature beside the index it is of, as a whole or not at all. The caller holds the lock.

    Raises BuildError for errors of the system.
    """
    staging = out / f"{STAGING}{SIGNATURE}-{os.getpid()}"
    try:
        _write_file(staging, signature)
        staging.replace(out / SIGNATURE)
        sync_folder(out)
    except OSError as e:
        raise BuildError(f"{out}: {e.strerror or e} while writing {SIGNATURE}; nothing was signed") from e
    finally:
        staging.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_tree(out: Path, contents: Mapping[str, TargetContent]) -> Written:
    """Replace the folders of these targets and the index; other targets stay. The caller holds the lock.

    A folder that already holds these bytes is left alone. The generation goes up by one if any manifest
    changed, and is 1 in a fresh tree. On any error the tree on disk is what it was; BuildError is raised for
    those of the system.
    """
    old = read_index(out)
    for target, content in contents.items():
        check_content(target, content)
    staged: list[_Staged] = []
    index_path = out / f"{STAGING}{INDEX}.{os.getpid()}"
    aside = None
    try:
        for target, content in sorted(contents.items()):
            if not holds(out, target, content):
                staged.append(_stage(out, target, content))
        index = _next_index(old, contents)
        data = canonical_json(index)
        if index != old:
            _write_file(index_path, data)
        for item in staged:
            swap_in(item.staging, out / item.target)
        if index != old:
            aside = _put_signature_aside(out)
            index_path.replace(out / INDEX)
        sync_folder(out)
    except OSError as e:
        raise BuildError(
            f"{out}: {e.strerror or e} while writing; the tree is as it was before this build"
        ) from e
    finally:
        _settle(out, staged, index_path, aside)
    changed = tuple(item.target for item in staged)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Written(digest, index["generation"], changed, aside is not None)


def _settle(out: Path, staged: list[_Staged], index_path: Path, aside: Path | None) -> None:
    """Make the folders agree with the index that stands, whichever it is by now, and remove the others.

    What stands on disk decides, so that an interruption at any place is settled right.
    """
    try:
        targets = (read_index(out) or {"targets": {}})["targets"]
        for item in staged:
            place = out / item.target
            if item.target in targets:
                _put_back(out, item.staging, {"targets": targets})
            elif not item.staging.exists() and _digest(place / MANIFEST) == item.entry["sha256"]:
                place.rename(item.staging)
        for item in staged:
            _remove(item.staging)
        if aside is not None:
            _put_signature_back(out, aside)
            aside.unlink(missing_ok=True)
        index_path.unlink(missing_ok=True)
    except OSError as e:
        raise BuildError(
            f"{out}: {e.strerror or e} while cleaning up; run the build again, which does it first"
        ) from e


class Parsed(NamedTuple):
    """A manifest, and the JSON value that it was read from, its kernels written out."""

    manifest: Manifest
    value: Mapping[str, Any]


@lru_cache(maxsize=32)
def parsed(data: bytes, target: str) -> Parsed:
    """A manifest, parsed once: a build that changes nothing meets the same bytes three times."""
    what = f"the manifest made for {target}"
    value = strictjson.parse(data, what, MAX_MANIFEST_BYTES)
    return Parsed(read_manifest(value, target, what), {**value, "kernels": whole(value["kernels"])})


def check_content(target: str, content: TargetContent) -> None:
    """Raises BuildError unless the manifest is sound and names exactly these files with these digests."""
    try:
        manifest = parsed(content.text, target).manifest
        named = manifest.files()
        if named.keys() != content.files.keys():
            odd = sorted(named.keys() ^ content.files.keys())
            raise BuildError(f"the manifest made for {target} and its files differ in {', '.join(odd[:8])}")
        for name, data in content.files.items():
            wanted = named[name]
            if (len(data), content.digests[name]) != (wanted.bytes, wanted.sha256):
                check_bytes(data, wanted.bytes, wanted.sha256, f"{target}/{name}, as made,")  # it raises
    except (IntegrityError, ValueError) as e:
        raise BuildError(str(e)) from e


def _next_index(old: Mapping[str, Any] | None, contents: Mapping[str, TargetContent]) -> dict[str, Any]:
    entries = {t: _index_entry(t, c.text) for t, c in contents.items()}
    if old is None:
        return {"schema": INDEX_SCHEMA, "generation": 1, "targets": entries}
    targets = {**old["targets"], **entries}
    generation = old["generation"] + (targets != old["targets"])
    return {"schema": INDEX_SCHEMA, "generation": generation, "targets": targets}


def _index_entry(target: str, manifest: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(manifest).hexdigest()
    return {"manifest": f"{target}/{MANIFEST}", "bytes": len(manifest), "sha256": digest}


def holds(out: Path, target: str, content: TargetContent) -> bool:
    """Whether the target's folder holds exactly this content (and evidence, perhaps)."""
    expected = {MANIFEST: content.text, **content.files}
    try:
        with Folder.open_root(out / target) as folder:
            if not set(expected) <= set(os.listdir(folder.path)) <= {*expected, EVIDENCE}:
                return False
            return all(folder.read(name, len(data)) == data for name, data in expected.items())
    except KilnError:
        return False


def _stage(out: Path, target: str, content: TargetContent) -> _Staged:
    """Write a target's folder beside its place, synced; the manifest last."""
    staging = Path(tempfile.mkdtemp(prefix=f"{STAGING}{target}.", dir=out))
    try:
        staging.chmod(0o755)
        manifest = content.text
        for name, data in sorted(content.files.items()):
            _write_file(staging / name, data)
        evidence = _surviving_evidence(out / target / EVIDENCE, content.manifest)
        if evidence is not None:
            _write_file(staging / EVIDENCE, evidence)
        _write_file(staging / MANIFEST, manifest)
        sync_folder(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return _Staged(target, staging, _index_entry(target, manifest))


def _surviving_evidence(path: Path, manifest: Mapping[str, Any]) -> bytes | None:
    """The evidence of the old folder whose artifacts are in the new one; a changed digest voids its
    evidence."""
    if not os.path.lexists(path):
        return None
    try:
        with Folder.open_root(path.parent) as folder:
            value = strictjson.parse(folder.read(EVIDENCE, MAX_EVIDENCE_BYTES), str(path), MAX_EVIDENCE_BYTES)
        artifacts = dict(value["artifacts"])
    except (KilnError, KeyError, TypeError, ValueError) as e:
        raise BuildError(f"{path} can't be carried over: {e}. Restore it or remove it") from e
    digests = {kernel["sha256"] for kernel in manifest["kernels"]}
    kept = {digest: proof for digest, proof in artifacts.items() if digest in digests}
    return strictjson.tabular({**value, "artifacts": kept}, EVIDENCE_LEVELS) if kept else None


def _write_file(path: Path, data: bytes) -> None:
    """A new file, synced; every error of write, sync and close is raised."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o644)
    try:
        os.fchmod(fd, 0o644)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def swap_in(staging: Path, place: Path) -> None:
    """Put a folder in its place; what stood there, if anything, takes its name."""
    if os.path.lexists(place):
        exchange(staging, place)
    else:
        staging.rename(place)
