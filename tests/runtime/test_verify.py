"""Tree verification: a sound tree has no fault, and whatever is done to it has one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.errors import UnavailableError
from kiln.runtime.manifest import canonical_json
from kiln.runtime.verify import Fault, verify_tree
from kiln.tests.cubins import CUDA_ARCHES, compiled
from kiln.tests.support.cost import check_cost
from kiln.tests.trees import C_SOURCE, Json, cpu_kernel, cuda_kernel, cuda_tree, manifest


def put(root: Path, target: str, document: Json, files: dict[str, bytes]) -> None:
    folder = root / target
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_bytes(canonical_json(document))
    for name, data in files.items():
        (folder / name).write_bytes(data)


def seal(root: Path, generation: int = 1) -> str:
    """Write INDEX.json for the manifests that are there; its digest."""
    entries = {}
    for path in sorted(root.glob("*/MANIFEST.json")):
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        entries[path.parent.name] = {
            "manifest": f"{path.parent.name}/MANIFEST.json",
            "bytes": len(data),
            "sha256": digest,
        }
    data = canonical_json({"schema": 1, "generation": generation, "targets": entries})
    (root / "INDEX.json").write_bytes(data)
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    put(root, "sm_80", *cuda_tree("sm_80"))
    put(root, "sm_90a", *cuda_tree("sm_90a", "doubled"))
    made = [cpu_kernel(name) for name in ("doubled", "scaled_sum")]
    sources = {"rows.c": C_SOURCE.encode()}
    files = {"rows.so": made[0][1], **sources}
    put(root, "cpu-x86_64", manifest("cpu-x86_64", [entry for entry, _ in made], sources), files)
    seal(root)
    return root


def files_of(faults: list[Fault]) -> list[str]:
    return [f.file for f in faults]


def test_a_sound_tree_has_no_fault(tree: Path) -> None:
    assert verify_tree(tree) == []
    (tree / "__init__.py").touch()
    (tree / "__pycache__").mkdir()
    (tree / "sm_80" / "EVIDENCE.json").write_bytes(b"{}")
    assert verify_tree(str(tree)) == []


def test_the_root_digest_can_be_pinned(tree: Path) -> None:
    digest = seal(tree)
    assert verify_tree(tree, expect=digest) == []
    seal(tree, generation=2)  # a sound tree, but another one
    assert verify_tree(tree) == []
    assert files_of(verify_tree(tree, expect=digest)) == ["INDEX.json"]


def test_every_flipped_byte_is_found(tree: Path) -> None:
    shutil.rmtree(tree / "sm_90a")
    digest = seal(tree)
    names = [p for p in sorted(tree.rglob("*")) if p.is_file()]
    for path in names:
        good = path.read_bytes()
        step = 1 if path.name == "INDEX.json" else max(1, len(good) // 150)
        for at in range(0, len(good), step):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
            faults = files_of(verify_tree(tree, expect=digest))
            assert faults == [str(path.relative_to(tree))], at
        path.write_bytes(good)
    assert verify_tree(tree, expect=digest) == []


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"", lambda d: d[::-1]])
@pytest.mark.parametrize(
    "name", ["INDEX.json", "sm_80/MANIFEST.json", "sm_80/doubled.generic.cubin", "cpu-x86_64/rows.c"]
)
def test_cut_and_extended_files_are_found(tree: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = tree / name
    path.write_bytes(change(path.read_bytes()))
    assert files_of(verify_tree(tree)) == [name]


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


DOUBLED, SUM = "sm_80/doubled.generic.cubin", "sm_80/scaled_sum.generic.cubin"
MANIFEST = "sm_80/MANIFEST.json"


def instead(make: Callable[[Path], Any], name: str = DOUBLED) -> Callable[[Path], None]:
    """Puts something else in a file's place."""

    def act(root: Path) -> None:
        (root / name).unlink()
        make(root / name)

    return act


def move_folder(root: Path) -> None:
    (root / "sm_80").rename(root.parent / "moved")
    (root / "sm_80").symlink_to(root.parent / "moved")


