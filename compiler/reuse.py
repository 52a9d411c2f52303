"""What an existing tree already holds: results are found by the digest of their inputs, and proved before
use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kiln.compiler.backend import Built, Job
from kiln.compiler.tree import Parsed, parsed
from kiln.runtime.errors import KilnError
from kiln.runtime.files import Folder
from kiln.runtime.like import STORED
from kiln.runtime.manifest import Kernel, parse_index
from kiln.runtime.proof import prove_kernel, read_artifact
from kiln.runtime.verify import INDEX, MANIFEST, MAX_INDEX_BYTES


class Existing:
    """A target of a tree on disk, as far as it is sound; one that is missing or unsound holds nothing."""

    def __init__(self, folder: Path, found: Parsed | None) -> None:
        self.folder = folder
        self.manifest = found.manifest if found else None
        self.document = found.value if found else {}
        """The manifest as it is written."""
        self.kernels: dict[str, list[tuple[Kernel, dict[str, Any]]]] = defaultdict(list)
        # Entries as they are written: 1586 made anew from the parsed ones take 0.55 s.
        for kernel, entry in (
            zip(found.manifest.kernels, found.value["kernels"], strict=True) if found else ()
        ):
            self.kernels[kernel.op].append((kernel, entry))

    @classmethod
    def open(cls, out: Path, target: str) -> Existing:
        """The target as the tree's index has it."""
        try:
            with Folder.open_root(out) as root:
                entry = parse_index(root.read(INDEX, MAX_INDEX_BYTES)).targets.get(target)
                if entry is None:
                    return cls(out / target, None)
                with root.folder(target) as folder:
                    data = folder.read_exact(MANIFEST, entry.bytes, entry.sha256)
            return cls(out / target, parsed(data, target))
        except KilnError:
            return cls(out / target, None)

    def results(self, jobs: Iterable[Job]) -> dict[tuple[str, str], Built]:
        """By (op, variant): the jobs that need not run, and what they would give.

        Sources belong to an op, not to one of its jobs, so an op that has some is taken whole or not at all.
        """
        by_op: dict[str, list[Job]] = {}
        for job in jobs:
            by_op.setdefault(job.op, []).append(job)
        out: dict[tuple[str, str], Built] = {}
        for op, own in by_op.items():
            found = {(op, job.variant): self._made_by(job) for job in own}
            sound = {key: built for key, built in found.items() if built is not None}
            if len(sound) == len(found) or not self.sources_of(op):
                out |= sound
        return out

    def sources_of(self, op: str) -> list[str]:
        """Names of the sources of an op: they start with its name, up to a dot."""
        return [n for n in (self.manifest.sources if self.manifest else ()) if n.partition(".")[0] == op]

    def of_op(self, op: str) -> Built | None:
        """Every artifact of an op; None if one is damaged."""
        return self._read(self.kernels.get(op, ()), op)

    def _made_by(self, job: Job) -> Built | None:
        mine = [(k, e) for k, e in self.kernels.get(job.op, ()) if k.inputs_digest == job.inputs_digest]
        return self._read(mine, job.op) if mine else None

    def _read(self, made: Sequence[tuple[Kernel, dict[str, Any]]], op: str) -> Built | None:
        if self.manifest is None:
            return None
        sources = {name: self.manifest.sources[name] for name in self.sources_of(op)}
        try:
            with Folder.open_root(self.folder) as folder:
                files = {k.file: folder.read_exact(k.file, k.bytes, k.sha256) for k, _ in made}
                own = {entry["file"]: files[k.file] for k, entry in made}
                texts = {n: folder.read_exact(n, s.bytes, s.sha256) for n, s in sources.items()}
            artifacts = {name: read_artifact(self.folder.name, data) for name, data in files.items()}
            if any(prove_kernel(k, self.folder.name, artifacts[k.file]) for k, _ in made):
                return None
        except KilnError:
            return None
        return Built(tuple(map(self._as_made, made)), own, texts)

    def _as_made(self, made: tuple[Kernel, dict[str, Any]]) -> dict[str, Any]:
        """The kernel's entry with its whole toolchain, and stored as its own file: the manifest it goes into
        may have others."""
        common = self.manifest.toolchain if self.manifest else {}
        kernel, entry = made
        own = {name: value for name, value in entry.items() if name != STORED}
        return {**own, "toolchain": {**common, **kernel.toolchain}}
