"""libkiln's verifier beside `cryptography` (OpenSSL's): the same verdict on signatures, on changed ones and
on chosen bytes, but for keys that the head of ed25519.c says it refuses.

CI takes a sample; `compared(core, 1000, seed)` with twelve seeds took 12,000 signatures and 144,000 changed
ones.
"""

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

import pytest

from kiln.tests.runtime.c.core_build import Core
from kiln.tests.runtime.c.test_ed25519 import BASE, L, P, encode, multiple, number, plus, verify, x_of
from kiln.tests.runtime.c.test_ed25519_edges import SMALL, SPELLINGS, spelled

ed25519 = pytest.importorskip(
    "cryptography.hazmat.primitives.asymmetric.ed25519", reason="needs cryptography"
)
InvalidSignature = pytest.importorskip(
    "cryptography.exceptions", reason="needs cryptography"
).InvalidSignature

SAMPLE = 150
SIGN = 1 << 255


class Triple(NamedTuple):
    """What a verifier is asked."""

    key: bytes
    message: bytes
    signature: bytes


def whole(data: bytes) -> int:
    return int.from_bytes(data, "little")


def bytes_of(value: int) -> bytes:
    return value.to_bytes(32, "little")


def theirs(asked: Triple) -> bool:
    """OpenSSL's verdict."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(asked.key).verify(asked.signature, asked.message)
    except InvalidSignature:
        return False
    return True


def has_other_rules(key: bytes) -> bool:
    """A key of small order, or one that is not the one encoding of its point: refused here, not there."""
    y = whole(key) % SIGN
    return y >= P or y in {p[1] for p in SMALL} or (y in (1, P - 1) and whole(key) >= SIGN)


def ours(core: Core, asked: Triple) -> bool:
    """libkiln's verdict, which must be OpenSSL's wherever the rules are the same."""
    verdict = verify(core, *asked)
    assert verdict == (theirs(asked) and not has_other_rules(asked.key)), asked
    return verdict


def flipped(data: bytes, random: Random) -> bytes:
    """One bit is another."""
    return bytes_from(whole(data) ^ 1 << random.randrange(8 * len(data)), len(data))


def bytes_from(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def point_of(data: bytes) -> tuple[int, int]:
    """The point that 32 bytes encode."""
    y, odd = whole(data) % SIGN, data[31] >> 7
    x = x_of(y, odd)
    assert x is not None
    return x, y


def changed(good: Triple, random: Random) -> Iterator[Triple]:
    """The same with one thing another: none of them is signed."""
    key, message, signature = good
    r, s = signature[:32], whole(signature[32:])
    yield Triple(key, message, flipped(r, random) + signature[32:])
    yield Triple(key, message, r + flipped(signature[32:], random))
    yield Triple(flipped(key, random), message, signature)
    yield Triple(key, message + b"\0", signature)
    yield Triple(key, flipped(message, random) if message else b"\1", signature)
    yield Triple(key, message, r + bytes_of(s + L))
    yield Triple(key, message, r + bytes_of(L - s))
    yield Triple(key, message, bytes_of(whole(r) ^ SIGN) + signature[32:])
    yield Triple(bytes_of(whole(key) ^ SIGN), message, signature)
    part = SMALL[random.randrange(1, 8)]
    yield Triple(key, message, encode(plus(point_of(r), part)) + signature[32:])
    yield Triple(encode(plus(point_of(key), part)), message, signature)
    yield Triple(key, message, random.randbytes(64))


def compared(core: Core, count: int, seed: int = 0) -> int:
    """How many verdicts on `count` signatures and what is made of them agree; all must."""
    random, seen = Random(seed), 0
    for _ in range(count):
        private = ed25519.Ed25519PrivateKey.from_private_bytes(random.randbytes(32))
        message = random.randbytes(random.choice((0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 300)))
        good = Triple(private.public_key().public_bytes_raw(), message, private.sign(message))
        assert ours(core, good), good
        for other in changed(good, random):
            assert not ours(core, other), other
            seen += 1
        seen += 1
    return seen


def test_random_signatures_and_changed_ones(libkiln_core: Core) -> None:
    assert compared(libkiln_core, SAMPLE) == 13 * SAMPLE


CHOSEN = {
    "zeros": bytes(32), "one": bytes_of(1), "ones": b"\xff" * 32, "p": bytes_of(P), "p - 1": bytes_of(P - 1),
    "p + 1": bytes_of(P + 1), "2**255 - 1": bytes_of(SIGN - 1), "L": bytes_of(L), "L - 1": bytes_of(L - 1),
    "the base point": encode(BASE), "its negative": bytes_of(whole(encode(BASE)) ^ SIGN),
    "the base point and a part": encode(plus(BASE, SMALL[1])),
    **{f"small {i}": encode(p) for i, p in enumerate(SMALL)},
    **{name: spelled(name)[0] for name in SPELLINGS},
}  # fmt: skip
"""Bytes with which verifiers were caught (those of Wycheproof's classes), as key, R and S."""


def test_chosen_keys_and_signatures(libkiln_core: Core) -> None:
    random = Random(1)
    for key, r in product(CHOSEN.values(), repeat=2):
        for s in (bytes(32), bytes_of(1), bytes_of(L - 1), bytes_of(L), b"\xff" * 32, random.randbytes(32)):
            for message in (b"", b"message"):
                assert not ours(libkiln_core, Triple(key, message, r + s))


def test_a_signature_by_the_secret_of_one(libkiln_core: Core) -> None:
    """The accepting twin: the key is the base point itself, so that anybody can sign for it."""
    key, nonce = encode(BASE), encode(multiple(7, BASE))
    s = (7 + number(nonce, key, b"message") % L) % L
    assert ours(libkiln_core, Triple(key, b"message", nonce + bytes_of(s)))
    assert not ours(libkiln_core, Triple(key, b"message", nonce + bytes_of((s + 1) % L)))
