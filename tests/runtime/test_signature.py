"""Signed trees: what is accepted, and that nothing else is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.errors import ContractError, IntegrityError, KilnError, SchemaError, UnavailableError
from kiln.runtime.signature import check_signature, fingerprint, public_key, sign
from kiln.runtime.verify import verify_tree
from kiln.tests.runtime.keys import (
    private_key,
    private_pem,
    public_pem,
    public_raw,
    serialization,
    sign_tree,
)
from kiln.tests.runtime.trees import cpu_manifest, write_tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def signed(tree: Path) -> Path:
    """A tree that key 1 signed."""
    sign_tree(tree)
    return tree


def forms(folder: Path, number: int = 1) -> dict[str, Any]:
    """One public key in every form that is accepted."""
    for name, data in (("pem", public_pem(number)), ("raw", public_raw(number))):
        (folder / name).write_bytes(data)
    (folder / "word").write_text(fingerprint(public_raw(number)) + "\n", "ascii")
    return {
        "raw": public_raw(number),
        "PEM": public_pem(number),
        "word": fingerprint(public_raw(number)),
        "PEM file": folder / "pem",
        "raw file": str(folder / "raw"),
        "word file": folder / "word",
    }


def test_a_signed_tree_loads_with_every_form_of_the_key(signed: Path, tmp_path: Path) -> None:
    for key in forms(tmp_path).values():
        assert public_key(key) == public_raw()
        with kiln.load(signed, key=key) as lib:
            assert lib.roots[0].signed_by == fingerprint(public_raw())
        assert verify_tree(signed, key=key) == []
    for key in forms(tmp_path, 2).values():
        with pytest.raises(IntegrityError, match=f"is not signed by {fingerprint(public_raw(2))}"):
            kiln.load(signed, key=key)
        (fault,) = verify_tree(signed, key=key)
        assert (fault.file, "is not signed by" in fault.why) == ("INDEX.json.sig", True)


WEAK = {
    "zeros": bytes(32),
    "one": (1).to_bytes(32, "little"),
    "p - 1": (2**255 - 20).to_bytes(32, "little"),
    "an eighth": bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    "its negative": bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85"),
    "the other one": bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    "its other spelling": (2**255 - 18).to_bytes(32, "little"),
    "no one encoding": (2**255 - 16).to_bytes(32, "little"),
}
"""Keys for which OpenSSL accepts what anybody can make, and one that is another's second spelling."""


@pytest.mark.parametrize("name", WEAK)
def test_a_key_that_binds_nobody_is_refused(signed: Path, name: str) -> None:
    """As libkiln refuses it: R = 1 and S = 0 fit one index of eight under any of the small ones."""
    (signed / "INDEX.json.sig").write_bytes(bytes([1]) + bytes(63))
    for key in (WEAK[name], fingerprint(WEAK[name])):
        with pytest.raises(ContractError, match="is no key that belongs to a private one"):
            kiln.load(signed, key=key)
        with pytest.raises(ContractError, match="is no key that belongs to a private one"):
            public_key(key)


def test_openssl_accepts_what_anybody_makes_for_a_weak_key() -> None:
    """Why the keys are looked at: nobody's private key was needed."""
    data, made = b"an index", bytes([1]) + bytes(63)
    check_signature(data, made, (1).to_bytes(32, "little"), "INDEX.json")
    with pytest.raises(IntegrityError):
        check_signature(data, made, public_raw(), "INDEX.json")


def test_without_a_key_a_signature_is_only_accounted_for(signed: Path) -> None:
    with kiln.load(signed) as lib:
        assert lib.roots[0].signed_by is None
    assert verify_tree(signed) == []
    (signed / "INDEX.json.sig").write_bytes(b"x" * 63)
    (fault,) = verify_tree(signed)
    assert "63 bytes, expected 64" in fault.why
    kiln.load(signed).close()


def test_the_signature_is_of_the_exact_bytes_and_nothing_else(signed: Path) -> None:
    data = (signed / "INDEX.json").read_bytes()
    signature = (signed / "INDEX.json.sig").read_bytes()
    assert len(signature) == 64
    assert signature == private_key().sign(data)
    assert sign(data, private_pem(), "key") == (signature, public_raw())


def test_every_byte_counts(signed: Path) -> None:
    index, sig = signed / "INDEX.json", signed / "INDEX.json.sig"
    data, signature = index.read_bytes(), sig.read_bytes()
    for i in range(len(data)):
        index.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(IntegrityError, match="is not signed by"):
            kiln.load(signed, key=public_raw())
    index.write_bytes(data)
    for i in range(64):
        sig.write_bytes(signature[:i] + bytes([signature[i] ^ 1]) + signature[i + 1 :])
        with pytest.raises(IntegrityError, match="is not signed by"):
            kiln.load(signed, key=public_raw())
    for wrong in (b"", signature[:-1], signature + b"\n"):
        sig.write_bytes(wrong)
        with pytest.raises(IntegrityError, match=r"bytes, expected"):
            kiln.load(signed, key=public_raw())
    sig.write_bytes(signature)
    kiln.load(signed, key=public_raw()).close()


def _absent(path: Path) -> None:
    path.unlink()


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "why"), [(_absent, "missing"), (_link, "link"), (_folder, "not a regular file")]
)
def test_a_signature_that_is_no_file(signed: Path, change: Callable[[Path], None], why: str) -> None:
    change(signed / "INDEX.json.sig")
    with pytest.raises(IntegrityError, match=why):
        kiln.load(signed, key=public_raw())
    (fault,) = verify_tree(signed, key=public_raw())
    assert fault.file == "INDEX.json.sig"


