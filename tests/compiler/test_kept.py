"""What a build that wrote no tree had finished is used by the next one, and by no build of other inputs."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler.backend import Built, Job
from kiln.compiler.errors import FailedJobs
from kiln.compiler.kept import Kept
from kiln.compiler.pipeline import build
from kiln.runtime.cubin import read_cubin
from kiln.runtime.verify import verify_tree
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from kiln.tests.compiler.test_pipeline import eventually, here, make
from kiln.tests.compiler.test_tree import snapshot
from kiln.tests.cubins import compiled

__all__ = ["here"]  # a fixture

TARGETS = ("sm_80", "sm_90a")
OVER = {"spilling": "budget"}


def fails(out: Path, here: Any, backend: FakeBackend, **kw: Any) -> FailedJobs:
    """The error of a build that fails."""
    with pytest.raises(FailedJobs) as caught:
        make(out, backend, here, **kw)
    return caught.value


def ran(out: Path, here: Any, log: Path, **kw: Any) -> list[str]:
    """Build; the jobs that ran, as `target op`."""
    log.write_text("")
    make(out, FakeBackend(log=log, **kw), here)
    return sorted(line.rpartition(" ")[0] for line in log.read_text().splitlines())


def entries(out: Path) -> list[str]:
    """Target and op of each kept result; a missing folder holds none."""
    folder = Kept(out).path
    return sorted(p.name.rpartition(".")[0] for p in folder.iterdir()) if folder.exists() else []


def test_after_a_failure_only_what_failed_is_compiled(tmp_path: Path, here: Any) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    error = fails(out, here, FakeBackend(modes=OVER))
    assert "finished kernels are kept for the next build" in str(error)
    assert entries(out) == sorted(f"{t}.{op}" for t in TARGETS for op in ("doubled", "scaled_sum"))
    assert ran(out, here, log) == ["sm_80 spilling", "sm_90a spilling"]
    make(tmp_path / "straight", FakeBackend(), here)
    assert snapshot(out) == snapshot(tmp_path / "straight")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "straight", "tree"]


def test_other_inputs_are_never_served(tmp_path: Path, here: Any) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    fails(out, here, FakeBackend(modes=OVER))
    changed = {"salt": {"doubled": "new"}}
    assert ran(out, here, log, **changed) == sorted(
        f"{t} {op}" for t in TARGETS for op in ("doubled", "spilling")
    )
    fails(tmp_path / "tools", here, FakeBackend(modes=OVER))
    assert len(ran(tmp_path / "tools", here, log, tools={"triton": "3.9.1"})) == 6


def test_every_kernel_over_its_budget_is_named_with_its_figures(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "tree", FakeBackend(), here)
    before = snapshot(tmp_path / "tree")
    over = dict.fromkeys(("doubled", "spilling"), "budget")
    backend = FakeBackend(modes=over, salt=dict.fromkeys(("doubled", "scaled_sum", "spilling"), "new"))
    error = fails(tmp_path / "tree", here, backend)
    assert [(f.target, f.op) for f in error.failures] == [(t, op) for t in TARGETS for op in over]
    for failure in error.failures:
        (made,) = read_cubin(compiled()[failure.op, failure.target].data).kernels.values()
        assert f"takes {made.registers} registers, its budget is 1;" in failure.why
    assert str(error).startswith("4 kernels could not be built; nothing was written for sm_80, sm_90a; ")
    assert snapshot(tmp_path / "tree") == before
    assert error.report is not None
    assert {f"{k.target} {k.op} {k.state}" for k in error.report.kernels} == {
        f"{t} scaled_sum built" for t in TARGETS
    }


def test_reasons_of_one_kernel_count_once(tmp_path: Path, here: Any) -> None:
    error = fails(tmp_path / "tree", here, FakeBackend(targets=("sm_80",), modes={"doubled": "twice"}))
    assert len(error.failures) == 2
    assert str(error).startswith("1 kernel could not be built; ")


def test_after_a_worker_died_only_its_job_is_compiled(tmp_path: Path, here: Any) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    compiled()
    with pytest.raises(FailedJobs, match="its worker process died"):
        build([CATALOG], None, out, backends=[FakeBackend(modes={"scaled_sum": "die"})], jobs=2)
    assert ran(out, here, log) == ["sm_80 scaled_sum", "sm_90a scaled_sum"]


INTERRUPTED = """
import signal, sys
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from kiln.tools import build, cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
build.all_backends = lambda: [FakeBackend(modes={"spilling": "sleep"})]
sys.exit(cli.main(["build", "--catalog", CATALOG, "--out", sys.argv[1], "--jobs", "2"]))
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_after_an_interruption_what_was_finished_is_used(
    tmp_path: Path, here: Any, end: signal.Signals
) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    compiled()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, out], env=env, stderr=subprocess.PIPE)
    finished = ["sm_80.doubled", "sm_80.scaled_sum", "sm_90a.doubled", "sm_90a.scaled_sum"]
    assert eventually(lambda: entries(out) == finished), "the other jobs did not finish"
    process.send_signal(end)
    error = process.communicate(timeout=240)[1]
    if end == signal.SIGINT:
        assert process.returncode == 130
        assert b"kiln: interrupted; finished kernels are kept for the next build" in error
    assert list(out.iterdir()) == []
    assert ran(out, here, log) == ["sm_80 spilling", "sm_90a spilling"]
    assert verify_tree(out) == []


