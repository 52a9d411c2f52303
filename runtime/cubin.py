"""Kiln's own reader of cubins: what a CUDA binary says of itself, without a driver or any NVIDIA tool.

It reads both layouts in use: the one that ptxas 12.9 and older write for sm_90 and below (OSABI 0x33), and
the newer one (OSABI 0x41). A cubin that parses is still no proof of anything; `kiln.runtime.proof` compares
what is read here with a manifest.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from kiln.runtime.elf import SHN_LORESERVE, Elf, Section, Symbol, read_elf, refuse, text_at

EM_CUDA, ET_EXEC = 190, 2
OLD_ABI, NEW_ABI = (0x33, 7), (0x41, 8)

RESERVED_SHARED = 1024
"""From sm_90 on `.nv.shared.<kernel>`, where there is one, starts with this many bytes that belong to the
system: the section of a kernel with 6000 bytes of its own has 7024. The driver's SHARED_SIZE_BYTES and Triton
don't count them."""

MAX_SHARED = 1 << 20
SHT_SYMTAB = 2
STB_GLOBAL, STT_FUNC, STO_CUDA_ENTRY = 1, 2, 0x10

_MAX_THREADS, _REQNTID = 0x05, 0x10
_FRAME_SIZE, _MIN_STACK, _KPARAM, _CBANK_SIZE = 0x11, 0x12, 0x17, 0x19
_REGCOUNT, _CTA_PER_CLUSTER, _KPARAM_V2, _NUM_BARRIERS = 0x2F, 0x3D, 0x45, 0x4C
_PARAM_CBANK = 0x0A
_ACCELERATOR = 0x09
_OF_SYMBOLS = frozenset({_REGCOUNT, _FRAME_SIZE, _MIN_STACK})
_PARAMS = frozenset({_KPARAM, _KPARAM_V2})
_SHAPES = frozenset({_REQNTID, _MAX_THREADS, _CTA_PER_CLUSTER})
_OF_KERNELS = _PARAMS | _SHAPES | {_PARAM_CBANK, _CBANK_SIZE, _NUM_BARRIERS}
_NOTE_CUINFO, _NOTE_TKINFO = 1000, 2000
_VENDOR = b"NVIDIA Corp\0"

_RECORD = struct.Struct("<BBH")
_SYMBOL_VALUE = struct.Struct("<II")
_PARAM = struct.Struct("<IHHI")
_PARAM_V2 = struct.Struct("<IHHHxx")
_TRIPLE = struct.Struct("<III")
_BANK = struct.Struct("<IHH")


class CubinParam(NamedTuple):
    """One kernel parameter: its place among the parameters, and its bytes in the parameter block."""

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True)
class CubinKernel:
    """One entry point of a cubin."""

    name: str
    params: tuple[CubinParam, ...]
    """By ordinal, gapless from 0."""
    param_base: int
    """Where the parameter block begins in its constant bank: what an offset's alignment counts from."""
    param_bytes: int
    """Size of the parameter block."""
    reqntid: tuple[int, int, int] | None
    """The block shape that a launch must have, where the kernel fixes one."""
    max_threads: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    """CTAs of a cluster, where the kernel fixes them."""
    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread: the larger of the kernel's frame and its whole call tree's minimum."""
    static_shared: int
    """Bytes per block, without the 1024 that the system takes from sm_90 on."""
    barriers: int
    code_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A parsed cubin."""

    sm: int
    """Compute capability as one number: 90 for 9.0."""
    arch_suffix: str
    """`a` (accelerated: that one architecture only), `f` (family), or nothing."""
    abi: int
    """7 (old) or 8."""
    toolkit: tuple[int, int]
    """CUDA version of the assembler, which bounds the drivers that can load it."""
    kernels: dict[str, CubinKernel]
    elf: Elf
    """The container, for those who compare sections."""

    @property
    def arch(self) -> str:
        """The architecture as compilers spell it: `sm_90a`."""
        return f"sm_{self.sm}{self.arch_suffix}"


_Attr = tuple[int, int, bytes]
"""Attribute, the two bytes beside it, and the value: 74,000 of them lie in a whole tree."""


def read_cubin(data: bytes) -> Cubin:
    """Read a cubin.

    Raises kiln.runtime.elf.ElfError if it isn't a whole, executable CUDA ELF of a known layout with sound
    tables; no other error leaves this function.
    """
    elf = read_elf(data)
    if elf.machine != EM_CUDA:
        refuse(f"machine {elf.machine}, expected {EM_CUDA} (CUDA)")
    if elf.kind != ET_EXEC:
        refuse(
            f"ELF type {elf.kind}, expected {ET_EXEC}: only linked cubins can be loaded, a relocatable one "
            "cannot"
        )
    if (elf.osabi, elf.abi_version) not in (OLD_ABI, NEW_ABI):
        refuse(
            f"CUDA ABI {elf.osabi:#x} version {elf.abi_version}, expected 0x33 version 7 or 0x41 version 8"
        )
    old = elf.osabi == OLD_ABI[0]
    sm, suffix = _architecture(elf, old)
    toolkit = _toolkit(elf, old)
    return Cubin(sm, suffix, elf.abi_version, toolkit, _read_kernels(elf, sm), elf)


