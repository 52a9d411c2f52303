"""Every allocation, open and read failing in turn: a typed error, nothing leaked, no descriptor left open."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kiln.runtime.manifest import canonical_json
from kiln.tests.cubins import compiled, shared_object
from kiln.tests.runtime.c.core_build import ACCEPTED, HERE, Core, Verdict, build
from kiln.tests.runtime.c.documents import rich
from kiln.tests.runtime.c.test_trees import archive
from kiln.tests.runtime.test_manifest import index
from kiln.tests.runtime.test_verify import tree
from kiln.tests.trees import C_SOURCE

__all__ = ["tree"]  # a fixture


@pytest.fixture(scope="session")
def faulty_core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    """The core whose allocations, each piece of an arena one, and system calls can be made to fail."""
    options = [
        "-D_POSIX_C_SOURCE=200809L",
        "-DALONE=1",
        "-include",
        str(HERE / "faulty.h"),
        str(HERE / "faulty.c"),
    ]
    return Core(build(tmp_path_factory.mktemp("faulty_core"), *options))


def counter(core: Core, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(core.lib, name)


def live(core: Core) -> int:
    return ctypes.c_long.in_dll(core.lib, "test_live").value


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


READERS: dict[str, Callable[[Core, Path], Verdict]] = {
    "json": lambda core, _: core.json(canonical_json({str(i): [i] for i in range(100)})),
    "manifest": lambda core, _: core.manifest_verdict(canonical_json(rich())),
    "index": lambda core, _: core.index(canonical_json(index()))[0],
    "cubin": lambda core, _: core.artifact("sm_90a", compiled()["scaled_sum", "sm_90a"].data),
    "object": lambda core, _: core.artifact("cpu-x86_64", shared_object(C_SOURCE)),
    "tree": lambda core, root: core.verify(root)[0],
    "archive": lambda core, root: core.verify(archive(root))[0],
}


@pytest.mark.parametrize("name", READERS)
def test_every_allocation_may_fail(faulty_core: Core, tree: Path, name: str) -> None:
    read, left = READERS[name], counter(faulty_core, "test_fail_alloc")
    before, opened, failures = live(faulty_core), descriptors(), 0
    while True:
        left.value = failures
        verdict = read(faulty_core, tree)
        left.value, unused = -1, left.value
        assert (live(faulty_core), descriptors()) == (before, opened)
        if unused >= 0:
            break
        assert verdict.code == "MemoryError", failures
        failures += 1 + failures // 100
    assert verdict == ACCEPTED
    assert failures > 10


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENFILE, errno.ENOMEM])
def test_every_system_call_may_fail(faulty_core: Core, tree: Path, number: int) -> None:
    left = counter(faulty_core, "test_fail_call")
    counter(faulty_core, "test_fail_errno").value = number
    before, opened, failures = live(faulty_core), descriptors(), 0
    while True:
        left.value = failures
        verdict, faults = faulty_core.verify(tree)
        left.value, unused = -1, left.value
        assert (live(faulty_core), descriptors()) == (before, opened)
        if unused >= 0:
            break
        assert verdict != ACCEPTED or faults != []
        assert verdict.code in ("accepted", "UnavailableError", "IntegrityError", "MemoryError")
        failures += 1
    assert (verdict, faults) == (ACCEPTED, [])
    assert failures > 30
