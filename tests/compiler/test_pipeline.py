"""The build: incremental by content, whole targets only, failures named, and no trace of an interruption."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler import pipeline
from kiln.compiler.errors import BuildError, FailedJobs, OutputError
from kiln.compiler.pipeline import Progress, build, source_folders
from kiln.compiler.report import BuildReport
from kiln.runtime.manifest import canonical_json
from kiln.runtime.verify import verify_tree
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from kiln.tests.compiler.test_tree import snapshot
from kiln.tests.cubins import compiled
from kiln.tests.support.documents import manifest_document


@pytest.fixture
def here() -> Any:
    """An executor in this process: quick, and it shows which jobs run."""
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield executor


def states(report: BuildReport) -> dict[str, str]:
    return {f"{k.target}/{k.op}": k.state for k in report.kernels}


def manifest(out: Path, target: str) -> dict[str, Any]:
    return manifest_document(out / target)


def make(
    out: Path, backend: FakeBackend, here: Any, ops: Sequence[str] | None = None, **kw: Any
) -> BuildReport:
    return build([CATALOG], None, out, backends=[backend], ops=ops, executor=here, **kw)


def test_why_nothing_is_built(tmp_path: Path, here: Any) -> None:
    said = r"nothing to build: sm_80, sm_90a .*; doubled ships nothing: declare ship="
    with pytest.raises(BuildError, match=said):
        make(tmp_path, FakeBackend(ops=()), here, ops=["doubled"])


def test_a_build_writes_a_tree_that_verifies(tmp_path: Path, here: Any) -> None:
    seen: list[Progress] = []
    report = make(tmp_path / "t", FakeBackend(), here, progress=seen.append)
    assert verify_tree(tmp_path / "t", report.root_digest) == []
    assert (report.generation, report.changed) == (1, ("sm_80", "sm_90a"))
    assert set(states(report).values()) == {"built"}
    assert len(report.kernels) == 6
    assert [(p.done, p.total) for p in seen] == [(n, 6) for n in range(1, 7)]
    written = manifest(tmp_path / "t", "sm_90a")
    assert [p["op"] for p in written["recipes"]] == ["doubled_sum"]
    assert written["ops"].keys() == {"doubled", "scaled_sum", "spilling", "doubled_sum"}
    assert written["toolchain"] == {"triton": "3.9.0"}
    assert written["kernels"][0]["toolchain"] == {"ptxas": "12.9.86"}


def test_bytes_do_not_depend_on_place_order_or_executor(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "a", FakeBackend(), here)
    backend = FakeBackend(targets=("sm_90a", "sm_80"), ops=("spilling", "scaled_sum", "doubled"))
    compiled()  # so that workers find the cubins
    build([CATALOG], None, tmp_path / "deep" / "b", backends=[backend], jobs=2)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "deep" / "b")


def test_kernels_of_another_tree_are_taken_where_inputs_are_the_same(tmp_path: Path, here: Any) -> None:
    make(tmp_path / "a", FakeBackend(), here, ops=["doubled"])
    seen = make(tmp_path / "b", FakeBackend(), here, reuse=tmp_path / "a")
    assert {op.partition("/")[2] for op, state in states(seen).items() if state == "reused"} == {"doubled"}
    make(tmp_path / "c", FakeBackend(), here)
    assert snapshot(tmp_path / "b") == snapshot(tmp_path / "c")
    file = next((tmp_path / "a" / "sm_90a").glob("*.cubin"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    torn = make(tmp_path / "d", FakeBackend(), here, reuse=tmp_path / "a")
    assert states(torn)["sm_90a/doubled"] == "built"
    assert snapshot(tmp_path / "d") == snapshot(tmp_path / "c")


def test_a_second_build_runs_nothing(tmp_path: Path, here: Any) -> None:
    first = make(tmp_path, FakeBackend(), here)
    again = make(
        tmp_path, FakeBackend(modes=dict.fromkeys(("doubled", "scaled_sum", "spilling"), "die")), here
    )
    assert set(states(again).values()) == {"reused"}
    assert (again.root_digest, again.changed) == (first.root_digest, ())


def test_only_changed_inputs_are_compiled_and_the_result_is_that_of_a_fresh_build(
    tmp_path: Path, here: Any
) -> None:
    make(tmp_path / "a", FakeBackend(), here)
    changed = FakeBackend(salt={"doubled": "new"})
    report = make(tmp_path / "a", changed, here)
    assert {k for k, s in states(report).items() if s == "built"} == {"sm_80/doubled", "sm_90a/doubled"}
    assert report.generation == 2
    make(tmp_path / "fresh", changed, here)
    a, fresh = snapshot(tmp_path / "a"), snapshot(tmp_path / "fresh")
    assert a.pop("INDEX.json") != fresh.pop("INDEX.json")  # the generation
    assert a == fresh


@pytest.mark.parametrize("damage", [b"", b"rot"])
def test_damaged_artifacts_are_compiled_again(tmp_path: Path, here: Any, damage: bytes) -> None:
    make(tmp_path, FakeBackend(), here)
    good = snapshot(tmp_path)
    (tmp_path / "sm_80" / "doubled.generic.cubin").write_bytes(damage)
    report = make(tmp_path, FakeBackend(), here)
    assert {k for k, s in states(report).items() if s == "built"} == {"sm_80/doubled"}
    assert snapshot(tmp_path) == good


def test_a_damaged_manifest_means_that_the_target_is_built_anew(tmp_path: Path, here: Any) -> None:
    make(tmp_path, FakeBackend(), here)
    good = snapshot(tmp_path)
    (tmp_path / "sm_80" / "MANIFEST.json").write_bytes(b"{}")
    report = make(tmp_path, FakeBackend(), here)
    assert {k for k, s in states(report).items() if s == "built"} == {
        f"sm_80/{n}" for n in ("doubled", "scaled_sum", "spilling")
    }
    assert snapshot(tmp_path) == good


def test_what_is_no_longer_declared_is_dropped(tmp_path: Path, here: Any) -> None:
    make(tmp_path, FakeBackend(), here)
    make(tmp_path, FakeBackend(ops=("doubled",)), here)
    written = manifest(tmp_path, "sm_80")
    assert (list(written["ops"]), written["recipes"]) == (["doubled"], [])  # the plan has nothing to call
    assert verify_tree(tmp_path) == []


def test_selected_targets_and_ops_leave_the_others_alone(tmp_path: Path, here: Any) -> None:
    make(tmp_path, FakeBackend(), here)
    before = snapshot(tmp_path)
    backend = FakeBackend(salt=dict.fromkeys(("doubled", "spilling"), "new"))
    report = build([CATALOG], ["sm_80"], tmp_path, backends=[backend], ops=["spill*"], executor=here)
    assert states(report) == {"sm_80/spilling": "built"}
    after = snapshot(tmp_path)
    assert {k for k in after if before[k] != after[k]} == {"INDEX.json", "sm_80/MANIFEST.json"}
    assert [k["op"] for k in manifest(tmp_path, "sm_80")["kernels"]] == ["doubled", "scaled_sum", "spilling"]
    assert verify_tree(tmp_path) == []


def test_a_selected_recipe_brings_the_ops_of_its_plan(tmp_path: Path, here: Any) -> None:
    make(tmp_path, FakeBackend(), here, ops=["doubled_*"])
    assert manifest(tmp_path, "sm_80")["ops"].keys() == {"doubled_sum", "doubled", "scaled_sum"}


def test_a_damaged_op_that_was_not_selected_stops_the_target(tmp_path: Path, here: Any) -> None:
    make(tmp_path, FakeBackend(), here)
    (tmp_path / "sm_80" / "scaled_sum.generic.cubin").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(FailedJobs, match="scaled_sum was not selected"):
        make(tmp_path, FakeBackend(salt={"spilling": "new"}), here, ops=["spilling"])
    assert {k for k in before if snapshot(tmp_path)[k] != before[k]} == {"INDEX.json", "sm_90a/MANIFEST.json"}


def test_cpu_targets_ship_their_sources_and_reuse_them(tmp_path: Path, here: Any) -> None:
    backend = FakeBackend(targets=("cpu-x86_64", "cpu-aarch64"))
    make(tmp_path, backend, here)
    assert manifest(tmp_path, "cpu-aarch64")["sources"].keys() == {"doubled.c", "scaled_sum.c"}
    assert verify_tree(tmp_path) == []
    assert set(states(make(tmp_path, backend, here)).values()) == {"reused"}
    good = snapshot(tmp_path)
    (tmp_path / "cpu-x86_64" / "doubled.c").write_text("changed")
    report = make(tmp_path, backend, here)
    assert {k for k, s in states(report).items() if s == "built"} == {"cpu-x86_64/doubled"}
    assert snapshot(tmp_path) == good


FAILING = {
    "refuse": "the assembler does not like it",
    "raise": "ZeroDivisionError: a bug of the compiler",
    "budget": "registers, its budget is 1",
    "contract": "requires the block (256, 1, 1)",
    "schema": "surprise",
    "stranger": "not of its job",
    "no file": "has no file doubled.generic.cubin",
    "nothing": "holds no kernel",
}


@pytest.mark.parametrize("mode", FAILING)
def test_failures_are_named_and_their_targets_are_not_written(tmp_path: Path, here: Any, mode: str) -> None:
    make(tmp_path, FakeBackend(), here)
    before = snapshot(tmp_path)
    backend = FakeBackend(modes={"doubled": mode}, salt={"doubled": "new", "spilling": "new"})
    with pytest.raises(FailedJobs) as caught:
        make(tmp_path, backend, here)
    assert [(f.target, f.op, f.variant) for f in caught.value.failures] == [
        ("sm_80", "doubled", "generic"),
        ("sm_90a", "doubled", "generic"),
    ]
    assert all(FAILING[mode] in f.why for f in caught.value.failures)
    assert "sm_80 doubled.generic: " in str(caught.value)
    assert snapshot(tmp_path) == before


def test_targets_without_failures_are_written(tmp_path: Path, here: Any) -> None:
    good, bad = FakeBackend(targets=("sm_80",)), FakeBackend(targets=("sm_86",), modes={"doubled": "refuse"})
    with pytest.raises(FailedJobs, match="nothing was written for sm_86"):
        build([CATALOG], None, tmp_path, backends=[bad, good], executor=here)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["INDEX.json", "sm_80"]
    assert verify_tree(tmp_path) == []


def test_files_that_no_entry_names_fail_their_target(tmp_path: Path, here: Any) -> None:
    with pytest.raises(FailedJobs, match=r"MANIFEST\.json: the manifest made for sm_80 and its files differ"):
        make(tmp_path, FakeBackend(modes={"doubled": "extra file"}), here)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_job_that_takes_its_process_down_fails_alone(tmp_path: Path, jobs: int) -> None:
    compiled()
    backend = FakeBackend(targets=("sm_80", "sm_86"), modes={"scaled_sum": "die"})
    seen: list[Progress] = []
    with pytest.raises(FailedJobs) as caught:
        build([CATALOG], None, tmp_path, backends=[backend], jobs=jobs, progress=seen.append)
    assert [(f.target, f.op) for f in caught.value.failures] == [
        ("sm_80", "scaled_sum"),
        ("sm_86", "scaled_sum"),
    ]
    assert all("its worker process died" in f.why for f in caught.value.failures)
    assert sorted(p.state for p in seen) == ["built"] * 4 + ["failed"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"targets": ["sm_91"]}, "no target is named 'sm_91'; there are sm_90a"),
        ({"ops": ["double"]}, "no op is named 'double'; there are doubled"),
        ({"targets": []}, "nothing to build"),
    ],
)
def test_selections_of_nothing_are_refused(tmp_path: Path, here: Any, kwargs: Any, words: str) -> None:
    arguments = {"targets": None, **kwargs}
    with pytest.raises(BuildError, match=words):
        build([CATALOG], out=tmp_path, backends=[FakeBackend()], executor=here, **arguments)


def test_two_jobs_of_one_name_are_refused(tmp_path: Path, here: Any) -> None:
    with pytest.raises(BuildError, match=r"doubled\.generic is planned twice"):
        make(tmp_path, FakeBackend(ops=("doubled", "doubled")), here)


def test_the_sources_are_no_output_folder() -> None:
    folders = source_folders([CATALOG])
    assert {p.name for p in folders} >= {
        "ir",
        "recipes",
        "compiler",
        "backends",
        "runtime",
        "tools",
        "fake_catalog.py",
    }
    for folder in folders:
        with pytest.raises(OutputError, match="overlap"):
            build([CATALOG], None, folder, backends=[FakeBackend()])


def test_evidence_survives_a_build(tmp_path: Path, here: Any) -> None:
    make(tmp_path, FakeBackend(targets=("sm_80",)), here)
    digests = {k["op"]: k["sha256"] for k in manifest(tmp_path, "sm_80")["kernels"]}
    evidence = {"schema": 1, "target": "sm_80", "artifacts": {d: {} for d in digests.values()}}
    (tmp_path / "sm_80" / "EVIDENCE.json").write_bytes(canonical_json(evidence))
    make(tmp_path, FakeBackend(targets=("sm_80",), ops=("doubled",)), here)
    kept = json.loads((tmp_path / "sm_80" / "EVIDENCE.json").read_bytes())
    assert list(kept["artifacts"]) == [digests["doubled"]]


SLOW = """
import signal, sys
from kiln.compiler.pipeline import build
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from pathlib import Path
modes = dict.fromkeys(("doubled", "scaled_sum"), "sleep")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
build([CATALOG], None, sys.argv[1], backends=[FakeBackend(modes=modes, salt=modes, log=Path(sys.argv[2]))],
jobs=2)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def eventually(condition: Any, seconds: float = 240.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_build_leaves_the_tree_and_no_worker(
    tmp_path: Path, here: Any, end: signal.Signals
) -> None:
    out, log = tmp_path / "tree", tmp_path / "log"
    make(out, FakeBackend(), here)
    before = snapshot(out)
    log.touch()
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    build_process = subprocess.Popen([sys.executable, "-c", SLOW, out, log], env=env, stderr=subprocess.PIPE)
    assert eventually(lambda: len(log.read_text().splitlines()) >= 2), "the workers did not start"
    workers = {int(line.split()[2]) for line in log.read_text().splitlines()}
    build_process.send_signal(end)
    error = build_process.communicate(timeout=240)[1]
    assert build_process.returncode == -end
    assert (b"KeyboardInterrupt" in error) == (end == signal.SIGINT)
    assert eventually(lambda: not any(map(is_alive, workers)))
    assert snapshot(out) == before
    assert pipeline.build([CATALOG], None, out, backends=[FakeBackend()], executor=here).changed == ()
