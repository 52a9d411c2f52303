"""Reading artifact trees for people: manifests and evidence, not artifacts."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kiln.runtime.errors import IntegrityError, UnavailableError
from kiln.runtime.manifest import Manifest, parse_index, parse_manifest
from kiln.tools.console import UsageError, nearest, note, require
from kiln.tools.evidence import Evidence, read_evidence

INDEX = "INDEX.json"


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


def read_tree(root: Path | None = None, targets: Iterable[str] | None = None) -> Tree:
    """The tree at `root` (default: `default_tree()`).

    Raises:
        UnavailableError: there is no tree.
        IntegrityError: a manifest is missing or not what the index says.
        UsageError: `targets` names one that the tree doesn't hold.
    """
    root = default_tree() if root is None else root
    try:
        data = (root / INDEX).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UnavailableError(
            f"no artifact tree in {root} (no {INDEX} there); `kiln build` makes one"
        ) from None
    index = parse_index(data, str(root / INDEX))
    if targets is not None:
        require(targets, index.targets, f"target in {root}")
    manifests = {}
    for target in sorted(index.targets if targets is None else targets):
        entry = index.targets[target]
        manifests[target] = _manifest(root / entry.manifest, target, entry.sha256)
    evidence = {t: read_evidence(root / t, t, {k.sha256 for k in m.kernels}) for t, m in manifests.items()}
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


def _manifest(path: Path, target: str, sha256: str) -> Manifest:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing, though {INDEX} lists it; build again") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise IntegrityError(
            f"{path} has sha256 {found[:16]}…, {INDEX} says {sha256[:16]}…; run kiln verify, then build again"
        )
    return parse_manifest(data, target, str(path))
