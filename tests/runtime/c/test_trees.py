"""Trees as folders and as archives: what libkiln finds wrong is what the Python verifier finds."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kiln.runtime.manifest import canonical_json
from kiln.runtime.verify import verify_tree
from kiln.tests.runtime.c.core_build import ACCEPTED, Core
from kiln.tests.runtime.test_verify import HARM, LIES, files_of, seal, tree
from kiln.tests.support.cost import check_cost

__all__ = ["tree"]  # a fixture

TREE = Path(__file__).parents[3] / "aot_artifacts"


def found(core: Core, root: Path | bytes, expect: str | None = None) -> list[tuple[str, str]]:
    """The faults of a tree that can be looked at."""
    verdict, faults = core.verify(root, expect)
    assert verdict == ACCEPTED
    return faults


def archive(root: Path, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tree as a tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for path in sorted(root.rglob("*")):
            tar.add(path, path.relative_to(root).as_posix(), recursive=False)
    return out.getvalue()


def test_the_committed_tree_is_proved_in_seconds(libkiln_core: Core) -> None:
    packed = archive(TREE)

    def prove() -> None:
        assert found(libkiln_core, TREE) == []
        assert found(libkiln_core, packed) == []

    check_cost(prove, 500)  # 70 where nothing else runs


def test_a_sound_tree_has_no_fault(libkiln_core: Core, tree: Path) -> None:
    digest = seal(tree)
    assert (
        found(libkiln_core, tree, digest) == found(libkiln_core, tree, digest.removeprefix("sha256:")) == []
    )
    (tree / "__init__.py").touch()
    (tree / "__pycache__").mkdir()
    (tree / "sm_80" / "EVIDENCE.json").write_bytes(b"{}")
    assert found(libkiln_core, tree) == found(libkiln_core, archive(tree)) == []
    seal(tree, generation=2)
    assert [f for f, _ in found(libkiln_core, tree, digest)] == ["INDEX.json"]
    assert [f for f, _ in found(libkiln_core, archive(tree), digest)] == ["INDEX.json"]


def test_flipped_bytes_are_found_in_every_kind_of_file(libkiln_core: Core, tree: Path) -> None:
    shutil.rmtree(tree / "sm_90a")
    digest = seal(tree)
    for path in [p for p in sorted(tree.rglob("*")) if p.is_file()]:
        good = path.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 40)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
            assert [f for f, _ in found(libkiln_core, tree, digest)] == [path.relative_to(tree).as_posix()], (
                at
            )
        path.write_bytes(good)
    assert found(libkiln_core, tree, digest) == []


@pytest.mark.parametrize("name", HARM)
def test_harm_is_found_where_it_was_done(libkiln_core: Core, tree: Path, name: str) -> None:
    harm, expected = HARM[name]
    harm(tree)
    faults = found(libkiln_core, tree)
    assert [f for f, _ in faults] == expected
    assert all(len(why) > 20 and why.endswith(".") for _, why in faults)


@pytest.mark.parametrize(
    "name", ["INDEX.json", "sm_80/MANIFEST.json", "sm_80/doubled.generic.cubin", "sm_80"]
)
def test_links_to_the_right_bytes_are_faults(libkiln_core: Core, tree: Path, name: str) -> None:
    (tree / name).rename(tree.parent / "moved")
    (tree / name).symlink_to(tree.parent / "moved")
    assert [f for f, _ in found(libkiln_core, tree)] == files_of(verify_tree(tree)) == [name]


@pytest.mark.parametrize("name", LIES)
def test_right_digests_of_wrong_contents_are_found(libkiln_core: Core, tree: Path, name: str) -> None:
    LIES[name][0](tree)
    told = [(f.file, f.why) for f in verify_tree(tree)]
    faults = found(libkiln_core, tree)
    assert [f for f, _ in faults] == [f for f, _ in told]
    proofs = [why for _, why in told if why.startswith("Kernel ")]
    assert [why for _, why in faults if why.startswith("Kernel ")] == proofs
    assert found(libkiln_core, archive(tree)) == [
        (f, why.replace(str(tree), "the embedded tree")) for f, why in faults
    ]


@pytest.mark.parametrize("change", [lambda d: d + b"\n", lambda d: d.replace(b"  ", b" "), lambda d: d[:-1]])
def test_an_index_in_another_form_is_found(
    libkiln_core: Core, tree: Path, change: Callable[[bytes], bytes]
) -> None:
    path = tree / "INDEX.json"
    path.write_bytes(change(path.read_bytes()))
    assert [f for f, _ in found(libkiln_core, tree)] == files_of(verify_tree(tree))


def test_an_index_without_targets(libkiln_core: Core, tmp_path: Path) -> None:
    (tmp_path / "INDEX.json").write_bytes(canonical_json({"schema": 1, "generation": 12, "targets": {}}))
    assert verify_tree(tmp_path) == []
    assert found(libkiln_core, tmp_path) == []


@pytest.mark.parametrize("size", [64, 0, 63, 65, 100_000])
def test_a_signature_is_accounted_for(libkiln_core: Core, tree: Path, size: int) -> None:
    (tree / "INDEX.json.sig").write_bytes(bytes(size))
    expected = [] if size == 64 else ["INDEX.json.sig"]
    assert files_of(verify_tree(tree)) == expected
    for where in (tree, archive(tree)):
        faults = found(libkiln_core, where)
        assert [f for f, _ in faults] == expected
        assert size > 64 or [why for _, why in faults] == [f.why for f in verify_tree(tree)]


def test_a_signature_must_be_a_file(libkiln_core: Core, tree: Path) -> None:
    path = tree / "INDEX.json.sig"
    path.mkdir()
    assert [f for f, _ in found(libkiln_core, tree)] == files_of(verify_tree(tree)) == [path.name]
    path.rmdir()
    (tree.parent / "elsewhere").write_bytes(bytes(64))
    path.symlink_to(tree.parent / "elsewhere")
    assert [f for f, _ in found(libkiln_core, tree)] == files_of(verify_tree(tree)) == [path.name]


@pytest.mark.parametrize("path", ["nowhere", "tree/INDEX.json", ""])
def test_what_is_no_folder_is_unavailable(libkiln_core: Core, tree: Path, path: str) -> None:
    verdict, faults = libkiln_core.verify(tree.parent / path / ("x" if not path else ""))
    assert (verdict.code, faults) == ("UnavailableError", [])


# ---- archives ----


@pytest.mark.parametrize(
    "options",
    [["."], ["--format=gnutar", "."], ["--format=gnutar", "INDEX.json", "sm_80", "sm_90a", "cpu-x86_64"]],
    ids=str,
)
def test_archives_of_cmake_are_read(libkiln_core: Core, tree: Path, options: list[str]) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake to make the archive with")
    out = tree.parent / "tree.tar"
    subprocess.run([cmake, "-E", "tar", "cf", str(out), *options], cwd=tree, check=True)
    assert found(libkiln_core, out.read_bytes()) == []


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_harm_in_archives_is_found(libkiln_core: Core, tree: Path, form: int) -> None:
    (tree / "sm_80" / "doubled.generic.cubin").unlink()
    (tree / "sm_80" / "more.cubin").touch()
    (tree / "cpu-x86_64" / "rows.c").write_bytes(b"int x;\n")
    shutil.rmtree(tree / "sm_90a")
    (tree / "notes.txt").touch()
    assert [f for f, _ in found(libkiln_core, archive(tree, form))] == files_of(verify_tree(tree))


def test_long_names_of_gnu_archives_are_read(libkiln_core: Core, tree: Path) -> None:
    name = "x" * 150 + ".cubin"
    (tree / "sm_80" / name).touch()
    assert [f for f, _ in found(libkiln_core, archive(tree, tarfile.GNU_FORMAT))] == [f"sm_80/{name}"]


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """One entry of an archive."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def resummed(header: bytes) -> bytes:
    """The header with a right checksum."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:512])
    return header[:148] + b"%06o\0 " % total + header[156:]


END = bytes(1024)
GOOD = entry("INDEX.json", b"x" * 513)
TARS: dict[str, bytes] = {
    "empty": b"",
    "no end mark": GOOD,
    "half an end mark": GOOD + bytes(512),
    "bytes behind the end": GOOD + END + b"x" * 512,
    "one byte behind the end": GOOD + END + b"\1",
    "cut header": GOOD[:300] + END,
    "cut body": GOOD[:-512] + END[:512],
    "checksum": b"J" + GOOD[1:] + END,
    "no magic": resummed(GOOD[:257] + b"xstar\0" + GOOD[263:512]) + GOOD[512:] + END,
    "size of no digits": resummed(GOOD[:124] + b"            " + GOOD[136:512]) + GOOD[512:] + END,
    "size in base 256": resummed(GOOD[:124] + b"\x80" + bytes(10) + b"\1" + GOOD[136:512]) + GOOD[512:] + END,
    "huge size": resummed(GOOD[:124] + b"77777777777\0" + GOOD[136:512]) + GOOD[512:] + END,
    "decimal size": resummed(GOOD[:124] + b"00000000908\0" + GOOD[136:512]) + GOOD[512:] + END,
    "symbolic link": entry("INDEX.json", kind=tarfile.SYMTYPE, link="x") + END,
    "hard link": entry("INDEX.json", kind=tarfile.LNKTYPE, link="x") + END,
    "device": entry("INDEX.json", kind=tarfile.CHRTYPE) + END,
    "fifo": entry("INDEX.json", kind=tarfile.FIFOTYPE) + END,
    "extended header": entry("INDEX.json", b"12 path=abc\n", kind=tarfile.XHDTYPE) + END,
    "twice": GOOD + GOOD + END,
    "twice, spelled otherwise": GOOD + entry("./INDEX.json") + END,
    "file and folder": entry("a") + entry("a/b") + END,
    "folder with bytes": entry("a/", b"x", tarfile.DIRTYPE) + END,
    "parent": entry("../a") + END,
    "inner parent": entry("a/..") + END,
    "absolute": entry("/a") + END,
    "empty part": entry("a//b") + END,
    "dot": entry("a/.") + END,
    "too deep": entry("a/b/c") + END,
    "no name": entry("") + END,
    "long name without an entry": entry("././@LongLink", b"x" * 120 + b"\0", tarfile.GNUTYPE_LONGNAME) + END,
    "long name without an end": entry("././@LongLink", b"x" * 120, tarfile.GNUTYPE_LONGNAME) + GOOD + END,
    "too long name": entry("././@LongLink", b"x" * 2000 + b"\0", tarfile.GNUTYPE_LONGNAME) + GOOD + END,
}


@pytest.mark.parametrize("name", TARS)
def test_bad_archives_are_refused(libkiln_core: Core, name: str) -> None:
    verdict, faults = libkiln_core.verify(TARS[name])
    assert (verdict.code, faults) == ("IntegrityError", [])
    assert libkiln_core.verify(GOOD + END)[1] != []


def test_every_flipped_byte_of_an_archive_is_found_or_of_no_meaning(libkiln_core: Core, tree: Path) -> None:
    for folder in ("sm_90a", "cpu-x86_64"):
        shutil.rmtree(tree / folder)
    digest = seal(tree)
    data = archive(tree)
    noticed = 0
    for at in range(0, len(data), max(1, len(data) // 800)):
        verdict, faults = libkiln_core.verify(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], digest)
        noticed += verdict != ACCEPTED or faults != []
    assert noticed > 500  # the rest is padding


def test_unreadable_files_are_faults(libkiln_core: Core, tree: Path) -> None:
    path = tree / "sm_80" / "doubled.generic.cubin"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")
    assert [f for f, _ in found(libkiln_core, tree)] == ["sm_80/doubled.generic.cubin"]
