"""The cubin and shared object readers: right on real files, and one typed error on everything else."""

from __future__ import annotations

import random
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiln.runtime.cubin import read_cubin
from kiln.runtime.elf import ElfError, read_elf
from kiln.runtime.errors import IntegrityError
from kiln.runtime.shared_object import read_shared_object
from kiln.tests.cubins import CUDA_ARCHES, assemble, compiled, nvidia_tool, shared_object
from kiln.tests.trees import C_SOURCE

PTX = """
.version {version}
.target {target}
.address_size 64
.visible .entry held(.param .u64 p, .param .align 16 .b8 s[{struct_bytes}]) .reqntid 64, 2, 1 {{
  .shared .align 16 .b8 here[{shared_bytes}];
  .reg .b64 %d<4>; .reg .b32 %r<4>;
  ld.param.u64 %d1, [p]; ld.param.u32 %r1, [s+4];
  mov.u32 %r2, %tid.x; mov.u64 %d2, here; cvt.u32.u64 %r3, %d2; add.u32 %r2, %r2, %r3;
  st.shared.u32 [%r2], %r1; bar.sync 0; bar.sync 3; ld.shared.u32 %r1, [here+8]; st.global.u32 [%d1], %r1;
  ret;
}}
"""


def held(arch: str, shared_bytes: int = 6000, struct_bytes: int = 24, tool: str = "ptxas-blackwell") -> bytes:
    text = PTX.format(
        version="9.0" if tool != "ptxas" else "8.8",
        target=arch,
        shared_bytes=shared_bytes,
        struct_bytes=struct_bytes,
    )
    return assemble(text, arch, tool)


def res_usage(data: bytes, folder: Path) -> dict[str, int]:
    (folder / "k.cubin").write_bytes(data)
    command = [nvidia_tool("cuobjdump"), "-res-usage", str(folder / "k.cubin")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}


@pytest.mark.parametrize("target", CUDA_ARCHES)
@pytest.mark.parametrize("name", ["scaled_sum", "spilling", "doubled"])
def test_reads_what_cuobjdump_and_triton_say(name: str, target: str, tmp_path: Path) -> None:
    made = compiled()[name, target]
    cubin = read_cubin(made.data)
    kernel, told = cubin.kernels[name], res_usage(made.data, tmp_path)
    assert (cubin.arch, list(cubin.kernels)) == (target, [name])
    assert cubin.toolkit == ((12, 9) if cubin.sm < 90 else (13, 4))
    assert kernel.reqntid == (made.threads, 1, 1)
    assert (kernel.registers, kernel.stack) == (told["REG"], told["STACK"])
    reserved = 1024 if cubin.sm >= 90 and told["SHARED"] else 0
    assert kernel.static_shared == told["SHARED"] - reserved == 0  # all of Triton's is dynamic
    assert (kernel.stack > 0) == (name == "spilling")
    assert kernel.barriers == (1 if name == "scaled_sum" else 0)


def test_parameters_have_their_offsets() -> None:
    for target in CUDA_ARCHES:
        params = read_cubin(compiled()["scaled_sum", target].data).kernels["scaled_sum"].params
        assert [tuple(p) for p in params] == [
            (0, 0, 8),
            (1, 8, 8),
            (2, 16, 4),
            (3, 20, 4),
            (4, 24, 8),
            (5, 32, 8),
        ]


OLD = ("sm_80", "sm_86", "sm_90", "sm_90a")
NEW = ("sm_100", "sm_100a", "sm_100f", "sm_120", "sm_121a")
ARCHES = [
    *(("ptxas", arch, 7) for arch in OLD),
    *(("ptxas", arch, 8) for arch in NEW),
    *(("ptxas-blackwell", arch, 8) for arch in (*OLD, *NEW, "sm_103a", "sm_110a", "sm_120a")),
]


