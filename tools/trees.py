"""Reading artifact trees for people: manifests and evidence, not artifacts."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kiln.compiler.tree import locked
from kiln.runtime.errors import UnavailableError
from kiln.runtime.files import Folder
from kiln.runtime.manifest import Manifest, parse_index, parse_manifest
from kiln.runtime.verify import INDEX, MANIFEST, MAX_INDEX_BYTES
from kiln.tools.console import UsageError, nearest, note, require
from kiln.tools.evidence import Evidence, Proofs, read_evidence, write_evidence


@dataclass(frozen=True)
class Tree:
    """The manifests of a tree and what is proved of its artifacts."""

    root: Path
    digest: str
    """sha256 of INDEX.json: what `load(..., expect=)` pins."""
    manifests: Mapping[str, Manifest]
    evidence: Mapping[str, Evidence]


def shipped() -> Path:
    """Where the trees that come with the installed package are."""
    return Path(__file__).resolve().parent.parent / "aot_artifacts"


def default_tree() -> Path:
    """`aot_artifacts` of the current folder where there is one, else the trees that come with the package."""
    here = Path("aot_artifacts")
    return here if (here / INDEX).is_file() else shipped()


def add_tree_option(parser: argparse.ArgumentParser) -> None:
    """The option --tree."""
    parser.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="the artifact tree (default: ./aot_artifacts, else the one that comes with the package)",
    )


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    """The options --target and --op, both repeatable."""
    parser.add_argument("--target", action="append", metavar="T", help="only this target; may be repeated")
    parser.add_argument("--op", action="append", metavar="GLOB", help="only ops that match; may be repeated")


def matches(name: str, globs: Iterable[str] | None) -> bool:
    """Whether the name is selected; no globs select everything."""
    return globs is None or any(fnmatchcase(name, g) for g in globs)


def require_matches(globs: Iterable[str] | None, names: Iterable[str]) -> None:
    """UsageError for a glob that selects no op."""
    known = list(names)
    for glob in globs or ():
        if not any(fnmatchcase(n, glob) for n in known):
            raise UsageError(nearest(glob, known, "op"))


def read_tree(root: Path | None = None, targets: Collection[str] | None = None) -> Tree:
    """The tree at `root` (default: `default_tree()`).

    Raises:
        UnavailableError: there is no tree.
        IntegrityError: a manifest is missing or not what the index says.
        UsageError: `targets` names one that the tree doesn't hold.
    """
    root = default_tree() if root is None else root
    if not os.path.lexists(root / INDEX):
        raise UnavailableError(f"no artifact tree in {root} (no {INDEX} there); `kiln build` makes one")
    manifests, evidence = {}, {}
    with Folder.open_root(root) as tree:
        data = tree.read(INDEX, MAX_INDEX_BYTES)
        index = parse_index(data, str(root / INDEX))
        require(targets or (), index.targets, f"target in {root}")
        for target in sorted(index.targets if targets is None else targets):
            entry = index.targets[target]
            with tree.folder(target) as folder:
                written = folder.read_exact(MANIFEST, entry.bytes, entry.sha256)
            manifests[target] = parse_manifest(written, target, str(root / entry.manifest))
            evidence[target] = read_evidence(root / target, target, digests(manifests[target]))
    return Tree(root, hashlib.sha256(data).hexdigest(), manifests, evidence)


def tree_or_none(root: Path | None) -> Tree | None:
    """The tree; without --tree, its absence only means that nothing is compiled yet."""
    try:
        return read_tree(root)
    except UnavailableError as missing:
        if root is not None:
            raise
        note(f"{missing}; showing declarations alone")
        return None


def digests(manifest: Manifest) -> set[str]:
    """sha256 of every artifact of a target."""
    return {k.sha256 for k in manifest.kernels}


def record_proofs(root: Path, target: str, proofs: Mapping[str, Proofs]) -> None:
    """Merge what was just observed of artifacts (by digest) into a target's evidence, under the tree's lock.

    What was observed of artifacts that the tree doesn't hold any more is dropped.
    """
    with locked(root.resolve()):
        tree = read_tree(root, [target])
        evidence = tree.evidence[target]
        for digest, observed in proofs.items():
            evidence = evidence.with_proofs(digest, observed)
        write_evidence(root / target, evidence, digests(tree.manifests[target]))
