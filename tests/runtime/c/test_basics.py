"""Errors, memory and digests: what everything else in libkiln stands on."""

import ctypes
import hashlib
import random
from itertools import pairwise

import pytest

from kiln.tests.runtime.c.core_build import Core, Error

SIZE_MAX = (1 << 64) - 1


def test_digests_of_every_length(libkiln_core: Core) -> None:
    out, text = (ctypes.c_uint8 * 32)(), ctypes.create_string_buffer(65)
    for length in [*range(200), 1000, 4095, 4096, 1 << 20]:
        data = random.Random(length).randbytes(length)
        libkiln_core.lib.kiln_sha256(data, ctypes.c_size_t(length), out)
        libkiln_core.lib.kiln_hex(out, ctypes.c_size_t(32), text)
        assert text.value.decode() == hashlib.sha256(data).hexdigest(), length


@pytest.mark.parametrize("room", range(2040, 2060))
def test_long_messages_end_with_an_ellipsis_between_characters(libkiln_core: Core, room: int) -> None:
    error, text = Error(), "é" * (room // 2) + "x" * (room % 2) + "end"
    assert libkiln_core.lib.kiln_fail(ctypes.byref(error), 3, b"%s", text.encode()) == 3
    found = error.message.decode()
    whole = len(text.encode()) < 2048
    assert found == text if whole else (found.endswith("…") and text.startswith(found[:-1]))
    assert error.code == 3
    assert libkiln_core.lib.kiln_fail(None, 2, b"nobody listens") == 2


@pytest.mark.parametrize(
    ("count", "size"),
    [(SIZE_MAX, 1), (SIZE_MAX, 2), (1 << 32, 1 << 32), ((1 << 63) + 1, 2), (SIZE_MAX // 2, 1), (1, SIZE_MAX)],
)
def test_sizes_that_overflow_are_no_memory(libkiln_core: Core, count: int, size: int) -> None:
    libkiln_core.lib.kiln_arena_get.restype = ctypes.c_void_p
    with libkiln_core.arena() as arena:
        assert libkiln_core.lib.kiln_arena_get(arena, ctypes.c_size_t(count), ctypes.c_size_t(size)) is None
        assert libkiln_core.lib.kiln_arena_get(arena, ctypes.c_size_t(3), ctypes.c_size_t(5))


def test_memory_is_zeroed_aligned_and_apart(libkiln_core: Core) -> None:
    libkiln_core.lib.kiln_arena_get.restype = ctypes.c_void_p
    with libkiln_core.arena() as arena:
        places = []
        for size in [1, 15, 16, 17, 4000, 5000, 1 << 21, 0, 3]:
            at = libkiln_core.lib.kiln_arena_get(arena, ctypes.c_size_t(size), ctypes.c_size_t(1))
            assert at % 16 == 0
            assert not any(ctypes.string_at(at, size))
            ctypes.memset(at, 0xFF, size)
            places.append((at, at + size))
        places.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(places))
