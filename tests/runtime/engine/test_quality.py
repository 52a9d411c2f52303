"""libkiln's code: compilers without a warning, sanitizers, AArch64, exports, no writable memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from kiln.runtime.elf import Elf, read_elf
from kiln.tests.runtime.engine.conftest import EXAMPLE, SOURCE, Engines
from kiln.tests.support.compilers import C, available, build, build_all, command_of, first_of, run
from kiln.tools.trees import shipped

OUTSIDE = Path(__file__).with_name("outside.c")
SOURCES = sorted(SOURCE.glob("*.c"))
LIBRARY = ("-DKILN_BUILD", f"-I{SOURCE / 'include'}")
LINK = ("-pthread", "-ldl", "-lm")
SYSROOT = Path("/usr/aarch64-linux-gnu")
TREE = shipped()
QUICK = "0.365148 0.730297 1.09545 2.92119\n-1.41421 0 0 2.82842\n"
WRITE, ALLOC = 1, 2
LOCAL = 0


def sanitizing(folder: Path, sanitizer: str) -> str:
    """A compiler whose sanitizer works on this machine; skips the test where none does."""
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    for name in ("clang", "gcc"):
        if available(name):
            command = [*command_of(name), f"-fsanitize={sanitizer}", "empty.c", "-o", "empty"]
            made = subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode == 0
            if made and subprocess.run([folder / "empty"], capture_output=True, timeout=60).returncode == 0:
                return name
    pytest.skip(f"neither clang nor gcc has -fsanitize={sanitizer} on this machine")


def checks(text: str) -> int:
    found = re.fullmatch(r"(\d+) checks held\n", text)
    assert found, text
    return int(found[1])


@pytest.mark.slow
def test_addresses_leaks_and_undefined_behaviour(tmp_path: Path) -> None:
    sanitizer = "address,undefined"
    compiler = sanitizing(tmp_path, sanitizer)
    flags = ("-g", "-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    objects = build_all(compiler, tmp_path, SOURCES, *flags, *LIBRARY)
    for source, name in ((OUTSIDE, "outside"), (EXAMPLE / "quick.c", "quick")):
        build(compiler, tmp_path, *flags, *LIBRARY, source, *objects, *LINK, "-o", name)
    assert checks(run([tmp_path / "outside", TREE, "8"], tmp_path, ASAN_OPTIONS="detect_leaks=1")) > 500
    assert run([tmp_path / "quick", TREE], tmp_path, ASAN_OPTIONS="detect_leaks=1") == QUICK


@pytest.mark.slow
def test_eight_threads_without_a_race(tmp_path: Path) -> None:
    compiler = sanitizing(tmp_path, "thread")
    flags = ("-g", "-O0", "-fsanitize=thread")
    objects = build_all(compiler, tmp_path, [*SOURCES, OUTSIDE], *flags, *LIBRARY)
    build(compiler, tmp_path, *flags, *objects, *LINK, "-o", "outside")
    assert checks(run([tmp_path / "outside", TREE, "8"], tmp_path, TSAN_OPTIONS="halt_on_error=1")) > 500


@pytest.mark.slow
def test_aarch64_gives_the_same_numbers_in_qemu(tmp_path: Path) -> None:
    target = ("-target", "aarch64-linux-gnu.2.31", "-O1")
    objects = build_all("zig cc", tmp_path, SOURCES, *target, *LIBRARY)
    for source, name in ((OUTSIDE, "outside"), (EXAMPLE / "quick.c", "quick")):
        build("zig cc", tmp_path, *target, *LIBRARY, source, *objects, *LINK, "-o", name)
    qemu = shutil.which("qemu-aarch64")
    if qemu is None or not (SYSROOT / "lib" / "libc.so.6").exists():
        pytest.skip("built, not run: qemu-aarch64 or libc6-arm64-cross is not installed (Debian: qemu-user)")
    assert run([qemu, "-L", SYSROOT, tmp_path / "quick", TREE], tmp_path) == QUICK
    assert checks(run([qemu, "-L", SYSROOT, tmp_path / "outside", TREE, "4"], tmp_path)) > 300


def exported(elf: Elf) -> set[str]:
    """Symbols that others may link to."""
    table = elf.find(".dynsym") or elf.find(".symtab")
    assert table is not None
    return {s.name for s in elf.symbols(table) if s.section != 0 and s.binding != LOCAL}


def writable(elf: Elf) -> set[str]:
    """Sections of variables: memory that stays writable after the dynamic linker's work."""
    return {
        s.name
        for s in elf.sections
        if s.flags & (WRITE | ALLOC) == WRITE | ALLOC and s.size and not s.name.startswith(".data.rel.ro")
    }


def declared() -> set[str]:
    """The functions of kiln.h."""
    header = (SOURCE / "include" / "kiln.h").read_text("ascii")
    return set(re.findall(r"^KILN_API [^;]*?\b(kiln_\w+)\(", header, re.MULTILINE))


def names_of_others(elves: Iterable[Elf]) -> set[str]:
    """Global names that could meet a program's own."""
    return {n for elf in elves for n in exported(elf) if not re.match("kiln_|KILN_", n)}


def test_the_shared_library_exports_what_its_header_declares(engines: Engines) -> None:
    (library,) = (p for p in engines.prefix.rglob("libkiln.so*") if not p.is_symlink())
    assert exported(read_elf(library.read_bytes())) == declared()
    assert len(declared()) > 20


def test_the_library_has_no_variables_and_no_names_of_others(engines: Engines) -> None:
    elves = {p.name: read_elf(p.read_bytes()) for p in engines.objects}
    assert len(elves) == len(SOURCES)
    assert {name: writable(elf) for name, elf in elves.items() if writable(elf)} == {}
    assert names_of_others(elves.values()) == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("static int counter; int kiln_next(void) { return counter++; }", {".bss"}),
        ("static int counter = 1; int kiln_next(void) { return counter++; }", {".data"}),
        ("static _Thread_local int counter; int kiln_next(void) { return counter++; }", {".tbss"}),
        ("int next(void) { return 1; }", {"next"}),
        (
            'static const char *const names[] = {"a"}; const char *kiln_name(int i) { return names[i]; }',
            set(),
        ),
    ],
    ids=["zero", "value", "thread", "name", "constant"],
)
def test_a_variable_or_a_name_is_found(tmp_path: Path, code: str, found: set[str]) -> None:
    (tmp_path / "one.c").write_text(code)
    build(first_of(*C), tmp_path, "-fPIC", "-c", "one.c", "-o", "one.o")
    elf = read_elf((tmp_path / "one.o").read_bytes())
    assert writable(elf) | names_of_others([elf]) == found
