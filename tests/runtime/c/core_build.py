"""Builds the core of libkiln once a session, every symbol visible, and calls it: documents, artifacts and
trees as bytes, verdicts as values that compare with what the Python runtime says."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kiln.runtime.errors import IntegrityError, KilnError, SchemaError, UnavailableError

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "runtime" / "c"

CODES = {
    0: "accepted",
    2: "IntegrityError",
    3: "SchemaError",
    4: "TargetError",
    6: "UnavailableError",
    8: "MemoryError",
}
"""kiln_code -> the Python exception of the same meaning."""


class Verdict(NamedTuple):
    """What a reader said of some bytes."""

    code: str
    message: str

    @property
    def place(self) -> str:
        """The JSON pointer of a schema error; empty for others, and where a name in it is hard to show."""
        head, found, _ = self.message.partition(": found ")
        place = head.rpartition(" at ")[2] if found else ""
        plain = place.isascii() and place.isprintable() and not set(place) & set("\\'\"") and len(place) < 200
        return place if plain and place.startswith("/") else ""


ACCEPTED = Verdict("accepted", "")


def python_verdict(read: Callable[[], object]) -> Verdict:
    """The verdict of the Python runtime."""
    try:
        read()
    except (SchemaError, IntegrityError, UnavailableError, KilnError) as e:
        kinds = (SchemaError, IntegrityError, UnavailableError, KilnError)
        return Verdict(next(c.__name__ for c in kinds if isinstance(e, c)), str(e))
    return ACCEPTED


def compiler() -> list[str]:
    """gcc where there is one, else zig."""
    gcc = shutil.which("gcc")
    return [gcc] if gcc else [sys.executable, "-m", "ziglang", "cc"]


CORE = (
    *(
        "archive",
        "arena",
        "consistency",
        "cubin",
        "decimal",
        "ed25519",
        "elf",
        "error",
        "expr",
        "fields",
        "json",
    ),
    *(
        "manifest",
        "names",
        "object",
        "proof",
        "resolve",
        "schema",
        "sha256",
        "sha512",
        "targets",
        "text",
        "tree",
    ),
    "verify",
)
"""The files that read and prove; the rest of libkiln binds and launches."""


def build(folder: Path, *options: str) -> Path:
    """A shared object of the core and of dump.c; any warning is an error."""
    out = folder / "core.so"
    files = [*(SOURCES / f"{name}.c" for name in CORE), HERE / "dump.c"]
    command = [*compiler(), "-std=c11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *options]
    command += [f"-I{SOURCES}", f"-I{SOURCES / 'include'}", "-shared", "-o", str(out), *map(str, files)]
    env = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=str(folder / "zig"), ZIG_LOCAL_CACHE_DIR=str(folder / "zig"))
    made = subprocess.run(command, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return out


class Error(ctypes.Structure):
    """kiln_error"""

    _fields_ = (("code", ctypes.c_int), ("driver", ctypes.c_int), ("message", ctypes.c_char * 2048))


_SEEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)


class Core:
    """The functions of the core."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name in ("kiln_arena_new", "test_dump", "test_dump_index", "test_prove"):
            getattr(self.lib, name).restype = ctypes.c_void_p
        self.lib.test_sizes.restype = ctypes.c_size_t
        self.lib.kiln_arena_free.restype = None
        for name in ("kiln_ed25519_verify", "kiln_decimal", "kiln_target_runs_on"):
            getattr(self.lib, name).restype = ctypes.c_bool
        self.lib.kiln_cpu_lacks.restype = ctypes.c_char_p

    @contextmanager
    def arena(self) -> Iterator[ctypes.c_void_p]:
        """Memory that is given back at the end."""
        made = ctypes.c_void_p(self.lib.kiln_arena_new())
        try:
            yield made
        finally:
            self.lib.kiln_arena_free(made)

    def _text(self, address: int) -> str:
        text = ctypes.string_at(address).decode()
        self.lib.test_free(ctypes.c_void_p(address))
        return text

    def json(self, data: bytes) -> Verdict:
        """Strict JSON alone."""
        error, value = Error(), (ctypes.c_char * 64)()
        with self.arena() as arena:
            size = ctypes.c_size_t(len(data))
            code = self.lib.kiln_json_parse(arena, b"X.json", data, size, value, ctypes.byref(error))
        return _verdict(code, error)

    @contextmanager
    def manifest(self, data: bytes, target: str | None = None) -> Iterator[tuple[Verdict, Any]]:
        """A manifest's verdict, and the manifest itself as long as the block runs."""
        error, out = Error(), (ctypes.c_char * self.lib.test_sizes(0))()
        name = None if target is None else target.encode()
        with self.arena() as arena:
            args = (arena, b"MANIFEST.json", name, data, ctypes.c_size_t(len(data)), out, ctypes.byref(error))
            yield _verdict(self.lib.kiln_parse_manifest(*args), error), out

    def manifest_verdict(self, data: bytes, target: str | None = None) -> Verdict:
        """What is said of a manifest."""
        with self.manifest(data, target) as (verdict, _):
            return verdict

    def manifest_dump(self, data: bytes, target: str | None = None) -> str:
        """A good manifest as text."""
        with self.manifest(data, target) as (verdict, parsed):
            assert verdict == ACCEPTED, verdict
            return self._text(self.lib.test_dump(parsed))

    def index(self, data: bytes) -> tuple[Verdict, str]:
        """An index's verdict and, of a good one, its text."""
        error, out = Error(), (ctypes.c_char * self.lib.test_sizes(1))()
        with self.arena() as arena:
            args = (arena, b"INDEX.json", data, ctypes.c_size_t(len(data)), out, ctypes.byref(error))
            verdict = _verdict(self.lib.kiln_parse_index(*args), error)
            return verdict, self._text(self.lib.test_dump_index(out)) if verdict == ACCEPTED else ""

    def artifact(self, target: str, data: bytes) -> Verdict:
        """What is said of an artifact's bytes."""
        error = Error()
        size = ctypes.c_size_t(len(data))
        code = self.lib.test_read_artifact(target.encode(), data, size, ctypes.byref(error))
        return _verdict(code, error)

    def prove(self, document: bytes, data: bytes, kernel: int = 0) -> tuple[list[str], Verdict]:
        """Every fault of a manifest's kernel, and what kiln_prove says."""
        with self.manifest(document) as (verdict, parsed):
            assert verdict == ACCEPTED, verdict
            size, error = ctypes.c_size_t(len(data)), Error()
            text = self._text(self.lib.test_prove(parsed, ctypes.c_uint32(kernel), data, size))
            kernels = _pointer_after(parsed, self.lib.test_sizes(3))
            place = ctypes.c_void_p(kernels + kernel * self.lib.test_sizes(2))
            code = self.lib.kiln_prove(parsed, place, data, size, ctypes.byref(error))
            return text.splitlines(), _verdict(code, error)

    def verify(self, tree: Path | bytes, expect: str | None = None) -> tuple[Verdict, list[tuple[str, str]]]:
        """The faults of a tree: a folder, or an archive in memory."""
        error, handle, count = Error(), ctypes.c_void_p(), ctypes.c_uint32()
        if isinstance(tree, bytes):
            size = ctypes.c_size_t(len(tree))
            code = self.lib.kiln_tree_embedded(tree, size, ctypes.byref(handle), ctypes.byref(error))
        else:
            code = self.lib.kiln_tree_open(os.fsencode(tree), ctypes.byref(handle), ctypes.byref(error))
        if code:
            return _verdict(code, error), []
        found: list[tuple[str, str]] = []
        seen = _SEEN(lambda _, file, why: found.append((file.decode(), why.decode())))
        wanted = None if expect is None else expect.encode()
        out = (ctypes.byref(count), ctypes.byref(error))
        code = self.lib.kiln_tree_verify(handle, wanted, seen, None, *out)
        self.lib.kiln_tree_close(handle)
        assert count.value == len(found)
        return _verdict(code, error), found


def _pointer_after(parsed: Any, offset: int) -> int:
    return ctypes.c_void_p.from_buffer(parsed, offset).value or 0


def _verdict(code: int, error: Error) -> Verdict:
    assert code == 0 or error.code == code
    return Verdict(CODES[code], error.message.decode() if code else "")