@pytest.mark.parametrize(("tool", "arch", "abi"), ARCHES)
def test_architecture_suffix_of_both_assemblers(tool: str, arch: str, abi: int, tmp_path: Path) -> None:
    data = held(arch, tool=tool)
    cubin = read_cubin(data)
    assert (cubin.arch, cubin.abi) == (arch, abi)
    assert cubin.toolkit == ((12, 9) if tool == "ptxas" else (13, 4))
    kernel, told = cubin.kernels["held"], res_usage(data, tmp_path)
    assert kernel.static_shared == 6000
    assert told["SHARED"] == 6000 + (1024 if cubin.sm >= 90 else 0)
    assert (kernel.reqntid, kernel.barriers) == ((64, 2, 1), 4)
    assert [tuple(p) for p in kernel.params] == [(0, 0, 8), (1, 16, 24)]


def test_parameters_over_4_kib_use_the_second_record_form() -> None:
    kernel = read_cubin(held("sm_90a", struct_bytes=5000)).kernels["held"]
    assert [tuple(p) for p in kernel.params] == [(0, 0, 8), (1, 16, 5000)]


def test_a_kernel_may_have_no_parameter_and_no_fixed_block() -> None:
    text = ".version 8.8\n.target sm_80\n.address_size 64\n.visible .entry none() .maxntid 256, 1, 1 { ret; }"
    kernel = read_cubin(assemble(text, "sm_80")).kernels["none"]
    assert (kernel.params, kernel.reqntid, kernel.max_threads) == ((), None, (256, 1, 1))


def samples() -> list[tuple[Callable[[bytes], object], bytes]]:
    chosen = (("doubled", "sm_80"), ("scaled_sum", "sm_90a"), ("doubled", "sm_120a"))
    cubins = [*(compiled()[key].data for key in chosen), held("sm_86", tool="ptxas")]
    objects = [shared_object(C_SOURCE), shared_object(C_SOURCE, "aarch64-linux-gnu.2.17")]
    return [*((read_cubin, d) for d in cubins), *((read_shared_object, d) for d in objects)]


def refused_or_read(read: Callable[[bytes], object], data: bytes) -> bool:
    """Whether the reader refused; any error but ElfError leaves this function."""
    try:
        read(data)
    except ElfError:
        return True
    return False


@pytest.mark.parametrize("which", range(6))
def test_every_truncation_and_extension_is_refused(which: int) -> None:
    read, data = samples()[which]
    read(data)
    for size in range(len(data)):
        assert refused_or_read(read, data[:size]), size
    for tail in (b"\0", b"x", bytes(64), data):
        assert refused_or_read(read, data + tail)


@pytest.mark.parametrize("which", range(6))
def test_mutated_files_raise_the_typed_error_or_nothing(which: int) -> None:
    read, data = samples()[which]
    rng = random.Random(which)
    values = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1, len(data))
    refused = 0
    for _ in range(2500):
        bad = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.choice((rng.randrange(64), rng.randrange(len(bad)), len(bad) - 1 - rng.randrange(1800)))
            form = rng.choice("<B <H <I <Q".split())
            value = rng.choice(values) & (1 << 8 * struct.calcsize(form)) - 1
            at = min(at, len(bad) - struct.calcsize(form))
            struct.pack_into(form, bad, at, rng.choice((value, rng.getrandbits(8 * struct.calcsize(form)))))
        refused += refused_or_read(read, bytes(bad))
    assert refused > 500  # most of the damage is noticed; the digest is what finds the rest


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=400), st.integers(0, 5), st.data())
def test_spliced_bytes_raise_the_typed_error_or_nothing(
    noise: bytes, which: int, draw: st.DataObject
) -> None:
    read, data = samples()[which]
    at = draw.draw(st.integers(0, len(data)))
    refused_or_read(read, data[:at] + noise + data[at + len(noise) :])
    assert refused_or_read(read, noise)


