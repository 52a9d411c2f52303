"""Fixtures of the runtime's tests: compiled once a session."""

from pathlib import Path

import pytest

from kiln.tests.runtime.trees import compile_c, cpu_manifest, write_tree


@pytest.fixture(scope="session")
def ops_so(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The shared object of the test ops."""
    return compile_c(tmp_path_factory.mktemp("ops"))


@pytest.fixture
def tree(tmp_path: Path, ops_so: bytes) -> Path:
    """A good tree for this CPU."""
    return write_tree(tmp_path / "tree", {"cpu-x86_64": cpu_manifest(ops_so)}, {"ops.so": ops_so})
