"""Detached Ed25519 signatures of trees: INDEX.json.sig holds the 64 bytes that sign the exact bytes of
INDEX.json.

Nothing is put before or after what is signed, so that any Ed25519 implementation checks the same 64 bytes
with the same 32-byte public key. INDEX.json pins every manifest by digest, and they pin every artifact;
evidence is not covered.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from kiln.runtime.errors import ContractError, IntegrityError, UnavailableError

SIGNATURE = "INDEX.json.sig"
SIGNATURE_BYTES = 64
PREFIX = "ed25519:"
"""How a public key is written in one word: this, then 64 hex digits."""

PublicKey = bytes | str | os.PathLike[str]
"""32 raw bytes, "ed25519:<64 hex digits>", or the path of a file that holds one of these or PEM."""

MAX_KEY_BYTES = 1 << 14
_P = 2**255 - 19
_EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_WEAK = frozenset((0, 1, _P - 1, _EIGHTH, _P - _EIGHTH))
"""y of the eight points of small order."""


def public_key(key: PublicKey) -> bytes:
    """The 32 bytes of a public key.

    Raises:
        ContractError: nothing that is an Ed25519 public key, or one that binds nobody.
        UnavailableError: no such file, or `cryptography` is needed for PEM and not installed.
    """
    if isinstance(key, str) and key.startswith(PREFIX):
        raw = _from_hex(key)
    elif isinstance(key, bytes):
        raw = _from_bytes(key, "the key")
    else:
        raw = _from_bytes(read_key(key), f"{os.fspath(key)}")
    y = int.from_bytes(raw, "little") % 2**255
    # OpenSSL takes them. For a point of small order, zeros among them, anybody can make signatures.
    if y >= _P or y in _WEAK:
        raise ContractError(
            f"{fingerprint(raw)} is no key that belongs to a private one; give the public key of the signer."
        )
    return raw


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a key file.

    Raises:
        UnavailableError: it can't be read.
        ContractError: far too long for a key.
    """
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        raise UnavailableError(f"the key {os.fspath(path)!r}: {why}; expected a readable file.") from None
    if len(data) > MAX_KEY_BYTES:
        raise ContractError(f"{os.fspath(path)}: more than {MAX_KEY_BYTES} bytes, expected an Ed25519 key.")
    return data


def fingerprint(raw: bytes) -> str:
    """A public key in one word."""
    return PREFIX + raw.hex()


def _from_hex(text: str) -> bytes:
    digits = text.removeprefix(PREFIX)
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise ContractError(f"found the key {text[:80]!r}, expected {PREFIX} and 64 lower-case hex digits.")
    return bytes.fromhex(digits)


def _from_bytes(data: bytes, what: str) -> bytes:
    if len(data) == 32:
        return data
    if data.startswith(PREFIX.encode()):
        return _from_hex(data.decode("ascii", "replace").strip())
    if not data.startswith(b"-----BEGIN"):
        raise ContractError(
            f"{what}: found {len(data)} bytes that are no Ed25519 public key; expected PEM, 32 raw bytes or "
            f"{PREFIX}<64 hex digits>."
        )
    if b"PRIVATE KEY" in data[:64]:
        raise ContractError(f"{what} is a private key; give the public one, and keep this one secret.")
    c = _crypto()
    try:
        found = c.load_public(data)
    except (ValueError, c.unsupported) as e:
        raise ContractError(f"{what} is not a public key in PEM ({e}).") from None
    if not isinstance(found, c.public):
        raise ContractError(f"{what} is a {type(found).__name__}, expected an Ed25519 public key.")
    raw: bytes = found.public_bytes_raw()
    return raw


def check_signature(data: bytes, signature: bytes, raw: bytes, where: str) -> None:
    """Refuse an index that the key's owner has not signed.

    Args:
        data: INDEX.json.
        signature: INDEX.json.sig.
        raw: 32 bytes of the public key.
        where: how messages call the index.

    Raises:
        IntegrityError: another signature, or not one at all.
        UnavailableError: `cryptography` is not installed.
    """
    if len(signature) != SIGNATURE_BYTES:
        raise IntegrityError(
            f"{where}.sig: found {len(signature)} bytes, expected {SIGNATURE_BYTES}. Sign the tree again."
        )
    c = _crypto()
    try:
        c.public.from_public_bytes(raw).verify(signature, data)
    except c.invalid:
        raise IntegrityError(
            f"{where} is not signed by {fingerprint(raw)}: the tree was changed, or another key signed it. "
            "Use the tree that was signed, or the right key."
        ) from None


def sign(data: bytes, private_pem: bytes, what: str) -> tuple[bytes, bytes]:
    """(signature, 32-byte public key) of INDEX.json's bytes; the same for the same key and bytes.

    Raises:
        ContractError: not an unencrypted Ed25519 private key in PEM.
        UnavailableError: `cryptography` is not installed.
    """
    c = _crypto()
    try:
        key = c.load_private(private_pem, None)
    except TypeError:
        raise ContractError(f"{what} is encrypted; decrypt it for the time of signing.") from None
    except (ValueError, c.unsupported) as e:
        raise ContractError(
            f"{what} is no private key in PEM ({e}); openssl genpkey -algorithm ed25519 makes one."
        ) from None
    if not isinstance(key, c.private):
        raise ContractError(f"{what} is a {type(key).__name__}, expected an Ed25519 private key.")
    return key.sign(data), key.public_key().public_bytes_raw()


class _Crypto(NamedTuple):
    """What is needed of `cryptography`."""

    private: Any
    public: Any
    load_private: Any
    load_public: Any
    invalid: type[Exception]
    unsupported: type[Exception]


def _crypto() -> _Crypto:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UnavailableError(
            "signatures need the package cryptography; pip install 'kernel-kiln[sign]', or leave the key out."
        ) from None
    return _Crypto(
        ed25519.Ed25519PrivateKey,
        ed25519.Ed25519PublicKey,
        serialization.load_pem_private_key,
        serialization.load_pem_public_key,
        InvalidSignature,
        UnsupportedAlgorithm,
    )
