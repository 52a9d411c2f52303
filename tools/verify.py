"""Check a tree without a compiler or a device: sizes, digests, names, nothing missing, nothing extra, and
for every artifact that its own launch parameters and resources are what the manifest says. Exit code 1 if
anything is wrong."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

from kiln.runtime.errors import UnavailableError
from kiln.runtime.signature import SIGNATURE, fingerprint, public_key
from kiln.runtime.verify import INDEX, verify_tree
from kiln.tools.console import emit, plural
from kiln.tools.trees import default_tree


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln verify`."""
    parser.add_argument(
        "dir", nargs="?", type=Path, metavar="DIR", help="the tree (default: ./aot_artifacts)"
    )
    parser.add_argument(
        "--expect", metavar="sha256:…", help="the root digest that kiln build printed, kept elsewhere"
    )
    parser.add_argument(
        "--key", metavar="KEY", help="the public key that must have signed it: ed25519:… or a file (PEM)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the faults of a tree."""
    root = args.dir or default_tree()
    if not root.is_dir():
        raise UnavailableError(f"{root} is not a folder; give the folder that holds {INDEX}")
    began = time.perf_counter()
    faults = verify_tree(root, args.expect, args.key)
    seconds = time.perf_counter() - began
    listed = [{"file": f.file, "why": f.why} for f in faults]
    digest = hashlib.sha256((root / INDEX).read_bytes()).hexdigest() if not faults else None
    signed = signature_state(root, args.key, not faults)
    document = {
        "ok": not faults,
        "faults": listed,
        "tree": str(root),
        "root": digest and f"sha256:{digest}",
        "signature": signed,
    }
    lines = [f"{f.file}: {f.why}" for f in faults]
    bad = f"{plural(len(faults), 'fault')} in {root}"
    verdict = bad if faults else f"{root} is intact, root sha256:{digest}, {signed}"
    emit(args, document, "\n".join([*lines, f"{verdict} ({seconds:.2f} s)"]))
    return 1 if faults else 0


def signature_state(root: Path, key: str | None, fine: bool) -> str:
    """What is known of the tree's signature, in a few words."""
    if key is not None:
        return f"signed by {fingerprint(public_key(key))}" if fine else "not what the key signed, or damaged"
    there = (root / SIGNATURE).exists()
    return "signature not checked (give --key)" if there else "not signed"
