"""Where verifiers of Ed25519 differ ("Taming the many EdDSAs", Chalkias, Garillot and Nikolaenko 2020, whose
cases 0 to 11 these are): points with a part of small order, encodings that are not the one of a point, S of L
and more. Each case is made here from plain integers, and the rules that ed25519.c states decide it."""

from dataclasses import dataclass
from itertools import count, product

import pytest

from kiln.tests.runtime.c.core_build import Core
from kiln.tests.runtime.c.test_ed25519 import (
    BASE,
    L,
    P,
    Point,
    encode,
    multiple,
    number,
    plus,
    small_order,
    verify,
)
from kiln.tests.runtime.c.test_verifier import openssl

SMALL = small_order()
"""The multiples of a point of order 8."""
A, R = 0x1234567890ABCDEF << 64, 0xFEDCBA0987654321 << 96
"""A secret and a nonce."""

SPELLINGS = {
    "y = p": (P, 0), "y = p, odd": (P, 1), "y = p + 1": (P + 1, 0), "y = p + 1, odd": (P + 1, 1),
    "y = 1, odd": (1, 1), "y = p - 1, odd": (P - 1, 1),
}  # fmt: skip
"""Every encoding of a point of small order that is not its one encoding."""


def spelled(name: str) -> tuple[bytes, int]:
    """(bytes, the multiple)."""
    y, odd = SPELLINGS[name]
    x = next(i for i, p in enumerate(SMALL) if p[1] == y % P and (p[0] & 1 == odd or p[0] == 0))
    return (y | odd << 255).to_bytes(32, "little"), x


@dataclass(frozen=True)
class Signed:
    """One signature of a message under a key."""

    key: bytes
    message: bytes
    signature: bytes

    def by(self, core: Core) -> bool:
        """libkiln's verdict."""
        return verify(core, self.key, self.message, self.signature)


def point(secret: int, part: int) -> Point:
    """[secret]B, and so many times the point of order 8."""
    return plus(multiple(secret, BASE), SMALL[part % 8])


def signed(
    a: int,
    a_part: int,
    r: int,
    r_part: int,
    holds: bool,
    key: bytes | None = None,
    nonce: bytes | None = None,
    hashed: tuple[bytes, bytes] | None = None,
    more: int = 0,
) -> Signed:
    """A signature by A = [a]B + a part of small order with R = [r]B + one, of the first message for which the
    equation without the cofactor holds, or does not; the one with the cofactor always does.

    Args:
        key, nonce: A and R in another encoding.
        hashed: R and A as the hash takes them, if not as they are spelled.
        more: added to S.
    """
    key, nonce = key or encode(point(a, a_part)), nonce or encode(point(r, r_part))
    for i in count():
        message = b"message %d" % i
        k = number(*(hashed or (nonce, key)), message) % L
        if ((k * a_part + r_part) % 8 == 0) is holds:
            s = (r + k * a) % L + more
            return Signed(key, message, nonce + s.to_bytes(32, "little"))
    raise AssertionError


def test_the_signer_without_small_parts_is_that_of_the_rfc(libkiln_core: Core) -> None:
    assert signed(A, 0, R, 0, True).by(libkiln_core)


def possible(a_part: int, r_part: int, holds: bool) -> bool:
    """Whether the equation holds, or does not, for any message at all."""
    return any(((k * a_part + r_part) % 8 == 0) is holds for k in range(8))


@pytest.mark.parametrize("r", [0, R], ids=["R small", "R mixed"])
def test_0_and_1_keys_of_small_order(libkiln_core: Core, r: int) -> None:
    parts = [p for p in product(range(8), range(8), (True, False)) if possible(*p)]
    assert len(parts) > 64
    for a_part, r_part, holds in parts:
        assert not signed(0, a_part, r, r_part, holds).by(libkiln_core), (a_part, r_part, holds)