def _attributes(elf: Elf, section: Section, wanted: Set[int]) -> list[_Attr]:
    """The records of a `.nv.info`-like section that are of the attributes `wanted`; all are checked."""
    body, at, found = elf.body(section), 0, []
    end = len(body)
    while at < end:
        if at + 4 > end:
            refuse(f"section {section.name!r} ends within the record at byte {at}")
        fmt, attr, small = _RECORD.unpack_from(body, at)
        if not 1 <= fmt <= 4:
            refuse(f"section {section.name!r} has a record of format {fmt}, expected 1 to 4")
        start = at + 4
        at = start + small if fmt == 4 else start
        if at > end:
            refuse(f"a record of section {section.name!r} has {small} bytes, {end - start} are left")
        if attr in wanted:
            found.append((attr, small, body[start:at]))
    return found


def _architecture(elf: Elf, old: bool) -> tuple[int, str]:
    """(compute capability, suffix).

    Two places hold the suffix: a flag (old layout, and 12.9 in the new one) or `.nv.compat` (13.x, which
    leaves the flag clear). Neither knows `f`: that stands in the assembler's option string alone.
    """
    accelerated = bool(elf.flags & (0x800 if old else 0x8))
    sm = elf.flags & 0xFF if old else elf.flags >> 8 & 0xFF
    compat = elf.find(".nv.compat")
    if compat is not None:
        for _, small, _ in _attributes(elf, compat, {_ACCELERATOR}):
            accelerated = accelerated or bool(small & 0xFF)
    suffix = "a" if accelerated else ""
    told = re.search(r"-arch[ =]sm_(\d{1,4})([af]?)(?![0-9a-z])", _tool_strings(elf)[1])
    if told is not None:
        if (int(told[1]), told[2] == "a") != (sm, accelerated):
            refuse(f"the header says sm_{sm}{suffix}, the assembler's options say sm_{told[1]}{told[2]}")
        suffix = told[2]
    return sm, suffix


def _note(elf: Elf, name: str, kind: int) -> bytes:
    """The description of the one note of a section, or nothing if there is no such section."""
    section = elf.find(name)
    if section is None:
        return b""
    body = elf.body(section)
    if len(body) < 24:
        refuse(f"note {name!r} has {len(body)} bytes, expected 24 and more")
    namesz, descsz, found = struct.unpack_from("<III", body)
    if (namesz, found, body[12:24]) != (len(_VENDOR), kind, _VENDOR) or 24 + descsz > len(body):
        refuse(
            f"note {name!r} has name size {namesz}, type {found}, {descsz} bytes in {len(body)}: expected "
            f"type {kind}"
        )
    return body[24 : 24 + descsz]


def _tool_strings(elf: Elf) -> tuple[str, str]:
    """(release text, option string) that the assembler left of itself; empty where it left none."""
    desc = _note(elf, ".note.nv.tkinfo", _NOTE_TKINFO)
    if not desc:
        return "", ""
    if len(desc) < 24:
        refuse(f"note '.note.nv.tkinfo' describes {len(desc)} bytes, expected 24 and more")
    release, _, options = struct.unpack_from("<III", desc, 12)
    return text_at(desc[24:], release, "release string"), text_at(desc[24:], options, "option string")


def _toolkit(elf: Elf, old: bool) -> tuple[int, int]:
    """CUDA version of the assembler: the ELF version in the old layout, a note (of 13.x) or its words (12.9)
    in the new."""
    if old:
        code = elf.version
    elif elf.version != 1:
        refuse(f"ELF version {elf.version}, expected 1 in the new CUDA layout")
    elif ".note.nv.cuinfo" in elf.by_name:
        desc = _note(elf, ".note.nv.cuinfo", _NOTE_CUINFO)
        if len(desc) < 8:
            refuse(f"note '.note.nv.cuinfo' describes {len(desc)} bytes, expected 8")
        code = struct.unpack_from("<H", desc, 4)[0]
    else:
        told = re.search(r"release (\d{2})\.(\d)\b", _tool_strings(elf)[0])
        code = int(told[1] + told[2]) if told else 0
    if not 100 <= code < 1000:
        refuse(f"toolkit version {code}, expected 100 (CUDA 10.0) to 999")
    return code // 10, code % 10


def _read_kernels(elf: Elf, sm: int) -> dict[str, CubinKernel]:
    table = elf.find(".symtab")
    if table is None or table.kind != SHT_SYMTAB:
        refuse("there is no symbol table, so no kernel can be found")
    symbols = elf.symbols(table)
    per_symbol = _per_symbol(elf, len(symbols))
    kernels: dict[str, CubinKernel] = {}
    for index, symbol in enumerate(symbols):
        if (symbol.binding, symbol.kind) != (STB_GLOBAL, STT_FUNC) or not symbol.other & STO_CUDA_ENTRY:
            continue
        if symbol.name in kernels:
            refuse(f"two kernels are named {symbol.name!r}")
        kernels[symbol.name] = _read_kernel(elf, sm, index, symbol, per_symbol)
    return kernels


