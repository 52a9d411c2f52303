"""Thousands of seeded mutations of good bytes: C and Python say the same of each, and neither anything
untyped."""

import random
import struct
from collections.abc import Callable

import pytest

from kiln.runtime.manifest import canonical_json
from kiln.tests.cubins import compiled, shared_object
from kiln.tests.runtime.c.core_build import ACCEPTED, Core
from kiln.tests.runtime.c.documents import agrees, index_agrees, rich
from kiln.tests.runtime.c.test_artifacts import agrees as artifact_agrees
from kiln.tests.runtime.test_cubin import held
from kiln.tests.runtime.test_manifest import index, small, text_of
from kiln.tests.trees import C_SOURCE

WORDS = (
    *(
        b"null",
        b"true",
        b"false",
        b"0",
        b"-1",
        b"1.5",
        b"1e400",
        b"9223372036854775808",
        b'""',
        b'"x"',
        b"[]",
        b"{}",
        b'["dim", "M"]',
    ),
    *(
        b"\\u0000",
        b"\\ud800",
        b"\\u0061",
        b"\xc3\xa9",
        b"\xed\xa0\x80",
        b"NaN",
        b",",
        b":",
        b'"',
        b"}",
        b"]",
        b"temp:",
        b"scratch:",
    ),
    *(
        b"out",
        b"sm_90a",
        b"cpu-x86_64",
        b"arg",
        b"attr",
        b"stride",
        b"aligned",
        b"-0",
        b"2",
        b"con.so",
        b"..",
        b"/",
        b"\x7f",
        b"\t",
    ),
)


def cut_up(document: bytes, rng: random.Random) -> bytes:
    """A document with a few bytes, words, tokens or pieces changed."""
    data = bytearray(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, size = rng.randrange(len(data)), rng.choice((0, 1, 1, 2, 5, 20))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + max(size, 1)]
        elif kind == 2:
            data[at : at + size] = rng.choice(WORDS)
        elif kind == 3:
            other = rng.randrange(len(document))
            data[at : at + size] = document[other : other + rng.randrange(30)]
        else:
            swap_tokens(data, rng)
    return bytes(data)


def swap_tokens(data: bytearray, rng: random.Random) -> None:
    """Put one quoted word in the place of another: names and values that are legal elsewhere."""
    marks = [i for i, c in enumerate(data) if c == ord('"')]
    if len(marks) < 4:
        return
    first, second = (rng.randrange(len(marks) // 2) * 2 for _ in range(2))
    word = data[marks[first] : marks[first + 1] + 1]
    data[marks[second] : marks[second + 1] + 1] = word


@pytest.mark.parametrize("seed", range(4))
def test_manifests(libkiln_core: Core, seed: int) -> None:
    rng, accepted = random.Random(seed), 0
    document = text_of(small() if seed % 2 else rich())
    for _ in range(1000):
        data = cut_up(document, rng)
        accepted += agrees(libkiln_core, data) == ACCEPTED
    assert accepted > 20


def test_indices(libkiln_core: Core) -> None:
    rng, accepted, document = random.Random(9), 0, canonical_json(index())
    for _ in range(3000):
        accepted += index_agrees(libkiln_core, cut_up(document, rng)) == ACCEPTED
    assert accepted > 20


def overwritten(data: bytes, rng: random.Random) -> bytes:
    """An artifact with numbers of its tables changed: at its ends, where headers are, and anywhere."""
    values = (
        0,
        1,
        2,
        0x7F,
        0x80,
        0xFF,
        0xFFFF,
        0x7FFFFFFF,
        0xFFFFFFFF,
        1 << 63,
        (1 << 64) - 1,
        len(data),
        len(data) - 64,
    )
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice(
            (rng.randrange(64), rng.randrange(len(out)), len(out) - 1 - rng.randrange(min(1800, len(out))))
        )
        form = rng.choice("<B <H <I <Q".split())
        size = struct.calcsize(form)
        at = min(at, len(out) - size)
        old = struct.unpack_from(form, out, at)[0]
        new = rng.choice(
            (
                rng.choice(values),
                rng.getrandbits(8 * size),
                old + 1,
                old - 1,
                old ^ 1 << rng.randrange(8 * size),
            )
        )
        struct.pack_into(form, out, at, new & (1 << 8 * size) - 1)
    return bytes(out)


ARTIFACTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "sm_80": ("sm_80", lambda: compiled()["doubled", "sm_80"].data),
    "sm_90a": ("sm_90a", lambda: compiled()["scaled_sum", "sm_90a"].data),
    "sm_120a": ("sm_120a", lambda: compiled()["doubled", "sm_120a"].data),
    "old layout": ("sm_86", lambda: held("sm_86", tool="ptxas")),
    "x86-64": ("cpu-x86_64", lambda: shared_object(C_SOURCE)),
    "AArch64": ("cpu-aarch64", lambda: shared_object(C_SOURCE, "aarch64-linux-gnu.2.17")),
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_artifacts(libkiln_core: Core, name: str) -> None:
    target, make = ARTIFACTS[name]
    data, rng, refused = make(), random.Random(name), 0
    for _ in range(1500):
        refused += artifact_agrees(libkiln_core, target, overwritten(data, rng)) != ACCEPTED
    assert 200 < refused < 1500