def truncated(entry: Path, other: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def longer(entry: Path, other: Path) -> None:
    entry.write_bytes(entry.read_bytes() + b"\0")


def emptied(entry: Path, other: Path) -> None:
    entry.write_bytes(b"")


def flipped(entry: Path, other: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes(data)


def another_jobs(entry: Path, other: Path) -> None:
    entry.write_bytes(other.read_bytes())


def signed_again(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def other_code(entry: Path, other: Path) -> None:
    """Under a checksum that fits."""
    body = bytearray(entry.read_bytes().partition(b"\n")[2])
    body[-100] ^= 1
    entry.write_bytes(signed_again(bytes(body)))


def longer_yet_whole(entry: Path, other: Path) -> None:
    entry.write_bytes(signed_again(entry.read_bytes().partition(b"\n")[2] + b"\0"))


def no_header(entry: Path, other: Path) -> None:
    entry.write_bytes(signed_again(b"[]\n"))


def a_link(entry: Path, other: Path) -> None:
    entry.rename(entry.with_name("aside"))
    entry.symlink_to("aside")


def a_pipe(entry: Path, other: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


POISONS: tuple[Callable[[Path, Path], None], ...] = (
    truncated, longer, emptied, flipped, another_jobs, other_code, longer_yet_whole, no_header,
    a_link, a_pipe,
)  # fmt: skip


@pytest.mark.parametrize("poison", POISONS)
def test_an_entry_that_is_not_what_was_kept_counts_as_none(
    tmp_path: Path, here: Any, poison: Callable[[Path, Path], None]
) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    fails(out, here, FakeBackend(targets=("sm_80",), modes=OVER))
    kept = {p.name.split(".")[1]: p for p in Kept(out).path.iterdir()}
    poison(kept["doubled"], kept["scaled_sum"])
    assert ran(out, here, log, targets=("sm_80",)) == ["sm_80 doubled", "sm_80 spilling"]
    make(tmp_path / "straight", FakeBackend(targets=("sm_80",)), here)
    assert snapshot(out) == snapshot(tmp_path / "straight")


def test_a_poisoned_entry_is_replaced_by_the_next_result(tmp_path: Path, here: Any) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    backend = FakeBackend(targets=("sm_80",), modes=OVER)
    fails(out, here, backend)
    good = snapshot(Kept(out).path)
    for path in Kept(out).path.iterdir():
        a_pipe(path, path)
    fails(out, here, backend)
    assert snapshot(Kept(out).path) == good
    assert ran(out, here, log, targets=("sm_80",)) == ["sm_80 spilling"]


@pytest.mark.parametrize("unsafe", ["mode", "link", "file"])
def test_a_folder_that_others_may_have_filled_is_not_used(tmp_path: Path, here: Any, unsafe: str) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    backend = FakeBackend(targets=("sm_80",), modes=OVER)
    fails(out, here, backend)
    folder = Kept(out).path
    if unsafe == "mode":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "theirs")
        folder.symlink_to("theirs") if unsafe == "link" else folder.write_text("")
    before = snapshot(tmp_path)
    error = fails(out, here, backend)
    words = "can be written by another user" if unsafe == "mode" else "is no folder"
    assert f"could not be kept for the next build ({folder} {words}; remove it)" in str(error)
    assert snapshot(tmp_path) == before
    assert len(ran(out, here, log, targets=("sm_80",))) == 3


@pytest.mark.parametrize("unsafe", ["mode", "link"])
def test_a_folder_that_came_while_jobs_ran_is_not_used(tmp_path: Path, unsafe: str) -> None:
    """Minutes lie between the first look at the folder and the first result."""
    job, built = Job("sm_80", "doubled", "generic", "0" * 64, "module:run"), Built(({"op": "doubled"},), {})
    theirs = Kept(tmp_path / "theirs")
    theirs.keep(job, built)
    kept, saved = Kept(tmp_path / "tree"), Kept(tmp_path / "tree")
    if unsafe == "link":
        kept.path.symlink_to(theirs.path)
    else:
        theirs.path.rename(kept.path)
        kept.path.chmod(0o777)
    before = snapshot(tmp_path)
    assert kept.get(job) is None
    kept.keep(replace(job, op="other"), built)
    assert "remove it" in kept.why
    saved.settle("sm_80", None, ())
    assert snapshot(tmp_path) == before


def test_no_space_to_keep_fails_no_build(tmp_path: Path, here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        real(path, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    error = fails(out, here, FakeBackend(modes=OVER))
    assert f"could not be kept for the next build ({Kept(out).path}: No space left on device)" in str(error)
    assert entries(out) == []
    assert len(ran(out, here, log)) == 6


def test_builds_of_some_ops_leave_what_is_kept_of_others(tmp_path: Path, here: Any) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    fails(out, here, FakeBackend(modes=OVER))
    make(out, FakeBackend(), here, ops=["doubled"])
    assert entries(out) == ["sm_80.scaled_sum", "sm_90a.scaled_sum"]
    make(out, FakeBackend(targets=("sm_80",)), here)
    assert entries(out) == ["sm_90a.scaled_sum"]
    assert ran(out, here, log) == ["sm_90a spilling"]


def test_what_no_job_gives_any_more_goes(tmp_path: Path, here: Any) -> None:
    out = tmp_path / "tree"
    fails(out, here, FakeBackend(modes=OVER))
    old = {p.name for p in Kept(out).path.iterdir()}
    (Kept(out).path / f"{min(old)}~").write_bytes(b"half")
    fails(out, here, FakeBackend(modes=OVER, salt={"doubled": "new"}))
    now = {p.name for p in Kept(out).path.iterdir()}
    assert len(now) == 4
    assert {n.split(".")[1] for n in now - old} == {"doubled"}


def test_targets_with_sources_are_kept_with_them(tmp_path: Path, here: Any) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    fails(out, here, FakeBackend(targets=("cpu-x86_64",), modes={"scaled_sum": "refuse"}))
    assert ran(out, here, log, targets=("cpu-x86_64",)) == ["cpu-x86_64 scaled_sum"]
    make(tmp_path / "straight", FakeBackend(targets=("cpu-x86_64",)), here)
    assert snapshot(out) == snapshot(tmp_path / "straight")


def test_a_source_that_was_altered_is_made_again(tmp_path: Path, here: Any) -> None:
    """No manifest entry has its digest: the checksum alone tells."""
    out, log = tmp_path / "tree", tmp_path / "log"
    fails(out, here, FakeBackend(targets=("cpu-x86_64",), modes={"scaled_sum": "refuse"}))
    (entry,) = Kept(out).path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-2] + b"?\n")
    assert len(ran(out, here, log, targets=("cpu-x86_64",))) == 2


@pytest.mark.parametrize("field", ["target", "op", "variant", "inputs_digest", "runner"])
def test_a_result_is_of_one_job_alone(tmp_path: Path, field: str) -> None:
    job = Job("sm_80", "doubled", "generic", "0" * 64, "module:run")
    changed: dict[str, Any] = {field: "other"}
    kept, other = Kept(tmp_path / "tree"), replace(job, **changed)
    kept.keep(job, Built(({"op": "doubled"},), {"a": b"1", "b": b""}, {"c": b"2"}))
    assert kept.get(job) == Built(({"op": "doubled"},), {"a": b"1", "b": b""}, {"c": b"2"})
    assert kept.get(other) is None
    (entry,) = kept.path.iterdir()
    kept.keep(other, Built((), {}))
    (theirs,) = set(kept.path.iterdir()) - {entry}
    theirs.write_bytes(entry.read_bytes())
    assert kept.get(other) is None
