"""Trees for tests: what another tree holds of the same inputs is not compiled; nothing else of it is used."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.compiler.backend import Job
from kiln.ir.spec import Op
from kiln.runtime.targets import cpu_target
from kiln.runtime.verify import verify_tree
from kiln.tests.support.committed import build_from

OP = "mul"


class Changed(CpuBackend):
    """A backend whose sources have changed."""

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        """The same jobs with other inputs."""
        return [replace(job, inputs_digest="1" * 64) for job in super().plan(ops, catalogs, target)]


def states(out: Path, tree: Path, backend: CpuBackend) -> set[str]:
    report = build_from(out, [cpu_target()], [OP], [backend], tree=tree)
    assert verify_tree(out) == []
    return {kernel.state for kernel in report.kernels}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree that was compiled, for there was nothing to take from."""
    folder = tmp_path_factory.mktemp("made")
    assert states(folder / "tree", folder / "absent", CpuBackend()) == {"built"}
    return folder / "tree"


def test_the_same_inputs_are_taken(made: Path, tmp_path: Path) -> None:
    assert states(tmp_path / "tree", made, CpuBackend()) == {"reused"}
    for path in made.glob("*/*"):
        assert (tmp_path / "tree" / path.relative_to(made)).read_bytes() == path.read_bytes()


def test_other_inputs_are_compiled(made: Path, tmp_path: Path) -> None:
    assert states(tmp_path / "tree", made, Changed()) == {"built"}


def test_damaged_artifacts_are_compiled(made: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(made, tmp_path / "damaged")
    for artifact in damaged.glob("*/*.so"):
        sound = artifact.read_bytes()
        artifact.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert states(tmp_path / "tree", damaged, CpuBackend()) == {"built"}
