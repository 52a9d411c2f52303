"""Keys and signed trees for tests of signatures; importing this skips the test where the extra is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.signature import SIGNATURE, sign

ed25519: Any = pytest.importorskip(
    "cryptography.hazmat.primitives.asymmetric.ed25519", reason="needs cryptography: kernel-kiln[sign]"
)
serialization: Any = pytest.importorskip(
    "cryptography.hazmat.primitives.serialization", reason="needs cryptography: kernel-kiln[sign]"
)


def private_key(number: int = 1) -> Any:
    """A fixed private key, one for each number."""
    return ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def private_pem(number: int = 1, password: bytes | None = None) -> bytes:
    """It as PKCS#8."""
    s = serialization
    hidden = s.NoEncryption() if password is None else s.BestAvailableEncryption(password)
    pem: bytes = private_key(number).private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, hidden)
    return pem


def public_pem(number: int = 1) -> bytes:
    """Its public half."""
    s = serialization
    pem: bytes = (
        private_key(number).public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    )
    return pem


def public_raw(number: int = 1) -> bytes:
    """Its public half in 32 bytes."""
    raw: bytes = private_key(number).public_key().public_bytes_raw()
    return raw


def sign_tree(root: Path, number: int = 1) -> bytes:
    """Sign a tree in place; the signature."""
    signature, _ = sign((root / "INDEX.json").read_bytes(), private_pem(number), "the test's key")
    (root / SIGNATURE).write_bytes(signature)
    return signature
