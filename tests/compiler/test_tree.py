"""The tree writer: deterministic bytes, whole trees only, whatever happens to the writer or the disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler import exchange as exchange_module
from kiln.compiler import tree as tree_module
from kiln.compiler.errors import BuildError, OutputError
from kiln.compiler.tree import TargetContent, claim_output, holds, locked, recover, write_tree
from kiln.runtime.manifest import canonical_json
from kiln.runtime.verify import verify_tree
from kiln.tests.trees import cuda_tree


def content(target: str, *names: str) -> TargetContent:
    return TargetContent(*cuda_tree(target, *names))


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


OLD: dict[str, tuple[str, ...]] = {"sm_80": ("doubled",), "sm_90a": ("doubled", "scaled_sum")}
NEW: dict[str, tuple[str, ...]] = {"sm_80": ("scaled_sum",), "sm_90a": ("spilling",), "sm_86": ("doubled",)}


def write(out: Path, plan: Mapping[str, tuple[str, ...]]) -> tree_module.Written:
    with locked(claim_output(out)):
        return write_tree(out, {target: content(target, *names) for target, names in plan.items()})


def test_a_written_tree_verifies_and_its_bytes_are_reproducible(tmp_path: Path) -> None:
    first = write(tmp_path / "a", OLD)
    write(tmp_path / "elsewhere" / "b", dict(reversed(OLD.items())))
    assert verify_tree(tmp_path / "a", first.root_digest) == []
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "elsewhere" / "b")
    assert (first.generation, first.changed) == (1, ("sm_80", "sm_90a"))
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert modes == {0o644}
    assert not [p for p in tmp_path.iterdir() if p.name not in ("a", "elsewhere")]  # no lock file


def test_writing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    first = write(tmp_path, OLD)
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    again = write(tmp_path, OLD)
    assert (again.root_digest, again.generation, again.changed) == (first.root_digest, 1, ())
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


def test_the_generation_counts_changes(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    changed = write(tmp_path, NEW)
    assert (changed.generation, changed.changed) == (2, ("sm_80", "sm_86", "sm_90a"))
    assert verify_tree(tmp_path) == []
    assert write(tmp_path, {"sm_80": ("doubled",)}).generation == 3
    assert json.loads((tmp_path / "INDEX.json").read_bytes())["targets"].keys() == NEW.keys()  # others stay


def test_a_damaged_folder_is_replaced_without_a_new_generation(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    good = snapshot(tmp_path)
    (tmp_path / "sm_80" / "doubled.generic.cubin").write_bytes(b"rot")
    (tmp_path / "sm_90a" / "extra.cubin").write_bytes(b"")
    assert not holds(tmp_path, "sm_80", content("sm_80", *OLD["sm_80"]))
    again = write(tmp_path, OLD)
    assert (again.generation, again.changed, snapshot(tmp_path)) == (1, ("sm_80", "sm_90a"), good)


def test_evidence_survives_as_long_as_its_artifact(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    digests = [k["sha256"] for k in content("sm_90a", "doubled", "scaled_sum").manifest["kernels"]]
    evidence = {"schema": 1, "target": "sm_90a", "artifacts": {d: {"compiled": {}} for d in digests}}
    path = tmp_path / "sm_90a" / "EVIDENCE.json"
    path.write_bytes(canonical_json(evidence))
    write(tmp_path, {"sm_90a": ("doubled", "spilling")})
    assert list(json.loads(path.read_bytes())["artifacts"]) == [digests[0]]
    assert verify_tree(tmp_path) == []
    write(tmp_path, {"sm_90a": ("spilling",)})
    assert not path.exists()


def test_evidence_that_cannot_be_read_stops_the_build(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    (tmp_path / "sm_90a" / "EVIDENCE.json").write_bytes(b"{")
    before = snapshot(tmp_path)
    with pytest.raises(BuildError, match=r"EVIDENCE\.json can't be carried over"):
        write(tmp_path, NEW)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "spoil", [lambda f: f.popitem(), lambda f: f.update(more=b""), lambda f: f.update({min(f): b""})]
)
def test_files_that_are_not_the_manifests_are_refused(tmp_path: Path, spoil: Callable[[Any], None]) -> None:
    manifest, files = cuda_tree("sm_80")
    spoil(files)
    with pytest.raises(BuildError, match="sm_80"):
        write_tree(tmp_path, {"sm_80": TargetContent(manifest, files)})
    with pytest.raises(BuildError, match="manifest made for sm_86"):
        write_tree(tmp_path, {"sm_86": content("sm_80")})
    assert list(tmp_path.iterdir()) == []


def test_output_folders_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "inner").mkdir(parents=True)
    for bad in (source, source / "inner", source / "new", tmp_path):
        with pytest.raises(OutputError, match="overlap"):
            claim_output(bad, [source])
    (tmp_path / "file").write_text("x")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("keep me")
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "INDEX.json").write_text("{}")
    for bad in (tmp_path / "file", tmp_path / "theirs", tmp_path / "corrupt"):
        with pytest.raises(OutputError):
            claim_output(bad, [source])
    assert (tmp_path / "theirs" / "notes.txt").read_text() == "keep me"


def test_output_folders_that_are_ours_are_accepted(tmp_path: Path) -> None:
    assert claim_output(tmp_path / "new" / "tree", [tmp_path / "src"]).is_dir()
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__pycache__").mkdir()
    claim_output(package)
    write(package, OLD)
    assert verify_tree(package) == []
    (package / "INDEX.json").unlink()  # as a first build leaves it that is killed before its last step
    claim_output(package)
    write(package, OLD)
    assert verify_tree(package) == []


KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from kiln.compiler.tree import locked, recover, write_tree, claim_output
from kiln.compiler import exchange, tree
from kiln.tests.compiler.test_tree import NEW, OLD, content, snapshot
from kiln.runtime.verify import STAGING, verify_tree

if sys.argv[2] == "dance":
    exchange._exchange_at_once = lambda a, b: False
base, files = Path(sys.argv[1]), ("tree.py", "exchange.py")
for name, plan in (("old", OLD), ("new", NEW)):
    (base / name).mkdir()
    with locked(base / name):
        write_tree(base / name, {t: content(t, *n) for t, n in plan.items()})
new = {t: content(t, *n) for t, n in NEW.items()}
old = snapshot(base / "old")
work, results, step = base / "work", [], int(sys.argv[3])
done = False
while not done:
    step += 6
    shutil.copytree(base / "old", work)
    child = os.fork()
    if child == 0:
        left = step
        def trace(frame, event, arg):
            global left
            if frame.f_code.co_filename.endswith(files) and "compiler" in frame.f_code.co_filename:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return trace
        sys.settrace(trace)
        with locked(work):
            write_tree(work, new)
        sys.settrace(None)
        os._exit(0)
    done = os.waitpid(child, 0)[1] == 0
    at_once = [f for f in verify_tree(work) if not f.file.startswith(STAGING)]
    before = {k: v for k, v in snapshot(work).items() if not k.startswith(STAGING)}
    with locked(work):
        pass
    after = snapshot(work)
    extra = set(after) - set(old)
    written = json.loads(after["INDEX.json"])["generation"] == 2
    is_old = {k: v for k, v in after.items() if not k.startswith("sm_86/")} == old
    clean = [f for f in verify_tree(work) if f.file != "sm_86"] == []
    results.append([bool(at_once), is_old, written, clean, done])
    shutil.rmtree(work)
print(json.dumps(results))
"""


