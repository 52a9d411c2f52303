"""EVIDENCE.json: what has been proved of a target's artifacts, by artifact digest.

Entries are written by the commands that made the observation, and read by `matrix` and `diff`. A digest
that the manifest doesn't hold is dropped when reading and when writing: changed bytes void what was proved
of the old ones.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kiln.runtime.errors import SchemaError
from kiln.runtime.fields import (
    Mismatch,
    Reader,
    array,
    boolean,
    choice,
    integer,
    mapping,
    nullable,
    number,
    read,
    record,
    text,
)
from kiln.runtime.files import Folder
from kiln.runtime.strictjson import MAX_BYTES, parse, tabular
from kiln.runtime.verify import EVIDENCE_LEVELS, STAGING

NAME = "EVIDENCE.json"
SCHEMA = 1
_MOST = 100_000


@dataclass(frozen=True)
class Compiled:
    """The artifact was built; its launch proof and its budgets hold."""

    launch_proof: bool
    budgets: bool


@dataclass(frozen=True)
class Interpreted:
    """The kernel's source ran in Triton's interpreter against the oracle."""

    triton: str
    date: str
    cases: int
    max_error: float
    contract_met: bool


@dataclass(frozen=True)
class Ran:
    """The very bytes ran on a device against the oracle.

    `max_error` is in epsilons of the output type for envelope contracts, the number of differing elements for
    exact ones.
    """

    device: str
    driver: str
    date: str
    cases: int
    max_error: float
    contract_met: bool


@dataclass(frozen=True)
class Peer:
    """Another library's time on the same call, in the same run."""

    version: str
    median_us: float


@dataclass(frozen=True)
class Measured:
    """One timing; the limit is None where none was measured on the device."""

    op: str
    variant: str
    digest: str
    device: str
    driver: str
    date: str
    shape: Mapping[str, int]
    median_us: float
    spread_us: float
    bytes: int
    flops: int
    limit_us: float | None = None
    limit_from: str | None = None
    ratio_to_limit: float | None = None
    peers: Mapping[str, Peer] = field(default_factory=dict)


@dataclass(frozen=True)
class Proofs:
    """Everything proved of one artifact."""

    compiled: Compiled | None = None
    interpreted: Interpreted | None = None
    ran: Ran | None = None
    measured: tuple[Measured, ...] = ()

    def merged(self, newer: Self) -> Self:
        """This, updated by `newer`; a timing replaces one of the same op, variant, device and shape."""
        fresh = {_key(m) for m in newer.measured}
        kept = tuple(m for m in self.measured if _key(m) not in fresh)
        return dataclasses.replace(
            self,
            compiled=newer.compiled or self.compiled,
            interpreted=newer.interpreted or self.interpreted,
            ran=newer.ran or self.ran,
            measured=tuple(sorted(kept + newer.measured, key=_key)),
        )


def _key(m: Measured) -> tuple[str, str, str, tuple[tuple[str, int], ...]]:
    return m.op, m.variant, m.device, tuple(sorted(m.shape.items()))


@dataclass(frozen=True)
class Evidence:
    """The document of one target."""

    target: str
    artifacts: Mapping[str, Proofs] = field(default_factory=dict)

    def of(self, digest: str) -> Proofs:
        """What is proved of an artifact; nothing for an unknown digest."""
        return self.artifacts.get(digest, Proofs())

    def kept(self, digests: Collection[str]) -> Evidence:
        """Without the entries of artifacts that are not there any more."""
        return Evidence(self.target, {d: p for d, p in self.artifacts.items() if d in digests})

    def with_proofs(self, digest: str, proofs: Proofs) -> Evidence:
        """With `proofs` merged into the artifact's entry."""
        return Evidence(self.target, {**self.artifacts, digest: self.of(digest).merged(proofs)})


_digest = text(r"[0-9a-f]{64}", "a sha256 in lower-case hex")
_label = text(r"[^\x00-\x1f\x7f]+", "a printable text")
_name = text(r"[A-Za-z0-9_.+-]+", "a name")
_date = text(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?Z)?", "a date as 2026-01-31 or 2026-01-31T12:00:00Z")
_count = integer(0, 2**63 - 1)


