"""Write typed calls of a tree's ops as a C header, for C11 and C++17: an id and three inline functions for
each op, over libkiln's kiln.h. The same tree gives the same text."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

from kiln.compiler.c_header import c_header
from kiln.compiler.c_names import RESERVED
from kiln.tools.console import emit, plural
from kiln.tools.trees import read_tree


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln header`."""
    parser.add_argument(
        "tree",
        nargs="?",
        type=Path,
        metavar="TREE",
        help="the artifact tree (default: ./aot_artifacts, else the one that comes with the package)",
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="the header (default: stdout)")
    parser.add_argument(
        "--prefix",
        type=prefix,
        default="kiln",
        metavar="NAME",
        help="of every name, so that headers of several trees go together (default: kiln)",
    )


def prefix(text: str) -> str:
    """A lower-case identifier that names can begin with."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text) or text in RESERVED:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected lower-case letters, digits and _")
    return text


def run(args: argparse.Namespace) -> int:
    """Write or print the header."""
    text, root, ops = header(args.tree, args.prefix)
    document = {"root": root, "ops": ops}
    if args.out is None:
        emit(args, {**document, "text": text}, text)
        return 0
    changed = write_if_changed(args.out, text)
    said = f"{args.out}: {plural(ops, 'op')}, {'written' if changed else 'unchanged'}"
    emit(args, {**document, "out": str(args.out), "changed": changed}, said)
    return 0


def header(root: Path | None, names: str = "kiln") -> tuple[str, str, int]:
    """The header for the tree at `root` (None: the default tree), its root digest, its number of ops."""
    tree = read_tree(root)
    text = c_header(tree.manifests, tree.digest, names)
    ops = {name for manifest in tree.manifests.values() for name in manifest.ops}
    return text, f"sha256:{tree.digest}", len(ops)


def write_if_changed(path: Path, text: str) -> bool:
    """Replace a file as a whole, unless it holds this text already: what depends on it isn't built again."""
    data = text.encode("utf-8")
    if path.is_file() and path.read_bytes() == data:
        return False
    fd, staging = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            file.write(data)
        os.replace(staging, path)
    except BaseException:
        os.unlink(staging)
        raise
    return True
