"""Fixtures of the runtime's tests: compiled once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kiln.runtime import fastcall
from kiln.tests.runtime.trees import compile_c, cpu_manifest, write_tree

BOTH_WAYS = (
    "test_arrays", "test_bound", "test_call", "test_changes", "test_contexts", "test_cpu", "test_cuda",
    "test_faults", "test_providers", "test_scratch", "test_seal", "test_shortcut", "test_torch",
    "test_torch_calls",
)  # fmt: skip
"""Modules of tests that make calls: they run with the C extension and without."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of those modules both ways."""
    if metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS:
        metafunc.parametrize("way", ["c", "python"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who answers calls of layouts that were met before."""
    found: str = getattr(request, "param", "c")
    with pytest.MonkeyPatch.context() as patch:
        if found == "python":
            patch.setattr(fastcall, "native", lambda: fastcall.Native(None, "switched off by a test"))
        yield found


@pytest.fixture(scope="session")
def ops_so(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The shared object of the test ops."""
    return compile_c(tmp_path_factory.mktemp("ops"))


@pytest.fixture
def tree(tmp_path: Path, ops_so: bytes) -> Path:
    """A good tree for this CPU."""
    return write_tree(tmp_path / "tree", {"cpu-x86_64": cpu_manifest(ops_so)}, {"ops.so": ops_so})
