"""`kiln build`: what it asks of the pipeline, and what it prints."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler.backend import Job
from kiln.compiler.content import State
from kiln.compiler.errors import FailedJobs, Failure
from kiln.compiler.pipeline import Progress
from kiln.compiler.report import BuildReport, KernelReport
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.tools.synthetic import kernel
from kiln.tools import build, progress
from kiln.tools.trees import shipped

Json = dict[str, Any]


def report(out: Path, state: State = "built", count: int = 2) -> BuildReport:
    """A build of `count` CUDA kernels and one on a CPU."""
    entries = [("sm_90a", kernel("add", f"v{i}")) for i in range(count)]
    cpu = kernel("add", file="add.so", bytes=4096, resources={"code_bytes": 300})
    kernels = [
        KernelReport(t, e["op"], e["variant"], state, 1.5, e) for t, e in [("cpu-x86_64", cpu), *entries]
    ]
    return BuildReport(out, "sha256:" + "0" * 64, 3, tuple(kernels), ("sm_90a",))


class Pipeline:
    """Stands where the pipeline is: keeps what it was asked, reports progress, gives back a report."""

    def __init__(self, result: BuildReport | Exception) -> None:
        self.result = result
        self.asked: Json = {}

    def __call__(self, catalogs: Any, targets: Any, out: Any, **options: Any) -> BuildReport:
        self.asked = {"catalogs": catalogs, "targets": targets, "out": out, **options}
        states: list[State] = ["reused", "built", "failed"]
        for i, state in enumerate(states, 1):
            job = Job("sm_90a", "add", f"v{i}", "0" * 64, "module:run")
            options["progress"](Progress(i, 3, job, state, 0.5))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


Install = Callable[[BuildReport | Exception], Pipeline]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a stand-in in the pipeline's place."""

    def install(result: BuildReport | Exception) -> Pipeline:
        stand_in = Pipeline(result)
        monkeypatch.setattr(build, "build", stand_in)
        monkeypatch.setattr(build, "all_backends", lambda: ())
        monkeypatch.setattr(build, "standing", lambda out, key: None)  # whatever was built here before
        monkeypatch.setattr(build, "leave_stamp", lambda key, report: None)
        return stand_in

    return install


def test_options_reach_the_pipeline(kiln: Run, pipeline: Install, tmp_path: Path) -> None:
    stand_in = pipeline(report(tmp_path))
    words = ("--target", "sm_80", "--target", "sm_90a", "--op", "a*", "--catalog", "mine", "--jobs", "3")
    assert kiln("build", *words, "--out", tmp_path)[0] == 0
    asked = {k: v for k, v in stand_in.asked.items() if k not in ("progress", "backends")}
    assert asked == {
        "catalogs": ("mine",),
        "targets": ["sm_80", "sm_90a"],
        "out": str(tmp_path),
        "ops": ["a*"],
        "jobs": 3,
        "reuse": shipped(),
    }


def test_a_tree_to_reuse(kiln: Run, pipeline: Install, tmp_path: Path) -> None:
    stand_in = pipeline(report(tmp_path))
    assert kiln("build", "--reuse", shipped())[0] == 0
    assert stand_in.asked["reuse"] == shipped()
    code, _, err = kiln("build", "--reuse", tmp_path)
    assert code == 2
    assert f"no artifact tree in {tmp_path}" in err


def test_defaults_are_everything(kiln: Run, pipeline: Install, tmp_path: Path) -> None:
    stand_in = pipeline(report(tmp_path))
    assert kiln("build")[0] == 0
    asked = stand_in.asked
    assert (asked["catalogs"], asked["targets"], asked["out"]) == (("kiln.recipes",), None, "aot_artifacts")
    assert asked["reuse"] is None


@pytest.mark.parametrize("jobs", ["0", "-1", "x", "1.5"])
def test_jobs_is_a_count(kiln: Run, jobs: str) -> None:
    code, out, err = kiln("build", f"--jobs={jobs}")
    assert (code, out) == (2, "")
    assert "expected a number from 1 up" in err


def test_summary(kiln: Run, pipeline: Install, tmp_path: Path) -> None:
    pipeline(report(tmp_path))
    code, out, err = kiln("build", "--out", tmp_path)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["sm_90a", "add.v0", "built", "12", "B", "16", "0", "1.50"] in lines
    assert ["cpu-x86_64", "add.generic", "built", "4.0", "KiB", "-", "-", "1.50"] in lines
    assert ["sm_90a", "2", "2", "0", "24", "B", "16", "0", "3.00"] in lines
    assert f"3 kernels in {tmp_path}, generation 3, changed: sm_90a\nroot sha256:000" in out
    assert err == "[3/3] sm_90a add.v3 failed\n"


