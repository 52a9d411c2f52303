"""Sign a tree: INDEX.json.sig gets the 64-byte Ed25519 signature of the exact bytes of INDEX.json.

The tree is verified first. The same key and tree always give the same signature. The public key is printed
in one word (ed25519:…), to be kept where the tree's users can trust it: kiln verify --key and load(..., key=)
take it, or the public key in PEM. `openssl genpkey -algorithm ed25519 -out private.pem` makes a key, `openssl
pkey -in private.pem -pubout -out public.pem` writes its public half. Needs kernel-kiln[sign]. Exit code 1 if
the tree is damaged: nothing is signed then."""

from __future__ import annotations

import argparse
from pathlib import Path

from kiln.compiler.tree import locked, write_signature
from kiln.runtime.errors import UnavailableError
from kiln.runtime.files import Folder
from kiln.runtime.signature import SIGNATURE, fingerprint, read_key, sign
from kiln.runtime.verify import INDEX, MAX_INDEX_BYTES, verify_tree
from kiln.tools.console import emit, plural


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln sign`."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="the tree")
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the private key, in PEM")


def run(args: argparse.Namespace) -> int:
    """Verify, sign, and print whose signature it is."""
    root: Path = args.dir
    if not root.is_dir():
        raise UnavailableError(f"{root} is not a folder; give the folder that holds {INDEX}")
    pem = read_key(args.key)
    with locked(root.resolve()):
        faults = [f for f in verify_tree(root) if f.file != SIGNATURE]
        if faults:
            listed = [{"file": f.file, "why": f.why} for f in faults]
            lines = [f"{f.file}: {f.why}" for f in faults]
            lines.append(f"{plural(len(faults), 'fault')} in {root}: nothing was signed")
            emit(args, {"ok": False, "faults": listed, "tree": str(root)}, "\n".join(lines))
            return 1
        with Folder.open_root(root) as folder:
            data = folder.read(INDEX, MAX_INDEX_BYTES)
        signature, public = sign(data, pem, str(args.key))
        write_signature(root, signature)
    key = fingerprint(public)
    document = {"ok": True, "tree": str(root), "key": key, "signature": signature.hex()}
    emit(args, document, f"{root / SIGNATURE} is the signature of {key}")
    return 0
