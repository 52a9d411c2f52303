"""A verifier of the engine's own in place of the built-in one: asked with exactly what is signed, believed
when it says 1 and never else; and OpenSSL's, as an engine would plug it."""

import ctypes
import ctypes.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.errors import ContractError, IntegrityError
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.options import Ed25519, Root
from kiln.tests.runtime.c.test_ed25519 import sign

Verifier = Callable[[bytes, bytes, bytes], int]
"""Message, signature, key."""
USER = 0x1234


@pytest.fixture
def signed(tree: Path) -> tuple[Path, bytes]:
    """A signed tree and its key."""
    key, signature = sign(b"\5" * 32, (tree / "INDEX.json").read_bytes())
    (tree / "INDEX.json.sig").write_bytes(signature)
    return tree, key


def plugged(verifier: Verifier) -> Any:
    """It as kiln_ed25519_fn; its user pointer must arrive."""

    def called(user: int, message: int, size: int, signature: Any, key: Any) -> int:
        assert user == USER
        return verifier(ctypes.string_at(message, size), bytes(signature[:64]), bytes(key[:32]))

    return Ed25519(called)


def pinned(key: bytes) -> Any:
    return ctypes.cast(ctypes.create_string_buffer(key, 32), ctypes.c_char_p)


def opened(c: ctypes.CDLL, tree: Path, key: bytes, verifier: Verifier) -> None:
    """Open and close it, by each of the two ways to give a verifier; then verify it."""
    how = {"public_key": pinned(key), "ed25519": plugged(verifier), "ed25519_user": USER}
    libkiln.Library(c, tree, **how).close()
    root = Root(path=str(tree).encode(), **how)
    roots = ctypes.pointer(root)
    libkiln.Library(c, None, roots=roots, root_count=1).close()
    error, count = libkiln.Error(), ctypes.c_uint32()
    seen = libkiln.FaultSeen(lambda *_: None)
    code = c.kiln_verify(ctypes.byref(root), seen, None, ctypes.byref(count), ctypes.byref(error))
    libkiln.check(code, error)
    assert count.value == 0


def test_it_is_asked_in_place_of_the_built_in_one(c: ctypes.CDLL, signed: tuple[Path, bytes]) -> None:
    tree, key = signed
    asked: list[tuple[bytes, bytes, bytes]] = []

    def accept(*what: bytes) -> int:
        asked.append(what)  # type: ignore[arg-type]
        return 1

    opened(c, tree, key, accept)
    exact = ((tree / "INDEX.json").read_bytes(), (tree / "INDEX.json.sig").read_bytes(), key)
    assert asked == [exact] * 3
    # What the built-in one refuses, it may accept: whom to believe is the engine's.
    opened(c, tree, bytes(32), accept)


@pytest.mark.parametrize("answer", [0, -1, 2, 256])
def test_anything_but_1_refuses(c: ctypes.CDLL, signed: tuple[Path, bytes], answer: int) -> None:
    tree, key = signed
    libkiln.Library(c, tree, public_key=pinned(key)).close()
    with pytest.raises(IntegrityError, match="not this key's signature"):
        opened(c, tree, key, lambda *_: answer)


@pytest.mark.parametrize("size", [0, 63])
def test_no_whole_signature_is_not_shown_to_it(c: ctypes.CDLL, signed: tuple[Path, bytes], size: int) -> None:
    tree, key = signed
    (tree / "INDEX.json.sig").write_bytes(bytes(size))
    asked: list[bytes] = []

    def accept(message: bytes, *_: bytes) -> int:
        asked.append(message)
        return 1

    with pytest.raises(IntegrityError, match="not this key's signature"):
        opened(c, tree, key, accept)
    assert not asked


def test_it_needs_a_key(c: ctypes.CDLL, tree: Path) -> None:
    accept = plugged(lambda *_: 1)
    with pytest.raises(ContractError, match="found a verifier without a public key"):
        libkiln.Library(c, tree, ed25519=accept, ed25519_user=USER)
    root = Root(path=str(tree).encode())
    with pytest.raises(ContractError, match="ed25519 belong to a root that was not given"):
        libkiln.Library(c, None, roots=ctypes.pointer(root), root_count=1, ed25519=accept)


def openssl() -> Verifier:
    """libcrypto's, opened at run time."""
    path = ctypes.util.find_library("crypto")
    if path is None:
        pytest.skip("needs OpenSSL's libcrypto on this machine")
    lib = ctypes.CDLL(path)
    lib.EVP_PKEY_new_raw_public_key.restype = lib.EVP_MD_CTX_new.restype = ctypes.c_void_p
    nid = 1087  # NID_ED25519

    def verify(message: bytes, signature: bytes, key: bytes) -> int:
        public = ctypes.c_void_p(lib.EVP_PKEY_new_raw_public_key(nid, None, key, ctypes.c_size_t(32)))
        context = ctypes.c_void_p(lib.EVP_MD_CTX_new())
        try:
            return int(
                bool(public)
                and lib.EVP_DigestVerifyInit(context, None, None, None, public) == 1
                and lib.EVP_DigestVerify(
                    context, signature, ctypes.c_size_t(64), message, ctypes.c_size_t(len(message))
                )
            )
        finally:
            lib.EVP_MD_CTX_free(context)
            lib.EVP_PKEY_free(public)

    return verify


def test_openssl(c: ctypes.CDLL, signed: tuple[Path, bytes]) -> None:
    tree, key = signed
    verify = openssl()
    opened(c, tree, key, verify)
    path = tree / "INDEX.json.sig"
    good = path.read_bytes()
    for wrong in (good[:-1] + bytes([good[-1] ^ 1]), bytes([good[0] ^ 1]) + good[1:]):
        path.write_bytes(wrong)
        with pytest.raises(IntegrityError, match="not this key's signature"):
            opened(c, tree, key, verify)
    path.write_bytes(good)
    with pytest.raises(IntegrityError, match="not this key's signature"):
        opened(c, tree, sign(b"\6" * 32, b"")[0], verify)