def test_reused_and_many_kernels_are_summed_up(kiln: Run, pipeline: Install, tmp_path: Path) -> None:
    pipeline(report(tmp_path, "reused"))
    assert "add.v0" not in kiln("build")[1]
    assert "add.v0" in kiln("build", "--all")[1]
    pipeline(report(tmp_path, "built", 100))
    assert "add.v0" not in kiln("build")[1]


def test_json(kiln_json: RunJson, pipeline: Install, tmp_path: Path) -> None:
    pipeline(report(tmp_path))
    code, document = kiln_json("build")
    assert code == 0
    assert (document["out"], document["generation"], document["changed"]) == (str(tmp_path), 3, ["sm_90a"])
    assert document["kernels"][1] == {
        "target": "sm_90a",
        "op": "add",
        "variant": "v0",
        "state": "built",
        "seconds": 1.5,
        **{key: kernel("add", "v0")[key] for key in ("file", "bytes", "sha256", "resources")},
    }


def test_failed_kernels(kiln: Run, kiln_json: RunJson, pipeline: Install) -> None:
    pipeline(FailedJobs([Failure("sm_90a", "add", "v3", "ptxas said no")]))
    code, out, err = kiln("build")
    assert (code, out) == (2, "")
    assert "sm_90a add.v3: ptxas said no" in err
    code, document = kiln_json("build")
    assert code == 2
    assert document["failures"] == [{"target": "sm_90a", "kernel": "add.v3", "why": "ptxas said no"}]


def test_a_build_in_which_kernels_fail_says_what_it_did(
    kiln: Run, kiln_json: RunJson, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good, bad = FakeBackend(targets=("sm_80",)), FakeBackend(targets=("sm_86",), modes={"spilling": "budget"})
    monkeypatch.setattr(build, "all_backends", lambda: (good, bad))
    words = ("build", "--catalog", CATALOG, "--out", tmp_path / "tree")
    code, out, err = kiln(*words, "--jobs", "1")
    assert code == 2
    lines = [line.split() for line in out.splitlines()]
    assert [line[:5] for line in lines if line[:1] == ["target"]] == [
        ["target", "kernel", "state", "size", "regs"],
        ["target", "kernels", "built", "reused", "failed"],
    ]
    assert [line[:5] for line in lines if len(line) > 1 and line[1].isdigit() and line[0][:3] == "sm_"] == [
        ["sm_80", "3", "3", "0", "0"],
        ["sm_86", "2", "2", "0", "1"],
    ]
    assert f"3 kernels in {tmp_path / 'tree'}, generation 1, changed: sm_80\nroot sha256:" in out
    assert "sm_86 spilling.generic: " in err
    code, document = kiln_json(*words, "--jobs", "1")
    assert code == 2
    assert [f["kernel"] for f in document["failures"]] == ["spilling.generic"]
    assert {k["state"] for k in document["kernels"]} == {"reused"}
    monkeypatch.setattr(build, "all_backends", lambda: (bad,))
    words = ("build", "--catalog", CATALOG, "--out", tmp_path / "other")
    assert kiln(*words, "--jobs", "1")[1].splitlines()[-1] == (
        f"{tmp_path / 'other'} is as it was: no target could be built"
    )


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["0", "12", "100"])
def test_the_bar_names_the_kernel(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown() as tell:
        for i in range(3):
            tell(Progress(i + 1, 3, Job("sm_90a", "add", f"v{i}", "0" * 64, "m:r"), "failed", 0.1))
    shown = terminal.getvalue()
    assert "failed" in shown
    if columns == "100":
        assert "sm_90a add.v2" in shown
        assert "3/3" in shown


def test_the_header_of_the_tree_that_was_built(
    kiln: Run, pipeline: Install, tree: Path, tmp_path: Path
) -> None:
    pipeline(report(tree))
    assert kiln("build", "--out", tree, "--c-header", tmp_path / "ops.h")[0] == 0
    assert (tmp_path / "ops.h").read_text("utf-8") == kiln("header", tree)[1]


def test_a_build_that_failed_writes_no_header(
    kiln: Run, pipeline: Install, tree: Path, tmp_path: Path
) -> None:
    pipeline(FailedJobs([Failure("sm_90a", "add", "v0", "no")]))
    assert kiln("build", "--out", tree, "--c-header", tmp_path / "ops.h")[0] == 2
    assert not (tmp_path / "ops.h").exists()
