"""Loading shared objects from memory."""

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import cpu
from kiln.runtime.errors import IntegrityError, UnavailableError
from kiln.tests.runtime.trees import compile_c, cpu_manifest, write_tree


def test_objects_under_reused_descriptors_stay_apart(tmp_path: Path) -> None:
    """The dynamic linker knows objects by path text; a descriptor number comes back at once."""
    values = []
    for n in range(20):
        source = f"long long kiln_n(void) {{ return {n}; }}"
        values.append(cpu.load_object(compile_c(tmp_path, source), "n.so").kiln_n())
        if n == 3:
            break
    assert values == [0, 1, 2, 3]


def test_two_libraries(tree: Path, tmp_path: Path) -> None:
    other = compile_c(
        tmp_path, (tmp_path / "ops.c").read_text() if (tmp_path / "ops.c").exists() else _other()
    )
    root = write_tree(tmp_path / "other", {"cpu-x86_64": cpu_manifest(other)}, {"ops.so": other})
    x = np.ones((2, 3), np.float32)
    with kiln.load(tree) as a, kiln.load(root) as b:
        assert np.array_equal(a.negate(x), -x)
        assert np.array_equal(b.negate(x), -2 * x)


def _other() -> str:
    from kiln.tests.runtime.trees import SOURCE

    return SOURCE.replace("= -x[", "= -2 * x[")


def test_memory_is_sealed(ops_so: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = cpu._dlopen

    def spy(path: str, name: str) -> object:
        fd = int(path.rpartition("/")[2])
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        opened.append(os.path.realpath(path))
        return original(path, name)

    monkeypatch.setattr(cpu, "_dlopen", spy)
    cpu.load_object(ops_so, "ops.so")
    assert "memfd:ops.so" in opened[0]


def test_without_memory_files(ops_so: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cpu.load_object(ops_so, "ops.so").kiln_negate
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(UnavailableError, match="no memory files and no writable"):
        cpu.load_object(ops_so, "ops.so")


def test_garbage_is_refused() -> None:
    with pytest.raises(IntegrityError, match="dynamic linker refused"):
        cpu.load_object(b"garbage" * 100, "x.so")


def test_missing_entry(tree: Path) -> None:
    with kiln.load(tree) as lib:
        k = lib.manifests["cpu-x86_64"].kernels[0]
        data = (tree / "cpu-x86_64" / k.file).read_bytes()
        import dataclasses

        with pytest.raises(IntegrityError, match="no entry nothing"):
            lib.device.load(dataclasses.replace(k, entry="nothing"), data)


def test_threads_argument(tree: Path) -> None:
    with pytest.raises(kiln.ContractError, match="threads=0"):
        kiln.load(tree, threads=0)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interruption_leaves_nothing_running(
    tree: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """What runs in other threads uses the call's parameters, and writes the caller's arrays: both go then."""
    monkeypatch.setattr(cpu, "MIN_WORK", 1)
    started, left, running = threading.Barrier(2), threading.Event(), threading.Semaphore(0)
    interruptions = iter(range(times - 1))
    real_call, real_wait = cpu.CpuLauncher._call, Future.exception

    def call(self: Any, where: Any, begin: int, end: int) -> int:
        if begin == 0:
            started.wait(10)
            raise KeyboardInterrupt
        started.wait(10)
        left.wait(0.2)
        assert real_call(self, where, begin, end) == 0
        running.release()
        return 0

    def wait(self: Any, timeout: float | None = None) -> Any:
        for _ in interruptions:
            raise KeyboardInterrupt
        return real_wait(self, timeout)

    monkeypatch.setattr(cpu.CpuLauncher, "_call", call)
    monkeypatch.setattr(Future, "exception", wait)
    with kiln.load(tree, threads=2) as library:
        with pytest.raises(KeyboardInterrupt):
            library.negate(np.ones((2, 3), np.float32))
        assert running.acquire(blocking=False), "a thread still runs"
        left.set()
