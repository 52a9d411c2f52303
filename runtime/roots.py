"""The roots of a library: trees that are searched in order, each verified and pinned on its own.

An op is served by the first root that holds it for the device; the same op of a later root is shadowed and
reported. A plan's steps stay in the root of the plan: a pack runs what it was tested with.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from kiln.runtime.device import Device, no_target
from kiln.runtime.entities import Index, Manifest
from kiln.runtime.errors import ContractError, IntegrityError, UnavailableError
from kiln.runtime.files import Folder, check_bytes
from kiln.runtime.manifest import parse_index, parse_manifest
from kiln.runtime.record import record
from kiln.runtime.schema import MAX_INDEX_BYTES
from kiln.runtime.signature import (
    SIGNATURE,
    SIGNATURE_BYTES,
    PublicKey,
    check_signature,
    fingerprint,
    public_key,
)

Root = str | os.PathLike[str]


@record
class OpenRoot:
    """A root whose index and manifests were verified.

    Attributes:
        folder: where artifacts are read from.
        digest: "sha256:…" of INDEX.json.
        generation: how often the tree was changed.
        signed_by: "ed25519:…" of the key that was asked for and has signed it; None if none was asked for.
        manifests: target -> manifest, the device's best target first; empty if there is nothing for it.
    """

    folder: Folder
    digest: str
    generation: int
    signed_by: str | None
    manifests: dict[str, Manifest]


@record
class RootInfo:
    """What a library has of one root.

    Attributes:
        path: its folder.
        digest: "sha256:…" of INDEX.json.
        generation: how often the tree was changed.
        signed_by: "ed25519:…" of the key it was checked with; None if no key was asked for.
        targets: the targets that the device may run, best first.
        ops: the ops it serves.
        shadowed: its ops that an earlier root serves instead.
    """

    path: str
    digest: str
    generation: int
    signed_by: str | None
    targets: tuple[str, ...]
    ops: tuple[str, ...]
    shadowed: tuple[str, ...]


def open_roots(
    root: Root | Sequence[Root] | None,
    device: Device,
    expect: str | Sequence[str | None] | None,
    minimum_generation: int | Sequence[int],
    key: PublicKey | Sequence[PublicKey | None] | None,
) -> list[OpenRoot]:
    """Open and verify roots in order. One `expect` is for one root; one key or minimum is for every root.

    Raises:
        UnavailableError: no such tree, or what signatures need is not installed.
        IntegrityError: an index, its signature or a manifest is not what it should be.
        TargetError: no root holds anything for the device.
        ContractError: no roots, or lists of different lengths.
    """
    roots = [root] if root is None or isinstance(root, str | os.PathLike) else list(root)
    if not roots:
        raise ContractError("found no roots, expected one or more folders of trees.")
    if isinstance(expect, str) and len(roots) > 1:
        raise ContractError(f"found one digest for {len(roots)} roots, expected one for each (or None).")
    pins = _each("expect", expect, str, roots)
    least = _each("minimum_generation", minimum_generation, int, roots)
    keys = [None if k is None else public_key(k) for k in _each("key", key, (bytes, str, os.PathLike), roots)]
    opened: list[OpenRoot] = []
    available: list[str] = []
    try:
        for place, pin, minimum, raw in zip(roots, pins, least, keys, strict=True):
            index, found = _open(place if place is not None else _installed(), device, pin, minimum, raw)
            opened.append(found)
            available += index.targets
        if not any(r.manifests for r in opened):
            raise no_target(device, set(available))
        return opened
    except BaseException:
        for r in opened:
            r.folder.close()
        raise


def _each(name: str, value: Any, one: Any, roots: Sequence[Any]) -> list[Any]:
    if value is None or isinstance(value, one):
        return [value] * len(roots)
    if isinstance(value, Sequence) and len(value) == len(roots):
        return list(value)
    raise ContractError(f"found {name}={value!r}, expected one value, or one for each of {len(roots)} roots.")


def _installed() -> str:
    spec = find_spec("kiln.aot_artifacts")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise UnavailableError("no artifacts are installed; pass the folder of a built tree as root.")
    return places[0]


def _open(
    place: Root, device: Device, expect: str | None, minimum_generation: int, key: bytes | None
) -> tuple[Index, OpenRoot]:
    folder = Folder.open_root(place)
    try:
        data = folder.read("INDEX.json", MAX_INDEX_BYTES)
        index = _read_index(folder, data, expect, minimum_generation, key)
        manifests = {t: _read_manifest(folder, t, index) for t in device.targets(index.targets)}
        import hashlib

        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        signed_by = None if key is None else fingerprint(key)
        return index, OpenRoot(folder, digest, index.generation, signed_by, manifests)
    except BaseException:
        folder.close()
        raise


def _read_index(
    folder: Folder, data: bytes, expect: str | None, minimum_generation: int, key: bytes | None
) -> Index:
    where = f"{folder.path}/INDEX.json"
    if expect is not None:
        algorithm, _, digest = expect.partition(":")
        if algorithm != "sha256" or len(digest) != 64:
            raise ContractError(f"found expect={expect!r}, expected sha256: and 64 hex digits.")
        check_bytes(data, len(data), digest.lower(), where)
    if key is not None:
        # Before anything of the document is looked at.
        check_signature(data, _read_signature(folder), key, where)
    index = parse_index(data, where)
    if index.generation < minimum_generation:
        raise IntegrityError(
            f"{where}: generation {index.generation}, expected at least {minimum_generation}; the "
            "tree was rolled back."
        )
    return index


def _read_signature(folder: Folder) -> bytes:
    if not os.path.lexists(f"{folder.path}/{SIGNATURE}"):
        raise IntegrityError(
            f"{folder.path}/{SIGNATURE}: missing; a key was given, expected a signed tree. Run kiln sign."
        )
    return folder.read(SIGNATURE, SIGNATURE_BYTES)


def _read_manifest(folder: Folder, target: str, index: Index) -> Manifest:
    entry = index.targets[target]
    with folder.folder(target) as inner:
        data = inner.read_exact("MANIFEST.json", entry.bytes, entry.sha256)
    return parse_manifest(data, target, f"{folder.path}/{entry.manifest}")
