"""A build of the same inputs that finds the tree as it was left knows that there is nothing to do; every
other one runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.backends.cuda.backend import primitives
from kiln.compiler import stamp
from kiln.compiler.catalog import OWN, load
from kiln.compiler.digest import core_sources, module_closure
from kiln.compiler.kept import Kept
from kiln.compiler.pipeline import source_folders
from kiln.compiler.report import BuildReport
from kiln.compiler.stamp import inputs_key, leave_stamp, stamp_of, standing
from kiln.tests.compiler.fake_backend import FakeBackend
from kiln.tests.compiler.test_pipeline import here, make

__all__ = ["here"]  # a fixture

KEY = "0" * 64
FOLDERS = source_folders((OWN,))


def summed(report: BuildReport) -> list[tuple[Any, ...]]:
    """What a report says of its kernels, but for tools that they share: a stamped one leaves them out."""
    return [(k.target, k.op, k.variant, {**k.entry, "toolchain": {}}) for k in report.kernels]


@pytest.fixture
def tree(tmp_path: Path, here: Any) -> Path:
    """A tree with its stamp."""
    out = tmp_path / "tree"
    leave_stamp(KEY, make(out, FakeBackend(), here))
    return out


def test_a_tree_that_stands_is_reported_as_a_build_would(tree: Path, here: Any) -> None:
    found = standing(tree, KEY)
    again = make(tree, FakeBackend(), here)
    assert found is not None
    assert summed(found) == summed(again)
    assert {k.state for k in found.kernels} == {"reused"}
    assert (found.out, found.root_digest, found.generation, found.changed, found.unserved) == (
        again.out, again.root_digest, again.generation, again.changed, again.unserved,
    )  # fmt: skip


def test_kernels_that_are_stored_as_another_stand(tmp_path: Path, here: Any) -> None:
    made_by = FakeBackend(targets=("sm_80",), modes={"spilling": "other"})
    leave_stamp(KEY, make(tmp_path / "tree", made_by, here))
    found = standing(tmp_path / "tree", KEY)
    assert found is not None
    assert summed(found) == summed(make(tmp_path / "tree", made_by, here))
    assert not (tmp_path / "tree/sm_80/spilling.generic.cubin").exists()


def test_targets_that_the_build_was_not_about_are_not_reported(tree: Path, here: Any) -> None:
    leave_stamp(KEY, make(tree, FakeBackend(targets=("sm_80",)), here))
    found = standing(tree, KEY)
    assert found is not None
    assert {k.target for k in found.kernels} == {"sm_80"}


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    times = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "an artifact's byte": lambda t: flipped(t / "sm_80" / "doubled.generic.cubin"),
    "a manifest's byte": lambda t: flipped(t / "sm_90a" / "MANIFEST.json"),
    "a byte of the index": lambda t: flipped(t / "INDEX.json"),
    "no index": lambda t: (t / "INDEX.json").unlink(),
    "no artifact": lambda t: (t / "sm_80" / "doubled.generic.cubin").unlink(),
    "an artifact too many": lambda t: (t / "sm_80" / "more.cubin").write_bytes(b""),
    "no target": lambda t: shutil.rmtree(t / "sm_80"),
    "no tree": shutil.rmtree,
    "kernels of a build that failed": lambda t: Kept(t).path.mkdir(),
    "no stamp": lambda t: stamp_of(t).unlink(),
    "a torn stamp": lambda t: stamp_of(t).write_bytes(stamp_of(t).read_bytes()[:-9]),
    "a stamp of another kind": lambda t: stamp_of(t).write_text("[]"),
    "a stamp without targets": lambda t: stamp_of(t).write_text(
        json.dumps({k: v for k, v in json.loads(stamp_of(t).read_bytes()).items() if k != "targets"})
    ),
    "a stamp that others may write": lambda t: stamp_of(t).chmod(0o622),
    "a stamp that is a link": lambda t: linked(stamp_of(t)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_nothing_stands_once_anything_changed(tree: Path, damage: Callable[[Path], object]) -> None:
    assert standing(tree, KEY) is not None
    damage(tree)
    assert standing(tree, KEY) is None


def test_nothing_stands_for_other_inputs(tree: Path) -> None:
    assert standing(tree, "1" * 64) is None


def test_another_build_takes_the_stamp_with_it(tree: Path, here: Any) -> None:
    make(tree, FakeBackend(salt={"doubled": "new"}), here)
    assert standing(tree, KEY) is None


def test_of_a_folder_that_leads_nowhere_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert standing(tmp_path / "loop", KEY) is None
    assert standing("with\0nul", KEY) is None
    assert standing("/", KEY) is None


def test_where_no_stamp_can_be_left_none_is(tree: Path, here: Any) -> None:
    stamp_of(tree).unlink()
    stamp_of(tree).mkdir()
    leave_stamp(KEY, make(tree, FakeBackend(), here))
    assert standing(tree, KEY) is None
    assert sorted(p.name for p in tree.parent.iterdir()) == [".tree.stamp", "tree"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_an_edit_of_any_file_is_found(folder: Path, tmp_path: Path) -> None:
    """One bit of each file in turn; its time, and every size, stay."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    files = [p for p in copy.rglob("*") if p.is_file()]
    before = inputs_key([copy], None)
    for path in (p for p in files if p.stat().st_size):
        flipped(path)
        assert inputs_key([copy], None) != before, path
        flipped(path)
    assert len(files) > 5
    assert inputs_key([copy], None) == before


def test_every_file_that_a_digest_covers_is_looked_at() -> None:
    """Among them what is not Python: templates, headers, samples."""
    loaded = load((OWN,))
    covered = {*core_sources(), *(p for op in loaded.ops for p in loaded.sources(op))}
    covered |= {p for r in primitives(loaded) for p in module_closure(r.kernel.partition(":")[0])}
    names = {folder / name for folder in FOLDERS for name in stamp._files(folder)}
    assert len(covered) > 50
    assert covered <= names
    assert {".py", ".j2", ".h", ".json"} <= {p.suffix for p in names}


def write(folder: Path, name: str, text: str = "x") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_the_key_covers_names_packages_interpreter_and_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, site = tmp_path / "ir", tmp_path / "site"
    write(folder, "a.py")
    write(site, "triton-3.9.0.dist-info/METADATA")
    monkeypatch.setattr("sys.path", [str(site), str(tmp_path / "nothing"), ""])
    keys = [inputs_key([folder], None), inputs_key([folder], ["sm_80"])]
    write(folder, "deep/b.py")
    keys.append(inputs_key([folder], None))
    (folder / "deep" / "b.py").rename(folder / "deep" / "c.py")
    keys.append(inputs_key([folder], None))
    (site / "triton-3.9.0.dist-info").rename(site / "triton-3.9.1.dist-info")
    keys.append(inputs_key([folder], None))
    monkeypatch.setattr("sys.version", "3.99")
    keys.append(inputs_key([folder], None))
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_depend_on_place_time_bytecode_or_locks(tmp_path: Path) -> None:
    for place in ("one", "two/deeper"):
        write(tmp_path / place / "ir", "a.py")
        write(tmp_path / place / "ir", "b.py")
    write(tmp_path / "one" / "ir", "__pycache__/a.pyc")
    os.utime(tmp_path / "one" / "ir" / "a.py", (1, 1))
    keys = {inputs_key([tmp_path / place / "ir"], None) for place in ("one", "two/deeper")}
    assert len(keys) == 1
    (tmp_path / "one" / "ir" / ".#a.py").symlink_to("nobody@nowhere.1")
    assert inputs_key([tmp_path / "one" / "ir"], None) not in keys
