"""Verification of a whole tree, without a compiler or a device: integrity of every file, and every launch
proof."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kiln.runtime.errors import IntegrityError, UnavailableError
from kiln.runtime.files import Folder, check_bytes
from kiln.runtime.manifest import (
    Index,
    Kernel,
    Manifest,
    canonical_json,
    dump,
    parse_index,
    parse_manifest,
)
from kiln.runtime.proof import prove_kernel, read_artifact
from kiln.runtime.signature import SIGNATURE, SIGNATURE_BYTES, PublicKey, check_signature, public_key

INDEX, MANIFEST, EVIDENCE = "INDEX.json", "MANIFEST.json", "EVIDENCE.json"
MAX_INDEX_BYTES = 1 << 20
EVIDENCE_LEVELS = 2
"""Of tables in the other tables of EVIDENCE.json, for `strictjson.tabular`."""

STAGING = ".staging-"
"""How the names of a builder's folders start; a killed build may leave one, and the next build removes it."""

_BYTECODE = "__pycache__"
_PACKAGE_MARKS = ("__init__.py", "py.typed")


Kind = Literal["bytes", "missing", "extra", "proof"]
"""What a fault is about: a file's bytes (or its being no plain file), its absence, its presence, its launch
proof."""


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that is wrong with a tree."""

    file: str
    """Relative to the tree; `.` is the tree itself."""
    why: str
    kind: Kind = "bytes"


def verify_tree(
    root: str | os.PathLike[str], expect: str | None = None, key: PublicKey | None = None
) -> list[Fault]:
    """Every fault of the tree at `root`, sorted; none means that it is intact and that every launch is
    proved.

    A digest in a file proves nothing about who wrote it: give `expect` ("sha256:…" of INDEX.json, as `kiln
    build` prints it) to know that the tree is the one that was built, or the public `key` whose owner must
    have signed it. Without a key a signature is only known to be one by its size.

    Raises:
        UnavailableError: there is no such folder, or it can't be read, or signatures can't be checked here.
        ContractError: `key` is no Ed25519 public key.
    """
    raw = None if key is None else public_key(key)
    with Folder.open_root(root) as folder:
        try:
            data = folder.read(INDEX, MAX_INDEX_BYTES)
            if expect is not None:
                check_bytes(data, len(data), expect.removeprefix("sha256:"), INDEX)
            index = parse_index(data)
        except IntegrityError as e:
            return [Fault(INDEX, str(e))]
        faults = [*_root_faults(Path(root), index), *_signature_faults(folder, data, raw)]
        if canonical_json(dump(index)) != data:
            faults.append(Fault(INDEX, "The document isn't in canonical form; build the tree again."))
        for target in index.targets:
            faults += verify_target(folder, target, index)
    return sorted(set(faults))


def _root_faults(root: Path, index: Index) -> Iterator[Fault]:
    for entry in _entries(root):
        if entry.name in (INDEX, SIGNATURE) or entry.name in index.targets:
            continue
        if entry.name == _BYTECODE and entry.is_dir(follow_symlinks=False):
            continue
        if entry.name in _PACKAGE_MARKS and _is_empty_file(entry):
            continue
        if entry.name.startswith(STAGING):
            yield Fault(
                entry.name, "This was left by a build that runs or was killed; the next build removes it."
            )
        else:
            yield Fault(_shown(entry.name), "Not accounted for by INDEX.json; remove it.", "extra")


def _signature_faults(folder: Folder, data: bytes, key: bytes | None) -> Iterator[Fault]:
    there = os.path.lexists(f"{folder.path}/{SIGNATURE}")
    if not there and key is not None:
        yield Fault(SIGNATURE, "Missing; a key was given, expected a signed tree. Run kiln sign.", "missing")
    if not there:
        return
    try:
        signature = folder.read(SIGNATURE, SIGNATURE_BYTES)
        if key is not None:
            check_signature(data, signature, key, f"{folder.path}/{INDEX}")
        elif len(signature) != SIGNATURE_BYTES:
            yield Fault(SIGNATURE, f"Found {len(signature)} bytes, expected {SIGNATURE_BYTES}; sign it.")
    except IntegrityError as e:
        yield Fault(SIGNATURE, str(e))


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as e:
        raise UnavailableError(
            f"{os.fspath(folder)!r}: {e.strerror}; expected a folder that can be listed."
        ) from None


def _is_empty_file(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _shown(name: str) -> str:
    """A file name as it can be printed and put into JSON."""
    return ascii(name)[1:-1] if not name.isascii() or not name.isprintable() else name


def verify_target(
    root: Folder, target: str, index: Index, parse: Callable[[bytes, str], Manifest] = parse_manifest
) -> Iterator[Fault]:
    """The faults of one target of a tree whose index was read; `parse` reads its manifest."""
    entry = index.targets[target]
    try:
        folder = root.folder(target)
    except IntegrityError as e:
        yield Fault(target, str(e), _kind(root, target))
        return
    with folder:
        try:
            data = folder.read_exact(MANIFEST, entry.bytes, entry.sha256)
            manifest = parse(data, target)
        except IntegrityError as e:
            yield Fault(f"{target}/{MANIFEST}", str(e), _kind(folder, MANIFEST))
            return
        yield from _extra_faults(folder, target, manifest)
        yield from _file_faults(folder, manifest)


def _kind(folder: Folder, name: str) -> Kind:
    return "bytes" if os.path.lexists(f"{folder.path}/{name}") else "missing"


def _extra_faults(folder: Folder, target: str, manifest: Manifest) -> Iterator[Fault]:
    known = {MANIFEST, EVIDENCE, *manifest.files()}
    for entry in _entries(folder.path):
        if entry.name not in known:
            yield Fault(
                f"{target}/{_shown(entry.name)}", "Not accounted for by the manifest; remove it.", "extra"
            )
        elif entry.name == EVIDENCE and not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            yield Fault(f"{target}/{EVIDENCE}", "Not a regular file; expected one, or none.")


def _file_faults(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    kernels = _by_file(manifest)
    for name, source in sorted(manifest.files().items()):
        where = f"{manifest.target}/{name}"
        try:
            data = folder.read_exact(name, source.bytes, source.sha256)
            if name in kernels:
                artifact = read_artifact(manifest.target, data)
                for kernel in kernels[name]:
                    for fault in prove_kernel(kernel, manifest.target, artifact):
                        yield Fault(where, fault, "proof")
        except IntegrityError as e:
            yield Fault(where, str(e), _kind(folder, name))


def _by_file(manifest: Manifest) -> Mapping[str, list[Kernel]]:
    out: dict[str, list[Kernel]] = {}
    for kernel in manifest.kernels:
        out.setdefault(kernel.file, []).append(kernel)
    return out
