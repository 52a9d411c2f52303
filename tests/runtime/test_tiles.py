"""The permission that kernels on AMX tiles need: asked for when one is first looked at, and its refusal told,
in both runtimes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.cpu import CpuDevice
from kiln.runtime.targets import cpu_features
from kiln.runtime.tiles import needs_tiles
from kiln.tests.runtime import tiles_calls
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.trees import PARAMS, compile_c, kernel, manifest, write_tree

with_amx = pytest.mark.skipif("amxtile" not in cpu_features(), reason="this CPU has no AMX")
TIER = "x86-64-v4-amx"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with an exact kernel and a fast one that says it uses tiles."""
    folder = tmp_path_factory.mktemp("tiles")
    data = compile_c(folder)
    isa = {"tier": TIER, "features": ["amx_tile"]}
    entries = [
        kernel("negate", "base", PARAMS["negate"], data),
        kernel("negate", "tiled", PARAMS["negate"], data, mode="fast", isa=isa),
    ]
    return write_tree(folder / "tree", {"cpu-x86_64": manifest(entries, recipes=[])}, {"ops.so": data})


@pytest.fixture(scope="module", params=["python", "libkiln"])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `tiles_calls` is told: a build of libkiln, or "-"."""
    if request.param == "python":
        return "-"
    return str(libkiln.build(tmp_path_factory.mktemp("c") / "libkiln.so"))


def calls(root: Path, runtime: str, wish: str) -> Any:
    """What a process of its own tells."""
    command = [sys.executable, tiles_calls.__file__, str(root), runtime, wish]
    env = {**os.environ, "PYTHONPATH": str(Path(tiles_calls.__file__).parents[3])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@with_amx
def test_linux_is_asked_when_a_kernel_first_needs_it(root: Path, runtime: str) -> None:
    found = calls(root, runtime, "allow")
    assert not found["early"]
    assert found["late"]
    assert found["same"]
    assert f"tiled (generated, {TIER}): runs" in found["told"]


@with_amx
def test_a_refusal_is_told_and_the_next_kernel_runs(root: Path, runtime: str) -> None:
    found = calls(root, runtime, "deny")
    why = "Linux does not let this process use AMX tiles (arch_prctl: Operation not permitted)"
    assert f"tiled (generated, {TIER}): {why}" in found["told"]
    assert "base (generated, x86-64): runs" in found["told"]
    assert found["same"]
    assert not found["late"]


def test_a_cpu_without_tiles_is_not_asked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> str:
        raise AssertionError

    monkeypatch.setattr("kiln.runtime.cpu.tiles_refusal", asked)
    with kiln.load(root, CpuDevice(features=())) as lib:
        told = lib.explain("negate", np.ones((2, 3), np.float32), mode="fast").verdicts
    assert [(v.variant, v.why) for v in told if v.why] == [("tiled", "this CPU lacks amx_tile")]


def test_which_features_are_tiles() -> None:
    assert needs_tiles(["avx512f", "amx_tile", "amx_bf16"])
    assert not needs_tiles(["avx512f", "amx_bf16"])
    assert not needs_tiles([])