def _per_symbol(elf: Elf, count: int) -> dict[tuple[int, int], int]:
    """(attribute, symbol index) -> value, from the file-wide `.nv.info`."""
    section = elf.find(".nv.info")
    if section is None:
        refuse("there is no section '.nv.info', which holds register counts")
    out: dict[tuple[int, int], int] = {}
    for attr, _, payload in _attributes(elf, section, _OF_SYMBOLS):
        if len(payload) != _SYMBOL_VALUE.size:
            refuse(f"attribute {attr:#x} has {len(payload)} bytes, expected {_SYMBOL_VALUE.size}")
        symbol, value = _SYMBOL_VALUE.unpack(payload)
        if symbol >= count:
            refuse(f"attribute {attr:#x} is of symbol {symbol}, but there are {count}")
        if out.setdefault((attr, symbol), value) != value:
            refuse(f"attribute {attr:#x} of symbol {symbol} is given twice")
    return out


def _read_kernel(
    elf: Elf, sm: int, index: int, symbol: Symbol, per_symbol: dict[tuple[int, int], int]
) -> CubinKernel:
    name = symbol.name
    text = elf.sections[symbol.section] if symbol.section < SHN_LORESERVE else None
    if not name or text is None or text.name != f".text.{name}":
        refuse(
            f"kernel {name!r} has its code in {text.name if text else symbol.section!r}, expected "
            f"'.text.{name}'"
        )
    info = elf.find(f".nv.info.{name}")
    registers = per_symbol.get((_REGCOUNT, index))
    if info is None or registers is None:
        refuse(f"kernel {name!r} has no register count or no section '.nv.info.{name}'")
    params: list[CubinParam] = []
    shapes: dict[int, tuple[int, int, int]] = {}
    param_base, param_bytes, barriers = 0, 0, text.flags >> 20 & 0x7F
    for attr, small, payload in _attributes(elf, info, _OF_KERNELS):
        if attr in _PARAMS:
            params.append(_read_param(name, attr, payload))
        elif attr in _SHAPES:
            if len(payload) != _TRIPLE.size:
                refuse(f"kernel {name!r}: attribute {attr:#x} has {len(payload)} bytes, expected 12")
            shape = _TRIPLE.unpack(payload)
            if shapes.setdefault(attr, shape) != shape:
                refuse(f"kernel {name!r}: attribute {attr:#x} is given twice, {shapes[attr]} and {shape}")
        elif attr == _PARAM_CBANK:
            if len(payload) != _BANK.size:
                refuse(f"kernel {name!r}: attribute {attr:#x} has {len(payload)} bytes, expected 8")
            _, param_base, _ = _BANK.unpack(payload)
        elif attr == _CBANK_SIZE:
            param_bytes = small
        else:
            barriers = small & 0xFF
    return CubinKernel(
        name=name,
        params=_ordered(name, params, param_bytes),
        param_base=param_base,
        param_bytes=param_bytes,
        reqntid=shapes.get(_REQNTID),
        max_threads=shapes.get(_MAX_THREADS),
        cluster=shapes.get(_CTA_PER_CLUSTER),
        registers=registers,
        stack=max(per_symbol.get((_FRAME_SIZE, index), 0), per_symbol.get((_MIN_STACK, index), 0)),
        static_shared=_static_shared(elf, sm, name),
        barriers=barriers,
        code_bytes=text.size,
    )


def _read_param(name: str, attr: int, payload: bytes) -> CubinParam:
    layout = _PARAM if attr == _KPARAM else _PARAM_V2
    if len(payload) != layout.size:
        refuse(f"kernel {name!r}: a parameter record has {len(payload)} bytes, expected {layout.size}")
    _, ordinal, offset, tail = layout.unpack(payload)
    return CubinParam(ordinal, offset, tail >> 18 if attr == _KPARAM else tail)


def _ordered(name: str, params: list[CubinParam], total: int) -> tuple[CubinParam, ...]:
    """The parameters by ordinal; ElfError unless they number 0, 1, 2… and follow each other within the
    block."""
    params.sort()
    if [p.ordinal for p in params] != list(range(len(params))):
        refuse(
            f"kernel {name!r} numbers its parameters {[p.ordinal for p in params][:40]}, expected 0, 1, 2 "
            "and so on"
        )
    end = 0
    for param in params:
        if param.offset < end or not param.size:
            refuse(
                f"kernel {name!r}: parameter {param.ordinal} has {param.size} bytes at {param.offset}, "
                f"expected {end}+"
            )
        end = param.offset + param.size
    if end != total:
        refuse(f"kernel {name!r}: its parameters end at byte {end}, its parameter block at {total}")
    return tuple(params)


def _static_shared(elf: Elf, sm: int, name: str) -> int:
    section = elf.find(f".nv.shared.{name}")
    if section is None:
        return 0
    reserved = RESERVED_SHARED if sm >= 90 else 0
    if section.size < reserved or section.size > MAX_SHARED + reserved:
        refuse(
            f"kernel {name!r} has {section.size} bytes of shared memory, expected {reserved} to "
            f"{MAX_SHARED + reserved}"
        )
    return section.size - reserved