def _amount(value: Any) -> float:
    found = number(value)
    if found < 0:
        raise Mismatch("a number that is not negative", value)
    return float(found)


_peer: Reader[Peer] = record(Peer, {"version": _label, "median_us": _amount})
_verdict: dict[str, Reader[Any]] = {
    "date": _date,
    "cases": _count,
    "max_error": _amount,
    "contract_met": boolean,
}
_measured: Reader[Measured] = record(
    Measured,
    {
        "op": _name,
        "variant": _name,
        "digest": _digest,
        "device": _label,
        "driver": _label,
        "date": _date,
        "shape": mapping(_name, _count, 32),
        "median_us": _amount,
        "spread_us": _amount,
        "bytes": _count,
        "flops": _count,
        "limit_us": nullable(_amount),
        "limit_from": nullable(_label),
        "ratio_to_limit": nullable(_amount),
        "peers": mapping(_label, _peer, 32),
    },
)
_READERS: dict[str, Reader[Any]] = {
    "compiled": record(Compiled, {"launch_proof": boolean, "budgets": boolean}),
    "interpreted": record(Interpreted, {"triton": _label, **_verdict}),
    "ran": record(Ran, {"device": _label, "driver": _label, **_verdict}),
    "measured": array(_measured, 10_000, least=1),
}


def _proofs(value: Any) -> Proofs:
    """An object with any of the four kinds of proof; an absent one is left out, never null."""
    if type(value) is not dict or not value:
        raise Mismatch("an object with one of " + ", ".join(_READERS), value)
    kinds = mapping(choice(*_READERS), lambda v: v, len(_READERS))(value)
    return record(Proofs, {kind: _READERS[kind] for kind in kinds})(value)


def _document(schema: int, target: str, artifacts: dict[str, Proofs]) -> Evidence:
    for digest, proofs in artifacts.items():
        for m in proofs.measured:
            if m.digest != digest:
                raise Mismatch(f"only timings of artifact {digest[:12]}…", f"a timing of {m.digest[:12]}…")
    return Evidence(target, artifacts)


_evidence: Reader[Evidence] = record(
    _document, {"schema": choice(SCHEMA), "target": _name, "artifacts": mapping(_digest, _proofs, _MOST)}
)


def parse_evidence(data: bytes, what: str = NAME) -> Evidence:
    """The document in `data`; SchemaError for anything that isn't exactly the schema."""
    return read(_evidence, parse(data, what), what)


def read_evidence(folder: Path, target: str, digests: Collection[str]) -> Evidence:
    """The evidence beside a manifest that holds `digests`; empty where there is no file.

    Raises:
        SchemaError: the file is not of the schema, or is another target's.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        return Evidence(target)
    with Folder.open_root(folder) as opened:
        found = parse_evidence(opened.read(NAME, MAX_BYTES), str(path))
    if found.target != target:
        raise SchemaError(f"{path}: evidence of {found.target} lies in the folder of {target}; remove it.")
    return found.kept(digests)


def _written(proofs: Proofs) -> dict[str, Any]:
    return {kind: value for kind, value in dataclasses.asdict(proofs).items() if value}


def evidence_bytes(evidence: Evidence) -> bytes:
    """The document, each timing and each other proof a line; SchemaError if it would not read back."""
    artifacts = {digest: _written(p) for digest, p in evidence.artifacts.items() if p != Proofs()}
    data = tabular({"schema": SCHEMA, "target": evidence.target, "artifacts": artifacts}, EVIDENCE_LEVELS)
    parse_evidence(data)
    return data


def write_evidence(folder: Path, evidence: Evidence, digests: Collection[str]) -> None:
    """Replace the folder's evidence, atomically, by the entries whose artifacts the manifest holds."""
    path = folder / NAME
    kept = evidence.kept(digests)
    if not kept.artifacts:
        path.unlink(missing_ok=True)
        return
    data = evidence_bytes(kept)
    staged = folder.parent / f"{STAGING}{NAME}.{folder.name}.{os.getpid()}"
    try:
        staged.write_bytes(data)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