HARM: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing index": (lambda r: (r / "INDEX.json").unlink(), ["INDEX.json"]),
    "index is a folder": (instead(Path.mkdir, "INDEX.json"), ["INDEX.json"]),
    "index is a fifo": (instead(os.mkfifo, "INDEX.json"), ["INDEX.json"]),
    "missing target": (lambda r: shutil.rmtree(r / "sm_80"), ["sm_80"]),
    "target is a link": (move_folder, ["sm_80"]),
    "missing manifest": (lambda r: (r / "sm_80/MANIFEST.json").unlink(), ["sm_80/MANIFEST.json"]),
    "manifest is a link": (instead(lambda p: p.symlink_to("/x"), MANIFEST), [MANIFEST]),
    "missing artifact": (lambda r: (r / DOUBLED).unlink(), [DOUBLED]),
    "artifact is a link": (instead(lambda p: p.symlink_to("scaled_sum.generic.cubin")), [DOUBLED]),
    "dangling link": (instead(lambda p: p.symlink_to("nowhere")), [DOUBLED]),
    "link to itself": (instead(lambda p: p.symlink_to(p.name)), [DOUBLED]),
    "artifact is a fifo": (instead(os.mkfifo), [DOUBLED]),
    "artifact is a folder": (instead(Path.mkdir), [DOUBLED]),
    "sparse artifact": (lambda r: os.truncate(r / DOUBLED, 5 << 30), [DOUBLED]),
    "swapped artifacts": (lambda r: swap(r / DOUBLED, r / SUM), [DOUBLED, SUM]),
    "extra artifact": (lambda r: (r / "sm_80/more.cubin").touch(), ["sm_80/more.cubin"]),
    "extra folder": (lambda r: (r / "sm_80/more").mkdir(), ["sm_80/more"]),
    "hostile name": (lambda r: (r / "sm_80/a\nb\x1b[31m\u202e").touch(), ["sm_80/a\\nb\\x1b[31m\\u202e"]),
    "evidence is a link": (lambda r: (r / "sm_80/EVIDENCE.json").symlink_to("/x"), ["sm_80/EVIDENCE.json"]),
    "extra file at the top": (lambda r: (r / "notes.txt").touch(), ["notes.txt"]),
    "package file with code": (lambda r: (r / "__init__.py").write_text("import os"), ["__init__.py"]),
    "other targets' manifest": (lambda r: shutil.copy(r / "sm_90a/MANIFEST.json", r / "sm_80/MANIFEST.json"),
                                ["sm_80/MANIFEST.json"]),
    "killed build": (lambda r: (r / ".staging-sm_80.abc").mkdir(), [".staging-sm_80.abc"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_harm_is_found_where_it_was_done(tree: Path, name: str) -> None:
    harm, expected = HARM[name]
    harm(tree)
    faults = verify_tree(tree)
    assert files_of(faults) == expected
    assert all(len(f.why) > 20 and f.why.endswith(".") for f in faults), faults


def resealed(change: Callable[[Json], Any]) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        path = root / "sm_80" / "MANIFEST.json"
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(canonical_json(document))
        seal(root)

    return act


def swap_digests(document: Json) -> None:
    one, two = document["kernels"]
    for field in ("file", "bytes", "sha256"):
        one[field], two[field] = two[field], one[field]


LIES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "swapped files and digests": (resealed(swap_digests), [DOUBLED, SUM]),
    "block": (resealed(lambda d: d["kernels"][0].update(block=[128, 1, 1])), [DOUBLED]),
    "one parameter less": (resealed(lambda d: d["kernels"][0]["params"].pop()), [DOUBLED]),
    "budget": (resealed(lambda d: d["kernels"][0]["budget"].update(registers=1)), [DOUBLED]),
    "unknown field": (resealed(lambda d: d.update(surprise=1)), ["sm_80/MANIFEST.json"]),
    "other target": (resealed(lambda d: d.update(target="sm_86")), ["sm_80/MANIFEST.json"]),
    "path": (resealed(lambda d: d["kernels"][0].update(file="../x")), ["sm_80/MANIFEST.json"]),
}


@pytest.mark.parametrize("name", LIES)
def test_a_tree_with_right_digests_of_wrong_contents_is_found(tree: Path, name: str) -> None:
    lie, expected = LIES[name]
    lie(tree)
    assert sorted(set(files_of(verify_tree(tree)))) == expected


def test_an_index_in_another_form_is_found(tree: Path) -> None:
    path = tree / "INDEX.json"
    path.write_text(json.dumps(json.loads(path.read_bytes())))
    assert files_of(verify_tree(tree)) == ["INDEX.json"]


def test_kinds_of_faults(tree: Path) -> None:
    (tree / DOUBLED).unlink()
    (tree / SUM).write_bytes(b"")
    (tree / "sm_80" / "more.cubin").touch()
    assert [f.kind for f in verify_tree(tree)] == ["missing", "extra", "bytes"]
    resealed(lambda d: d["kernels"][0].update(block=[128, 1, 1]))(tree)
    shutil.copy(tree / "sm_90a" / "doubled.generic.cubin", tree / DOUBLED)
    assert "bytes" in [f.kind for f in verify_tree(tree) if f.file == DOUBLED]


@pytest.mark.parametrize("path", ["nowhere", "tree/INDEX.json", "a\0b"])
def test_what_is_no_folder_is_refused(tree: Path, path: str) -> None:
    with pytest.raises(UnavailableError):
        verify_tree(tree.parent / path)


READ_ONLY = """
import sys
from kiln.runtime.verify import verify_tree
assert not [m for m in sys.modules if m.split(".")[0] in ("triton", "mlir", "torch", "jinja2")]
print(len(verify_tree(sys.argv[1])))
"""


def test_no_compiler_no_assertion_and_no_write_is_needed(tree: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HOME": "/nonexistent"}
    before = sorted((str(p), p.stat().st_mtime_ns) for p in tree.rglob("*"))
    command = [sys.executable, "-OO", "-B", "-c", READ_ONLY, str(tree)]
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout == "0\n"
    assert before == sorted((str(p), p.stat().st_mtime_ns) for p in tree.rglob("*"))


@pytest.mark.slow
def test_1600_cubins_are_verified_in_seconds(tmp_path: Path) -> None:
    total = 0
    for target in CUDA_ARCHES:
        kernels, files = [], {}
        for i in range(267):
            made = compiled()[("doubled", "scaled_sum")[i % 2], target]
            kernels.append(cuda_kernel(made, f"op{i}"))
            files[kernels[-1]["file"]] = made.data + b""
            total += len(made.data)
        put(tmp_path, target, manifest(target, kernels), files)
    seal(tmp_path)
    assert total > 8 << 20
    faults: list[Fault] = []
    check_cost(lambda: faults.extend(verify_tree(tmp_path)), 200)  # 40 where nothing else runs
    assert faults == []
