"""Ed25519 verification: the vectors of RFC 8032, signatures made here with plain integers, and every way to
be wrong."""

import ctypes
import hashlib
from random import Random

import pytest

from kiln.tests.runtime.c.core_build import Core

RFC8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        hashlib.sha512(b"abc").hexdigest(),
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
]
"""Key, message, signature."""

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]


def plus(a: Point, b: Point) -> Point:
    """The sum of two points in affine coordinates."""
    k = D * a[0] * b[0] * a[1] * b[1] % P
    x = (a[0] * b[1] + a[1] * b[0]) * pow(1 + k, -1, P)
    return x % P, (a[1] * b[1] + a[0] * b[0]) * pow(1 - k, -1, P) % P


def multiple(n: int, point: Point) -> Point:
    """n times a point."""
    out = (0, 1)
    for bit in bin(n)[2:]:
        out = plus(out, out)
        if bit == "1":
            out = plus(out, point)
    return out


def x_of(y: int, odd: int) -> int | None:
    """The x of that parity on the curve; None if there is none."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    if x * x % P != square:
        return None
    return P - x if x % 2 != odd and x else x


def encode(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


BY = 4 * pow(5, -1, P) % P
BASE = (x_of(BY, 0) or 0, BY)


def number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def clamp(secret: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(secret).digest()
    a = int.from_bytes(digest[:32], "little")
    return a & ~7 & (1 << 254) - 1 | 1 << 254, digest[32:]


def sign(secret: bytes, message: bytes, key: bytes | None = None) -> tuple[bytes, bytes]:
    """(key, signature)"""
    a, prefix = clamp(secret)
    key = key or encode(multiple(a, BASE))
    r = number(prefix, message) % L
    point = encode(multiple(r, BASE))
    s = (r + number(point, key, message) * a) % L
    return key, point + s.to_bytes(32, "little")


def verify(core: Core, key: bytes, message: bytes, signature: bytes) -> bool:
    return bool(core.lib.kiln_ed25519_verify(key, message, ctypes.c_size_t(len(message)), signature))


@pytest.mark.parametrize(("key", "message", "signature"), RFC8032)
def test_vectors_of_the_rfc(libkiln_core: Core, key: str, message: str, signature: str) -> None:
    k, m, s = bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(signature)
    assert verify(libkiln_core, k, m, s)
    for bit in range(512):
        wrong = bytearray(s)
        wrong[bit // 8] ^= 1 << bit % 8
        assert not verify(libkiln_core, k, m, bytes(wrong)), bit
    for bit in range(256):
        other = bytearray(k)
        other[bit // 8] ^= 1 << bit % 8
        assert not verify(libkiln_core, bytes(other), m, s), bit
    assert not verify(libkiln_core, k, m + b"x", s)


def test_the_signer_of_these_tests_is_that_of_the_rfc() -> None:
    secret = bytes.fromhex("833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42")
    key, message, signature = map(bytes.fromhex, RFC8032[3])
    assert sign(secret, message) == (key, signature)


def test_messages_of_every_length(libkiln_core: Core) -> None:
    random = Random(2)
    for length in [*range(0, 140, 9), 60, 64, 65, 127, 128, 191, 192, 5000]:
        message = random.randbytes(length)
        key, signature = sign(random.randbytes(32), message)
        assert verify(libkiln_core, key, message, signature), length
        assert not verify(libkiln_core, key, message + b"\0", signature)


def test_s_of_l_and_more_is_refused(libkiln_core: Core) -> None:
    key, good = sign(b"\1" * 32, b"message")
    s = int.from_bytes(good[32:], "little")
    assert verify(libkiln_core, key, b"message", good)
    for more in range(1, 16):
        if s + more * L < 2**256:
            assert not verify(
                libkiln_core, key, b"message", good[:32] + (s + more * L).to_bytes(32, "little")
            )
    for edge in (L, L - 1, 2**256 - 1, 0):
        assert not verify(libkiln_core, key, b"message", good[:32] + edge.to_bytes(32, "little"))


def small_order() -> list[Point]:
    """The eight points whose order divides 8."""
    y = 2
    while (x := x_of(y, 0)) is None or multiple(4, multiple(L, (x, y))) == (0, 1):
        y += 1
    eighth = multiple(L, (x, y))
    return [multiple(i, eighth) for i in range(8)]


def test_keys_of_small_order_are_refused(libkiln_core: Core) -> None:
    points = small_order()
    assert len(set(points)) == 8
    for point in points:
        key = encode(point)
        for r in points:  # S = 0: the equation holds for one of eight messages and more
            for i in range(16):
                assert not verify(libkiln_core, key, bytes([i]), encode(r) + bytes(32))


def test_a_key_with_a_part_of_small_order_signs_no_other_message(libkiln_core: Core) -> None:
    a, _ = clamp(b"\7" * 32)
    key = encode(plus(multiple(a, BASE), small_order()[1]))
    verdicts = []
    for i in range(40):  # without the cofactor it holds only where k is a multiple of 8
        message = bytes([i])
        _, signature = sign(b"\7" * 32, message, key)
        verdicts.append(
            (verify(libkiln_core, key, message, signature), number(signature[:32], key, message) % L % 8 == 0)
        )
    assert all(got == holds for got, holds in verdicts)
    assert any(holds for _, holds in verdicts)


@pytest.mark.parametrize("y", [P, P + 1, P + 2, P + 18, 2**255 - 1])
def test_a_key_that_is_not_the_one_encoding_is_refused(libkiln_core: Core, y: int) -> None:
    # Whose secret could be known are of small order too: two checks stand between them and this R of S = 0.
    for odd in (0, 1):
        key = (y | odd << 255).to_bytes(32, "little")
        _, signature = sign(b"\1" * 32, b"m", key)
        assert not verify(libkiln_core, key, b"m", signature)
        assert not verify(libkiln_core, key, b"m", bytes([1]) + bytes(63))


def test_keys_off_the_curve_are_refused(libkiln_core: Core) -> None:
    off = [y for y in range(2, 60) if x_of(y, 0) is None]
    assert len(off) > 20
    for y in off:
        assert not verify(libkiln_core, y.to_bytes(32, "little"), b"", bytes(64))
