"""Seeded mutations of good bytes: documents by words and tokens, artifacts by the numbers of their
tables."""

import random
import re
import struct

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
        b"like",
        b"params",
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
        if not data:
            break
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
    marks = [m.start() for m in re.finditer(b'"', data)]
    if len(marks) < 4:
        return
    first, second = (rng.randrange(len(marks) // 2) * 2 for _ in range(2))
    word = data[marks[first] : marks[first + 1] + 1]
    data[marks[second] : marks[second + 1] + 1] = word


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