@pytest.mark.parametrize(("a_part", "r_part"), [(1, 3), (3, 1), (5, 0), (2, 4), (4, 4), (1, 0), (0, 0)])
@pytest.mark.parametrize("r", [0, R], ids=["R small", "R mixed"])
def test_2_and_3_mixed_points_where_the_equation_holds(
    libkiln_core: Core, r: int, a_part: int, r_part: int
) -> None:
    assert signed(A, a_part, r, r_part, True).by(libkiln_core)


@pytest.mark.parametrize(("a_part", "r_part"), [(1, 3), (0, 1), (0, 4), (5, 0), (4, 4)])
@pytest.mark.parametrize("r", [0, R], ids=["R small", "R mixed"])
def test_4_and_5_mixed_points_where_only_eight_times_it_holds(
    libkiln_core: Core, r: int, a_part: int, r_part: int
) -> None:
    assert not signed(A, a_part, r, r_part, False).by(libkiln_core)


def test_6_and_7_s_of_l_and_more(libkiln_core: Core) -> None:
    for times in range(1, 16):
        found = signed(A, 0, R, 0, True, more=0)
        s = int.from_bytes(found.signature[32:], "little") + times * L
        if s < 1 << 256:
            assert not signed(A, 0, R, 0, True, more=times * L).by(libkiln_core), times
    s = int.from_bytes(found.signature[32:], "little")
    for wrong in (s ^ 1 << 253, s ^ 1 << 254, s ^ 1 << 255):
        other = Signed(found.key, found.message, found.signature[:32] + wrong.to_bytes(32, "little"))
        assert not other.by(libkiln_core)


@pytest.mark.parametrize("name", SPELLINGS)
def test_8_and_9_another_encoding_of_a_small_r(libkiln_core: Core, name: str) -> None:
    nonce, r_part = spelled(name)
    key = encode(point(A, 1))
    one = encode(SMALL[r_part])
    assert nonce != one
    assert signed(A, 1, 0, r_part, True).by(libkiln_core), "in its one encoding it is fine"
    assert not signed(A, 1, 0, r_part, True, nonce=nonce).by(libkiln_core)
    assert not signed(A, 1, 0, r_part, True, nonce=nonce, hashed=(one, key)).by(libkiln_core)


@pytest.mark.parametrize("name", SPELLINGS)
def test_10_and_11_another_encoding_of_a_small_key(libkiln_core: Core, name: str) -> None:
    key, a_part = spelled(name)
    one = encode(SMALL[a_part])
    assert key != one
    for r_part in (q for q in range(8) if possible(a_part, q, True)):
        nonce = encode(point(R, r_part))
        assert not signed(0, a_part, R, r_part, True, key=key).by(libkiln_core)
        assert not signed(0, a_part, R, r_part, True, key=key, hashed=(nonce, one)).by(libkiln_core)


def test_an_r_off_the_curve_or_of_another_encoding(libkiln_core: Core) -> None:
    found = signed(A, 0, R, 0, True)
    for y in range(2, 30):
        for odd in (0, 1):
            nonce = (y | odd << 255).to_bytes(32, "little")
            assert not Signed(found.key, found.message, nonce + found.signature[32:]).by(libkiln_core)


def test_openssl_accepts_what_is_accepted_here(libkiln_core: Core) -> None:
    """And no more but for keys of small order, which it lets pass."""
    theirs = openssl()
    parts = [
        (1, 3, True),
        (5, 0, True),
        (4, 4, True),
        (0, 0, True),
        (1, 3, False),
        (0, 4, False),
        (5, 0, False),
    ]
    for (a_part, r_part, holds), r in product(parts, (0, R)):
        found = signed(A, a_part, r, r_part, holds)
        verdict = theirs(found.message, found.signature, found.key) == 1
        assert found.by(libkiln_core) == verdict == holds, (a_part, r, r_part)
    small = signed(0, 1, R, 3, True)
    assert theirs(small.message, small.signature, small.key) == 1
    assert not small.by(libkiln_core)
    larger = signed(A, 0, R, 0, True, more=L)
    assert theirs(larger.message, larger.signature, larger.key) != 1