def patched(data: bytes, form: str, at: int, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


def row_of(data: bytes, name: str) -> int:
    """Where in the file a section's row of the section table starts."""
    elf = read_elf(data)
    return int(struct.unpack_from("<Q", data, 40)[0]) + 64 * elf.by_name[name]


def body_of(data: bytes, name: str) -> int:
    section = read_elf(data).find(name)
    assert section is not None
    return section.offset


def record_of(data: bytes, section: str, attr: int) -> int:
    """Where the payload of the first record of an attribute starts."""
    at = body_of(data, section)
    while data[at + 1] != attr:
        at += 4 + (struct.unpack_from("<H", data, at + 2)[0] if data[at] == 4 else 0)
    return at + 4


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "ELF magic"),
    "ptx": (lambda d: b".version 8.8\n.target sm_90a\n" * 40, "ELF magic"),
    "lfs pointer": (lambda d: b"version https://git-lfs.github.com/spec/v1\n", "ELF magic"),
    "fatbin": (lambda d: b"\x50\xed\x55\xba" + d[4:], "ELF magic"),
    "elf32": (lambda d: patched(d, "<B", 4, 1), "class 1"),
    "big-endian": (lambda d: patched(d, "<B", 5, 2), "byte order 2"),
    "relocatable": (lambda d: patched(d, "<H", 16, 1), "relocatable"),
    "other machine": (lambda d: patched(d, "<H", 18, 62), "machine 62"),
    "unknown abi": (lambda d: patched(d, "<B", 7, 0x42), "ABI 0x42"),
    "unknown abi version": (lambda d: patched(d, "<B", 8, 9), "version 9"),
    "version 0": (lambda d: patched(d, "<I", 20, 0), "ELF version 0"),
    "header size": (lambda d: patched(d, "<H", 52, 52), "header size 52"),
    "no sections": (lambda d: patched(d, "<H", 60, 0), "0 sections"),
    "65535 sections": (lambda d: patched(d, "<H", 60, 65535), "65535 sections"),
    "name section out of range": (lambda d: patched(d, "<H", 62, 999), "section names"),
    "section table outside": (lambda d: patched(d, "<Q", 40, len(d)), "section table ends"),
    "section table at 2^64-1": (lambda d: patched(d, "<Q", 40, 2**64 - 1), "section table ends"),
    "segments outside": (lambda d: patched(d, "<Q", 32, 2**63), "program headers end"),
    "section outside": (lambda d: patched(d, "<Q", row_of(d, ".symtab") + 24, 2**64 - 8), "ends at byte"),
    "huge section": (lambda d: patched(d, "<Q", row_of(d, ".symtab") + 32, 2**64 - 1), "ends at byte"),
    "overlap": (lambda d: patched(d, "<Q", row_of(d, ".nv.info") + 24, body_of(d, ".strtab")), "overlaps"),
    "unterminated names": (lambda d: patched(d, "<I", row_of(d, ".nv.info"), 2**31), "section name"),
    "names not ascii": (lambda d: d.replace(b".nv.callgraph\0", b".nv.\xff\xfellgraph\0", 1), "not ASCII"),
    "two sections of one name": (lambda d: patched(d, "<I", row_of(d, ".nv.compat"), 0), "two sections"),
    "no kernel info": (
        lambda d: d.replace(b".nv.info.scaled_sum\0", b".nv.info.scaled_sun\0"),
        "'.nv.info.scaled_sum'",
    ),
    "no file info": (lambda d: d.replace(b"\0.nv.info\0", b"\0.nv.inf0\0"), "register counts"),
    "entry size": (lambda d: patched(d, "<Q", row_of(d, ".symtab") + 56, 16), "entries of 16"),
    "strings link": (lambda d: patched(d, "<I", row_of(d, ".symtab") + 40, 77), "names section 77"),
    "symbol section": (lambda d: patched(d, "<H", body_of(d, ".symtab") + 24 + 6, 500), "section 500"),
    "register count symbol": (lambda d: patched(d, "<I", record_of(d, ".nv.info", 0x2F), 99), "of symbol 99"),
    "record beyond section": (
        lambda d: patched(d, "<H", record_of(d, ".nv.info", 0x2F) - 2, 9999),
        "9999 bytes",
    ),
    "record format": (lambda d: patched(d, "<B", record_of(d, ".nv.info", 0x2F) - 4, 5), "format 5"),
    "duplicate ordinal": (
        lambda d: patched(d, "<H", record_of(d, ".nv.info.scaled_sum", 0x17) + 4, 0),
        "numbers its param",
    ),
    "parameter overlap": (
        lambda d: patched(d, "<H", record_of(d, ".nv.info.scaled_sum", 0x17) + 6, 28),
        "parameter 5",
    ),
    "parameter gap at end": (
        lambda d: patched(d, "<H", record_of(d, ".nv.info.scaled_sum", 0x19) - 2, 48),
        "block at 48",
    ),
    "architecture": (lambda d: patched(d, "<I", 48, 0x06006404), "sm_100"),
    "suffix": (
        lambda d: d.replace(b"\x02\x09\x01\x00", b"\x02\x09\x00\x00"),
        "assembler's options say sm_90a",
    ),
    "shared below the reserve": (
        lambda d: patched(d, "<Q", row_of(d, ".nv.shared.scaled_sum") + 32, 1000),
        "shared memory",
    ),
    "note": (lambda d: patched(d, "<I", body_of(d, ".note.nv.cuinfo") + 8, 7), "type 7"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    damage, words = DAMAGE[name]
    with pytest.raises(ElfError, match=re.escape(words)) as caught:
        read_cubin(damage(compiled()["scaled_sum", "sm_90a"].data))
    assert isinstance(caught.value, IntegrityError)


def test_a_shared_object_is_no_cubin_and_the_reverse() -> None:
    with pytest.raises(ElfError, match="machine 62"):
        read_cubin(shared_object(C_SOURCE))
    with pytest.raises(ElfError, match="machine 190"):
        read_shared_object(compiled()["doubled", "sm_80"].data)


def test_a_file_over_the_cap_is_refused_unread() -> None:
    with pytest.raises(ElfError, match="the limit is 67108864"):
        read_cubin(bytes((64 << 20) + 1))


def test_shared_objects_of_both_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        made = read_shared_object(shared_object(C_SOURCE, f"{machine}-linux-gnu.2.17"))
        assert (made.machine, set(made.exports)) == (machine, {"doubled", "scaled_sum"})
        assert all(size > 8 for size in made.exports.values())
        assert (made.undefined, made.needed, made.has_init, made.exec_stack) == ((), (), False, False)


CONSTRUCTOR = "void hook(void); __attribute__((constructor)) void start(void) { hook(); }"
INDIRECT = """
static int one(void) { return 1; }
static void *pick(void) { return one; }
int many(void) __attribute__((ifunc("pick")));
"""
HIDDEN = '__attribute__((visibility("hidden"))) int inner(int x) { return x; }'


def test_shared_objects_tell_what_opening_them_would_do() -> None:
    made = read_shared_object(shared_object(C_SOURCE + CONSTRUCTOR))
    assert (made.has_init, made.undefined) == (True, ("hook",))
    assert read_shared_object(shared_object(C_SOURCE + INDIRECT)).has_init
    data = shared_object(C_SOURCE)
    header = data.index(struct.pack("<II", 0x6474E551, 6))
    assert read_shared_object(patched(data, "<I", header + 4, 7)).exec_stack
    assert "inner" not in read_shared_object(shared_object(C_SOURCE + HIDDEN)).exports


def test_needed_libraries_are_listed() -> None:
    system = Path("/lib/x86_64-linux-gnu/libm.so.6")
    if not system.exists():
        pytest.skip("no libm at the place where Debian has it")
    assert "libc.so.6" in read_shared_object(system.read_bytes()).needed


def test_sections_that_hide_the_dynamic_segment_are_refused() -> None:
    data = shared_object(C_SOURCE)
    with pytest.raises(ElfError, match="isn't the dynamic segment"):
        read_shared_object(patched(data, "<Q", row_of(data, ".dynamic") + 16, 64))
    at = body_of(data, ".dynamic")
    while struct.unpack_from("<Q", data, at)[0] != 5:
        at += 16
    with pytest.raises(ElfError, match="gives string table"):
        read_shared_object(patched(data, "<Q", at + 8, 0x200))