def test_the_signature_is_checked_before_the_index_is_read(tree: Path) -> None:
    (tree / "INDEX.json").write_bytes(b"not JSON")
    sign_tree(tree, 2)
    with pytest.raises(IntegrityError, match="is not signed by"):
        kiln.load(tree, key=public_raw())
    with pytest.raises(SchemaError):
        kiln.load(tree, key=public_raw(2))


def test_a_signed_tree_of_another_time_is_a_rollback(tmp_path: Path, ops_so: bytes) -> None:
    old, new = (
        write_tree(tmp_path / n, {"cpu-x86_64": cpu_manifest(ops_so)}, {"ops.so": ops_so}, generation=g)
        for n, g in (("old", 3), ("new", 4))
    )
    for tree in (old, new):
        sign_tree(tree)
    kiln.load(new, key=public_raw(), minimum_generation=4).close()
    with pytest.raises(IntegrityError, match="generation 3, expected at least 4; the tree was rolled back"):
        kiln.load(old, key=public_raw(), minimum_generation=4)
    # The signature of one tree beside the index of the other.
    (new / "INDEX.json.sig").write_bytes((old / "INDEX.json.sig").read_bytes())
    with pytest.raises(IntegrityError, match="is not signed by"):
        kiln.load(new, key=public_raw())


def test_a_manifest_of_another_build_under_a_signed_index(signed: Path) -> None:
    path = signed / "cpu-x86_64" / "MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(b"0.17.1", b"0.17.2"))
    with pytest.raises(IntegrityError, match="found sha256"):
        kiln.load(signed, key=public_raw())


WRONG_KEYS: dict[str, tuple[Any, type[KilnError], str]] = {
    "short": (b"x" * 31, ContractError, "31 bytes that are no Ed25519 public key"),
    "hex of 62": ("ed25519:" + "0" * 62, ContractError, "64 lower-case hex digits"),
    "upper case": ("ed25519:" + "A" * 64, ContractError, "64 lower-case hex digits"),
    "no file": ("/nonexistent/key", UnavailableError, "the key '/nonexistent/key': No such file"),
    "folder": ("/", UnavailableError, "expected a readable file"),
    "zero byte": ("a\0b", UnavailableError, "expected a readable file"),
    "endless": ("/dev/zero", ContractError, "more than 16384 bytes"),
    "bad PEM": (b"-----BEGIN PUBLIC KEY-----\n", ContractError, "not a public key in PEM"),
    "private": (private_pem(), ContractError, "is a private key; give the public one"),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_keys_that_are_none(signed: Path, name: str) -> None:
    key, kind, why = WRONG_KEYS[name]
    with pytest.raises(kind, match=why):
        kiln.load(signed, key=key)


def test_another_kind_of_key() -> None:
    from cryptography.hazmat.primitives.asymmetric import x25519

    s = serialization
    other = x25519.X25519PrivateKey.generate()
    pem = other.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ContractError, match="expected an Ed25519 public key"):
        public_key(pem)
    secret = other.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    with pytest.raises(ContractError, match="expected an Ed25519 private key"):
        sign(b"", secret, "key.pem")
    for data, why in (
        (private_pem(password=b"pw"), "key.pem is encrypted"),
        (b"garbage", "key.pem is no private key in PEM"),
        (public_pem(), "key.pem is no private key in PEM"),
    ):
        with pytest.raises(ContractError, match=why):
            sign(b"", data, "key.pem")


def test_rfc_8032_vectors() -> None:
    """Test 2 of RFC 8032, section 7.1: what any other implementation says."""
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    check_signature(b"\x72", signature, public, "INDEX.json")
    with pytest.raises(IntegrityError):
        check_signature(b"\x73", signature, public, "INDEX.json")


WITHOUT = """
import sys
sys.modules["cryptography"] = None
import kiln.runtime as kiln
try:
    kiln.load(sys.argv[1], key="ed25519:" + sys.argv[2])
except kiln.UnavailableError as e:
    print(e)
kiln.load(sys.argv[1]).close()
"""


def test_the_error_without_the_package_names_the_extra(signed: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, str(signed), public_raw().hex()]
    environment = {"PYTHONPATH": str(ROOT / ".typing"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install 'kernel-kiln[sign]'" in done.stdout


LIMITED = """
import os, resource, sys
import numpy as np, kiln.runtime as kiln
kind = sys.argv[3]
if kind == "memory":
    import cryptography.hazmat.primitives.asymmetric.ed25519
    held = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20),) * 2)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(kind),) * 2)
x = np.ones((3, 5), np.float32)
with kiln.load(sys.argv[1], key=sys.argv[2], threads=1) as lib:
    print(lib.explain("negate", x).chosen.variant)
    try:
        print((lib.negate(x) == -x).all())
    except kiln.UnavailableError as e:
        print(e)
"""


@pytest.mark.parametrize("kind", ["memory", "1000000", "0"])
def test_limits_of_memory_and_file_size(signed: Path, kind: str) -> None:
    """No HOME, and a limit that would break whoever writes files or reserves much memory."""
    command = [sys.executable, "-B", "-c", LIMITED, str(signed), fingerprint(public_raw()), kind]
    environment = {"PYTHONPATH": str(ROOT / ".typing"), "PATH": "/nonexistent"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == "base"
    assert second == "True" if kind != "0" else "RLIMIT_FSIZE" in second


def test_the_same_operands_give_the_same_result_signed_or_not(signed: Path) -> None:
    x = np.ones((2, 3), np.float32)
    with kiln.load(signed, key=public_raw()) as lib:
        assert np.array_equal(lib.negate(x), -x)
