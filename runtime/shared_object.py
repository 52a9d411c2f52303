"""What a CPU artifact says of itself: machine, exported functions, and whatever would run or load when it is
opened.

The loader of the system goes by the dynamic segment, so that is what is read; the section table must agree
with it, or the file is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kiln.runtime.elf import SHN_UNDEF, Elf, Section, Segment, read_elf, refuse, text_at

ET_DYN = 3
MACHINES = {62: "x86_64", 183: "aarch64"}
_IRELATIVE = {62: 37, 183: 1032}

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
PF_X, PF_W = 1, 2
SHT_DYNAMIC, SHT_DYNSYM = 6, 11
STT_FUNC, STT_GNU_IFUNC = 2, 10
STB_LOCAL = 0
STV_VISIBLE = (0, 3)

_DT_NEEDED, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB = 1, 2, 5, 6
_DT_RELA, _DT_RELASZ, _DT_STRSZ, _DT_REL, _DT_JMPREL = 7, 8, 10, 17, 23
_LIBRARY_TAGS = (
    _DT_NEEDED,
    0x7FFFFFFD,
    0x7FFFFFFF,
)  # needed, auxiliary, filter: each makes the loader open another file
_CODE_TAGS = (12, 13, 25, 26, 32)  # init, fini, init_array, fini_array, preinit_array
_CODE_SECTIONS = (".init", ".fini", ".ctors", ".dtors", ".init_array", ".fini_array", ".preinit_array")

_DYNAMIC = struct.Struct("<QQ")
_RELA = struct.Struct("<QQq")


@dataclass(frozen=True)
class SharedObject:
    """A parsed shared object."""

    machine: str
    """`x86_64` or `aarch64`."""
    exports: dict[str, int]
    """The functions it offers, and the code bytes of each."""
    undefined: tuple[str, ...]
    """Names it takes from the process that opens it, sorted."""
    needed: tuple[str, ...]
    """Libraries that are opened along with it."""
    has_init: bool
    """Whether opening or closing it runs code of its own (constructors, destructors, indirect functions)."""
    exec_stack: bool
    """Whether opening it makes stacks executable, or maps memory that is writable and executable."""
    elf: Elf
    """The container, for those who compare sections."""


def read_shared_object(data: bytes) -> SharedObject:
    """Read an x86-64 or AArch64 shared object.

    Raises kiln.runtime.elf.ElfError if it isn't a whole one whose sections and dynamic segment agree.
    """
    elf = read_elf(data)
    if elf.machine not in MACHINES:
        refuse(f"machine {elf.machine}, expected 62 (x86-64) or 183 (AArch64)")
    if elf.kind != ET_DYN or elf.version != 1 or elf.osabi not in (0, 3):
        refuse(
            f"ELF type {elf.kind}, version {elf.version}, OS ABI {elf.osabi}: expected 3 (shared object), "
            "1, 0 or 3"
        )
    tags = _dynamic_tags(elf)
    table = elf.find(".dynsym")
    if table is None or table.kind != SHT_DYNSYM or not 0 < table.link < len(elf.sections):
        refuse("there is no dynamic symbol table")
    strings = elf.sections[table.link]
    _check_agreement(elf, tags, table, strings)
    symbols = elf.symbols(table)[1:]
    names = elf.body(strings)
    exports = [
        s for s in symbols if s.binding != STB_LOCAL and s.section != SHN_UNDEF and s.other & 3 in STV_VISIBLE
    ]
    functions = [s for s in exports if s.kind == STT_FUNC]
    for symbol in functions:
        if not any(g.flags & PF_X and g.address <= symbol.value < g.address + g.filesz for g in _loads(elf)):
            refuse(f"function {symbol.name!r} at {symbol.value:#x} lies in no executable segment")
    return SharedObject(
        machine=MACHINES[elf.machine],
        exports={s.name: s.size for s in sorted(functions)},
        undefined=tuple(sorted(s.name for s in symbols if s.section == SHN_UNDEF)),
        needed=tuple(text_at(names, value, "library name") for tag, value in tags if tag in _LIBRARY_TAGS),
        has_init=_runs_code(elf, tags, any(s.kind == STT_GNU_IFUNC for s in symbols)),
        exec_stack=any(g.flags & PF_X and (g.kind == PT_GNU_STACK or g.flags & PF_W) for g in elf.segments),
        elf=elf,
    )


def _loads(elf: Elf) -> list[Segment]:
    return [g for g in elf.segments if g.kind == PT_LOAD]


def _file_offset(elf: Elf, address: int, size: int, what: str) -> int:
    """Where the bytes that will lie at `address` stand in the file."""
    for segment in _loads(elf):
        if segment.address <= address and address + size <= segment.address + segment.filesz:
            return segment.offset + address - segment.address
    refuse(f"{what} at address {address:#x} ({size} bytes) lies in no loaded segment")


def _dynamic_tags(elf: Elf) -> list[tuple[int, int]]:
    found = [g for g in elf.segments if g.kind == PT_DYNAMIC]
    if len(found) != 1:
        refuse(f"{len(found)} dynamic segments, expected 1")
    segment, section = found[0], elf.find(".dynamic")
    place = (segment.offset, segment.filesz, segment.address)
    if (
        section is None
        or section.kind != SHT_DYNAMIC
        or (section.offset, section.size, section.address) != place
    ):
        refuse("the section '.dynamic' isn't the dynamic segment")
    if _file_offset(elf, segment.address, segment.filesz, "the dynamic segment") != segment.offset:
        refuse("the dynamic segment is loaded from elsewhere than it says")
    if segment.filesz % _DYNAMIC.size:
        refuse(f"the dynamic segment has {segment.filesz} bytes, expected a multiple of {_DYNAMIC.size}")
    tags: list[tuple[int, int]] = []
    for tag, value in _DYNAMIC.iter_unpack(elf.body(section)):
        if tag == 0:
            return tags
        tags.append((tag, value))
    refuse("the dynamic segment has no end mark")


def _check_agreement(elf: Elf, tags: list[tuple[int, int]], table: Section, strings: Section) -> None:
    """The tables that the sections show must be those that the system's loader will use."""
    for tag, want, what in (
        (_DT_SYMTAB, table.address, "symbol table"),
        (_DT_STRTAB, strings.address, "string table"),
        (_DT_STRSZ, strings.size, "string table size"),
    ):
        values = [value for t, value in tags if t == tag]
        if values != [want]:
            refuse(f"the dynamic segment gives {what} {values}, the sections give [{want}]")
    for section in (table, strings):
        if _file_offset(elf, section.address, section.size, section.name) != section.offset:
            refuse(f"section {section.name!r} is loaded from elsewhere than it says")


def _runs_code(elf: Elf, tags: list[tuple[int, int]], indirect: bool) -> bool:
    values = dict(tags)
    if indirect or any(tag in values for tag in _CODE_TAGS):
        return True
    if any(s.size for s in elf.sections if s.name.startswith(_CODE_SECTIONS)):
        return True
    if _DT_REL in values:
        refuse("relocations without addends (DT_REL), expected DT_RELA on these machines")
    for start, length in ((_DT_RELA, _DT_RELASZ), (_DT_JMPREL, _DT_PLTRELSZ)):
        size = values.get(length, 0)
        if start in values and size:
            at = _file_offset(elf, values[start], size, "a relocation table")
            if size % _RELA.size:
                refuse(f"a relocation table has {size} bytes, expected a multiple of {_RELA.size}")
            if any(
                info & 0xFFFFFFFF == _IRELATIVE[elf.machine]
                for _, info, _ in _RELA.iter_unpack(elf.data[at : at + size])
            ):
                return True
    return False
