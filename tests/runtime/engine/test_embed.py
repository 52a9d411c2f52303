"""kiln_embed_tree: the archive holds the tree's files, its bytes depend on them alone, it follows it."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kiln.tests.runtime.engine.conftest import Engines

FILES = {
    "INDEX.json": b"{}",
    "sm_80/MANIFEST.json": b"m" * 511,
    "sm_80/a.cubin": b"\x00\xff" * 256,
    "sm_80/empty.c": b"",
    f"sm_80/{'n' * 94}": b"name of 100 characters with its folder",
    "cpu-x86_64/MANIFEST.json": b"{}\n",
    "cpu-x86_64/z+9.x-1_v2.so": b"o" * 513,
    **{f"cpu-x86_64/{i}.so": bytes([i]) for i in range(20)},
}
NOT_EMBEDDED = {"sm_80/EVIDENCE.json": b"e", "sm_80/cache/x": b"c", "README": b"r", "other/x": b"x"}

PROJECT = """cmake_minimum_required(VERSION 3.18)
project(dump LANGUAGES {language})
find_package(kiln REQUIRED)
add_executable(dump main.{suffix})
{embed}
"""
MAIN = """#include <stdio.h>
#include <{name}.h>
int main(void) {{ return fwrite({name}, 1, {name}_size, stdout) != {name}_size; }}
"""


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def project(folder: Path, embed: str, language: str = "C", name: str = "kiln_embedded_tree") -> Path:
    suffix = {"C": "c", "CXX": "cpp"}[language]
    folder.mkdir(parents=True)
    text = PROJECT.format(language=language, suffix=suffix, embed=embed)
    (folder / "CMakeLists.txt").write_text(text)
    (folder / f"main.{suffix}").write_text(MAIN.format(name=name))
    return folder


def dumped(
    engines: Engines, folder: Path, embed: str, *options: str, language: str = "C", **more: str
) -> bytes:
    """The archive that a program finds in itself."""
    source = project(folder / "source", embed, language, **more)
    engines.build(source, folder / "build", *options)
    return subprocess.run([folder / "build" / "dump"], capture_output=True, check=True, timeout=60).stdout


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
        assert all(m.isreg() for m in members)
        return {m.name: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]


def test_the_archive_holds_the_files_of_the_targets(engines: Engines, tmp_path: Path) -> None:
    tree = write(tmp_path / 'a tree\'s "folder"', {**FILES, **NOT_EMBEDDED})
    # clang has the more warnings.
    compiler = f"-DCMAKE_C_COMPILER={shutil.which('clang') or 'cc'}"
    flags = "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror"
    archive = dumped(engines, tmp_path / "one", f"kiln_embed_tree(dump [[{tree}]])", compiler, flags)
    assert contents(archive) == FILES
    assert archive.endswith(bytes(1024))
    assert len(archive) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        owners = {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode) for m in tar.getmembers()}
    assert owners == {(0, 0, "", "", 0, 0o644)}
    assert archive[257:265] == b"ustar\x0000"


def test_the_bytes_depend_on_the_files_alone(engines: Engines, tmp_path: Path) -> None:
    """Not on names above the tree, order, modes, language, or how it is linked."""
    first = write(tmp_path / "first", FILES)
    second = write(tmp_path / "second", dict(reversed(FILES.items())))
    (second / "INDEX.json").chmod(0o600)
    (tmp_path / "empty.cpp").touch()
    one = dumped(engines, tmp_path / "one", f"kiln_embed_tree(dump {first})")
    through = (
        f"add_library(holder STATIC {tmp_path}/empty.cpp)\n"
        f"kiln_embed_tree(holder {second})\ntarget_link_libraries(dump PRIVATE holder)"
    )
    options = ("-DCMAKE_CXX_FLAGS=-g", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON")
    assert one == dumped(engines, tmp_path / "two", through, *options, language="CXX")


def test_targets_and_the_symbol_can_be_chosen(engines: Engines, tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", FILES)
    embed = (
        f"kiln_embed_tree(dump {tree} TARGETS cpu-x86_64 NAME addon)\nkiln_embed_tree(dump {tree} NAME other)"
    )
    archive = dumped(engines, tmp_path, embed, name="addon")
    assert contents(archive) == {n: d for n, d in FILES.items() if not n.startswith("sm_80/")}


@pytest.mark.parametrize("cubin", [b"longer than it was " * 99, b"\x01\xfe" * 256], ids=["longer", "as-long"])
def test_a_changed_tree_is_embedded_anew(engines: Engines, tmp_path: Path, cubin: bytes) -> None:
    tree = write(tmp_path / "tree", FILES)
    before = dumped(engines, tmp_path, f"kiln_embed_tree(dump {tree})")
    changed = {**FILES, "sm_80/a.cubin": cubin, "INDEX.json": b"[]"}
    write(tree, changed)
    engines.run("cmake", "--build", tmp_path / "build")
    after = subprocess.run([tmp_path / "build" / "dump"], capture_output=True, check=True, timeout=60).stdout
    assert (contents(before), contents(after)) == (FILES, changed)


@pytest.mark.parametrize(
    ("embed", "told"),
    [
        ("kiln_embed_tree(dump nowhere)", "no INDEX.json in"),
        ("kiln_embed_tree(dump {tree} TARGETS sm_9)", "has no target sm_9"),
        ("kiln_embed_tree(dump {tree} sm_80)", "found sm_80, expected"),
        ("kiln_embed_tree(dump {long})", "longer than the 100 characters"),
    ],
    ids=["tree", "target", "word", "name"],
)
def test_what_cannot_be_embedded_is_refused(engines: Engines, tmp_path: Path, embed: str, told: str) -> None:
    places = {
        "tree": write(tmp_path / "tree", FILES),
        "long": write(tmp_path / "long", {**FILES, f"sm_80/{'n' * 95}": b""}),
    }
    source = project(tmp_path / "source", embed.format(**places))
    with pytest.raises(AssertionError) as refused:
        engines.configure(source, tmp_path / "build")
    assert told in " ".join(str(refused.value).split())