@pytest.mark.parametrize(("way", "offset"), [("exchange", 1), ("dance", 2)])
def test_a_writer_killed_anywhere_leaves_the_old_tree_or_the_new_one(
    tmp_path: Path, way: str, offset: int
) -> None:
    """A kill after every sixth line that the writer runs; all 460 were tried once."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), way, str(offset)]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=280).stdout
    results = json.loads(out)
    assert len(results) > 60
    assert all(clean and is_old != written for _, is_old, written, clean, _ in results)
    assert results[-1][2:] == [True, True, True]
    refused = sum(at_once for at_once, *_ in results)
    assert refused < 20  # only between the first rename and the last does a reader refuse the tree


def test_a_killed_swap_is_undone_by_the_next_builder(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    before = snapshot(tmp_path)
    left = tmp_path / ".staging-sm_80.abcdefgh"
    (tmp_path / "sm_80").rename(left)
    assert [f.file for f in verify_tree(tmp_path)] == [left.name, "sm_80"]
    recover(tmp_path)
    assert snapshot(tmp_path) == before
    (tmp_path / ".staging-INDEX.json.1").write_bytes(b"")
    recover(tmp_path)
    assert snapshot(tmp_path) == before


def failing(real: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """`real`, but its call number `at` raises."""
    count = iter(range(1, 1 << 30))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) == at:
            raise error
        return real(*args, **kwargs)

    return call


class FailingOs:
    """The module `os`, but call number `at` of one function raises."""

    def __init__(self, name: str, at: int, error: BaseException) -> None:
        setattr(self, name, failing(getattr(os, name), at, error))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def outcome(out: Path, new: dict[str, TargetContent]) -> BaseException | None:
    """What a write raises, if anything."""
    try:
        write_tree(out, new)
    except (Exception, KeyboardInterrupt) as e:
        return e
    return None


ERRORS = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "I/O error"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=["ENOSPC", "EIO", "interrupt"])
@pytest.mark.parametrize("call", ["write", "fsync", "open", "close"])
def test_an_error_of_any_system_call_leaves_the_old_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    write(tmp_path, OLD)
    before = snapshot(tmp_path)
    new = {target: content(target, *names) for target, names in NEW.items()}
    count = 0
    for at in range(1, 40):
        with monkeypatch.context() as patch:
            patch.setattr(tree_module, "os", FailingOs(call, at, error))
            raised = outcome(tmp_path, new)
        if raised is None:
            break
        assert isinstance(raised, BuildError if isinstance(error, OSError) else KeyboardInterrupt)
        count += 1
        recover(tmp_path)
        if snapshot(tmp_path) != before:  # the error came after the new index stood: all of it is new
            assert verify_tree(tmp_path) == []
            assert json.loads((tmp_path / "INDEX.json").read_bytes())["generation"] == 2
            break
    assert count > 4


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()], ids=["EIO", "interrupt"]
)
def test_an_error_between_renames_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> None:
    write(tmp_path, OLD)
    before = snapshot(tmp_path)
    real = tree_module.swap_in
    monkeypatch.setattr(tree_module, "swap_in", failing(real, at, error))
    if at == 4:  # three targets: nothing fails
        write(tmp_path, NEW)
        assert snapshot(tmp_path) != before
        return
    with pytest.raises((BuildError, KeyboardInterrupt)):
        write(tmp_path, NEW)
    assert snapshot(tmp_path) == before


def test_without_the_exchange_call_folders_are_swapped_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_exchange_at_once", lambda a, b: False)
    write(tmp_path, OLD)
    write(tmp_path, NEW)
    assert verify_tree(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        exchange_module.exchange(tmp_path / "missing", tmp_path / "sm_80")
    assert verify_tree(tmp_path) == []


LIMITED = """
import resource, signal, sys
from pathlib import Path
from kiln.compiler.errors import BuildError
from kiln.tests.compiler.test_tree import NEW, OLD, write
out = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    write(out, NEW)
except BuildError as e:
    print("refused:", e)
