"""A bounded reader of little-endian ELF64 files, the container of cubins and of shared objects.

Nothing is believed: every offset, size, index and name is checked against the bytes at hand before it is
used, and bytes that no table accounts for at the end of the file are refused, so that a cut or extended file
never passes as whole. Every refusal is an `ElfError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from kiln.runtime.errors import IntegrityError

MAX_BYTES = 64 << 20
MAX_SECTIONS = 8192
MAX_SEGMENTS = 64
MAX_SYMBOLS = 65536
MAX_NAME = 4096

SHT_STRTAB, SHT_NOBITS = 3, 8
SHN_UNDEF, SHN_LORESERVE = 0, 0xFF00

_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class ElfError(IntegrityError):
    """The bytes are not the sound ELF file they should be."""


def refuse(why: str) -> NoReturn:
    """Raise the one error of these readers."""
    raise ElfError(f"{why}; the file is damaged or not what its name says: build it again or restore it")


class Section(NamedTuple):
    """One row of the section table; `offset` and `size` are known to lie within the file unless `kind` is
    SHT_NOBITS."""

    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    entsize: int


class Segment(NamedTuple):
    """One program header; its file range is known to lie within the file."""

    kind: int
    flags: int
    offset: int
    address: int
    filesz: int
    memsz: int


class Symbol(NamedTuple):
    """One symbol; `section` is a valid section index, or a reserved one (undefined, absolute, common)."""

    name: str
    binding: int
    kind: int
    other: int
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Elf:
    """A parsed container: header fields, sections by table order, segments."""

    data: bytes
    osabi: int
    abi_version: int
    kind: int
    machine: int
    version: int
    flags: int
    sections: tuple[Section, ...]
    segments: tuple[Segment, ...]
    by_name: dict[str, int]
    """Section index by name; names are unique."""

    def find(self, name: str) -> Section | None:
        """The section of that name."""
        index = self.by_name.get(name)
        return None if index is None else self.sections[index]

    def body(self, section: Section) -> bytes:
        """The file bytes of a section; empty for SHT_NOBITS."""
        return (
            b"" if section.kind == SHT_NOBITS else self.data[section.offset : section.offset + section.size]
        )

    def symbols(self, table: Section) -> list[Symbol]:
        """Every entry of a symbol table, names resolved.

        Raises ElfError if the table, its string table or one of its indices is unsound.
        """
        body = self.body(table)
        if table.entsize != _SYMBOL.size or len(body) % _SYMBOL.size:
            refuse(
                f"symbol table {table.name!r} has {len(body)} bytes in entries of {table.entsize}, "
                f"expected {_SYMBOL.size}"
            )
        if len(body) > MAX_SYMBOLS * _SYMBOL.size:
            refuse(
                f"symbol table {table.name!r} has {len(body) // _SYMBOL.size} symbols, the limit is "
                f"{MAX_SYMBOLS}"
            )
        if table.link >= len(self.sections) or self.sections[table.link].kind != SHT_STRTAB:
            refuse(
                f"symbol table {table.name!r} names section {table.link} as its strings, which is no "
                "string table"
            )
        rows = list(_SYMBOL.iter_unpack(body))
        names = texts_at(self.body(self.sections[table.link]), [row[0] for row in rows], "symbol name")
        count, out = len(self.sections), []
        for name, (_, info, other, shndx, value, size) in zip(names, rows, strict=True):
            if count <= shndx < SHN_LORESERVE:
                refuse(f"a symbol of {table.name!r} lies in section {shndx}, but there are {count}")
            out.append(Symbol(name, info >> 4, info & 15, other, shndx, value, size))
        return out


def text_at(table: bytes, offset: int, what: str) -> str:
    """The NUL-terminated ASCII string at `offset`; ElfError if it leaves the table or has more than 4096
    bytes."""
    end = table.find(b"\0", offset, offset + MAX_NAME + 1)
    if end < 0:
        refuse(
            f"a {what} at byte {offset} does not end within {MAX_NAME} bytes and its table of {len(table)} "
            "bytes"
        )
    try:
        return str(table[offset:end], "ascii")
    except UnicodeDecodeError:
        refuse(f"a {what} is not ASCII: {table[offset : min(end, offset + 40)]!r}")


def texts_at(table: bytes, offsets: Iterable[int], what: str) -> list[str]:
    """`text_at` for each offset; of a table that is ASCII as a whole in a third of the time."""
    if not table.isascii():
        return [text_at(table, offset, what) for offset in offsets]
    text = table.decode("ascii")
    ends = [(offset, text.find("\0", offset, offset + MAX_NAME + 1)) for offset in offsets]
    return [text[offset:end] if end >= 0 else text_at(table, offset, what) for offset, end in ends]


def read_elf(data: bytes) -> Elf:
    """Parse the container.

    Raises ElfError for anything but a whole, self-consistent ELF64 little-endian file of at most 64 MiB.
    """
    if len(data) > MAX_BYTES:
        refuse(f"the file has {len(data)} bytes, the limit is {MAX_BYTES}")
    if data[:4] != b"\x7fELF":
        refuse(f"the file starts with {data[:4]!r}, expected the ELF magic b'\\x7fELF'")
    if len(data) < _HEADER.size:
        refuse(f"the file has {len(data)} bytes, an ELF header alone has {_HEADER.size}")
    head = _HEADER.unpack_from(data)
    _, width, order, ident, osabi, abi_version, kind, machine, version, _, phoff, shoff, flags = head[:13]
    ehsize, phentsize, phnum, shentsize, shnum, shstrndx = head[13:]
    if (width, order, ident, ehsize) != (2, 1, 1, _HEADER.size):
        refuse(
            f"class {width}, byte order {order}, version {ident}, header size {ehsize}: expected 2, 1, 1, 64"
        )
    segments = _read_segments(data, phoff, phnum, phentsize)
    sections = _read_sections(data, shoff, shnum, shentsize, shstrndx)
    _check_cover(data, sections, (shoff, shnum * _SECTION.size), (phoff, phnum * _SEGMENT.size))
    by_name = {s.name: i for i, s in enumerate(sections)}
    if len(by_name) != len(sections):
        names = [s.name for s in sections]
        refuse(f"two sections are named {next(n for n in names if names.count(n) > 1)!r}")
    return Elf(data, osabi, abi_version, kind, machine, version, flags, sections, segments, by_name)


def _read_segments(data: bytes, phoff: int, phnum: int, phentsize: int) -> tuple[Segment, ...]:
    if phnum > MAX_SEGMENTS or (phnum and phentsize != _SEGMENT.size):
        refuse(
            f"{phnum} program headers of {phentsize} bytes: expected at most {MAX_SEGMENTS} of "
            f"{_SEGMENT.size}"
        )
    if phoff + phnum * _SEGMENT.size > len(data):
        refuse(f"the program headers end at byte {phoff + phnum * _SEGMENT.size}, the file at {len(data)}")
    out = []
    for kind, flags, offset, address, _, filesz, memsz, _ in _SEGMENT.iter_unpack(
        data[phoff : phoff + phnum * _SEGMENT.size]
    ):
        if offset + filesz > len(data):
            refuse(f"a segment ends at byte {offset + filesz}, the file at {len(data)}")
        out.append(Segment(kind, flags, offset, address, filesz, memsz))
    return tuple(out)


def _read_sections(data: bytes, shoff: int, shnum: int, shentsize: int, shstrndx: int) -> tuple[Section, ...]:
    if not 0 < shnum <= MAX_SECTIONS or shentsize != _SECTION.size:
        refuse(
            f"{shnum} sections of {shentsize} bytes a row: expected 1 to {MAX_SECTIONS} of {_SECTION.size}"
        )
    end = shoff + shnum * _SECTION.size
    if end > len(data):
        refuse(f"the section table ends at byte {end}, the file at {len(data)}")
    rows = list(_SECTION.iter_unpack(data[shoff:end]))
    ends = [0 if row[1] == SHT_NOBITS else row[4] + row[5] for row in rows]
    if max(ends) > len(data):
        index = next(i for i, end in enumerate(ends) if end > len(data))
        refuse(f"section {index} ends at byte {ends[index]}, the file at {len(data)}")
    if shstrndx >= shnum or rows[shstrndx][1] != SHT_STRTAB:
        refuse(
            f"section {shstrndx} should hold the section names, but is no string table among {shnum} sections"
        )
    offset, size = rows[shstrndx][4:6]
    names = texts_at(data[offset : offset + size], [row[0] for row in rows], "section name")
    _, kinds, flags, addresses, offsets, sizes, links, infos, _, entsizes = zip(*rows, strict=True)
    return tuple(map(Section, names, kinds, flags, addresses, offsets, sizes, links, infos, entsizes))


def _may_share(name: str) -> bool:
    twin = name.removeprefix(".nv.merc")
    return "debug" in name or twin.startswith((".nv.constant", ".nv.global"))


def _check_cover(data: bytes, sections: tuple[Section, ...], *tables: tuple[int, int]) -> None:
    """Refuse parts that share bytes, and a file that goes on after its last part.

    Data sections may share theirs with their `.nv.merc` twins: from sm_100 on ptxas lays
    `.nv.merc.debug_str` over `.debug_str`, and so on. Code may not.
    """
    parts = [(0, _HEADER.size, _HEADER_NAME)]
    parts += [(start, size, _TABLE_NAME) for start, size in tables if size]
    parts += [(s.offset, s.size, s.name) for s in sections if s.size and s.kind and s.kind != SHT_NOBITS]
    parts.sort()
    reached, owner = 0, ""
    for start, size, name in parts:
        if start < reached and not (_may_share(owner) and _may_share(name)):
            refuse(f"{_part(name)} at byte {start} overlaps {_part(owner)}, which ends at {reached}")
        if start + size > reached:
            reached, owner = start + size, name
    if reached != len(data):
        refuse(f"the file has {len(data)} bytes, but its last part, {_part(owner)}, ends at {reached}")


_HEADER_NAME, _TABLE_NAME = "\0header", "\0table"
"""Among the names of sections, which hold no NUL."""


def _part(name: str) -> str:
    return {_HEADER_NAME: "the ELF header", _TABLE_NAME: "a table of headers"}.get(name, f"section {name!r}")