"""


def test_a_file_size_limit_leaves_the_old_tree(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    before = snapshot(tmp_path)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, "-c", LIMITED, str(tmp_path), "8192"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("refused:"), done.stderr
    assert "File too large" in done.stdout
    assert snapshot(tmp_path) == before


def test_a_full_disk_leaves_the_old_tree(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        mount -t tmpfs -o size=128k none "$1" && exec "$2" -c "$3" "$1"
    """)
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from kiln.compiler.errors import BuildError
        from kiln.runtime.verify import verify_tree
        from kiln.tests.compiler.test_tree import OLD, content, snapshot, write
        from kiln.tests.cubins import compiled
        compiled()
        out = Path(sys.argv[1]) / "tree"
        write(out, OLD)
        before = snapshot(out)
        big = {"sm_80": ("spilling",), "sm_86": ("spilling",), "sm_89": ("spilling",), "sm_90a":
        ("spilling",),
               "sm_100a": ("spilling",), "sm_120a": ("spilling",)}
        try:
            write(out, big)
        except BuildError as e:
            print(snapshot(out) == before, verify_tree(out), e)
    """)
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a mount namespace")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [unshare, "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("True [] "), done.stderr
    assert "No space left on device" in done.stdout


def test_a_second_builder_waits_and_then_says_who_is_first(tmp_path: Path) -> None:
    out = claim_output(tmp_path / "tree")
    with (
        locked(out),
        pytest.raises(OutputError, match=rf"process {os.getpid()}\) has held"),
        locked(out, timeout=0.2),
    ):
        pass
    with locked(out, timeout=0):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(fcntl.flock, 1, OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(OutputError, match="No locks available"), locked(tmp_path):
        pass


CONCURRENT = """
import sys
from pathlib import Path
from kiln.tests.compiler.test_tree import NEW, OLD, write
from kiln.tests.cubins import compiled
compiled()
for i in range(12):
    write(Path(sys.argv[1]), (OLD, NEW)[(i + int(sys.argv[2])) % 2])
"""


def test_concurrent_builders_leave_one_of_their_trees(tmp_path: Path) -> None:
    out = tmp_path / "tree"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    builders = [subprocess.Popen([sys.executable, "-c", CONCURRENT, out, str(i)], env=env) for i in range(3)]
    assert [b.wait(120) for b in builders] == [0, 0, 0]
    assert [f for f in verify_tree(out) if f.file != "sm_86"] == []
