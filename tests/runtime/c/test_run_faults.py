"""Every request to the system and to the driver failing in turn: a typed error, and nothing left behind."""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.runtime.errors import (
    DriverError,
    IntegrityError,
    KilnError,
    SelectionError,
    TargetError,
    UnavailableError,
)
from kiln.runtime.manifest import parse_manifest
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.fake import FakeCuda, part_of_tree
from kiln.tests.runtime.c.test_cuda_calls import TREE, scratch_call

WRAPPED = ("malloc", "calloc", "realloc", "posix_memalign", "free", "read", "write", "open", "openat",
           "memfd_create", "dlopen")  # fmt: skip
TYPED = (libkiln.OutOfMemoryError, IntegrityError, UnavailableError, TargetError, SelectionError, DriverError)
"""Without the features of /proc/cpuinfo only baselines run, so that a call may find nothing."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """libkiln with the system's answers under control."""
    path = tmp_path_factory.mktemp("faulty") / "libkiln.so"
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    source = Path(__file__).with_name("fault.c")
    found = libkiln.opened(libkiln.build(path, *wraps, extra=(source,), optimize="-O1"))
    for name in ("fault_requests", "fault_live"):
        getattr(found, name).restype = ctypes.c_long
    return found


@pytest.fixture(scope="module")
def cuda_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the committed tree: plans with a temporary, and what they call."""
    return part_of_tree(tmp_path_factory.mktemp("cuda"), TREE, "silu_mul_quant_fp8")


@pytest.fixture
def fake(tmp_path: Path, cuda_tree: Path) -> FakeCuda:
    """The stand-in for libcuda, which knows that tree."""
    made = FakeCuda(tmp_path)
    made.know(cuda_tree, parse_manifest((cuda_tree / "sm_90a" / "MANIFEST.json").read_bytes()))
    return made


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def on_cpu(c: ctypes.CDLL, tree: Path) -> None:
    """Everything a library does on the CPU."""
    x, y = np.ones((5, 7), np.float32), np.ones((5, 7), np.float32)
    with libkiln.Library(c, tree, threads=2) as library:
        library.register("negate", "mine", lambda values, stream: libkiln.DECLINED, priority=5)
        library.disable("nothing_of_this_name")
        assert np.array_equal(library.scale_negate(x, y), -3 * x)
        assert np.array_equal(library.negate(x), -x)
        call = library.scale_negate.bind(x, y)
        try:
            call.launch()
            call.rebind(x=y)
            call.launch()
            library.scale_negate.explain(x, y)
            library.call("kiln_set_scratch", library.handle, None, None, 4096)
        finally:
            call.free()
        library.prepare()


def on_cuda(c: ctypes.CDLL, tree: Path, fake: FakeCuda) -> None:
    """Everything a library does on CUDA."""
    with libkiln.Library(c, tree, "cuda", driver_path=fake.path, poison_scratch=1) as library:
        calls = []
        try:
            for rows in (64, 1 << 14):
                calls.append(scratch_call(library, rows))
                calls[-1].launch(7)
            library.call("kiln_set_scratch", library.handle, 8, None, 1 << 20)
        finally:
            for call in calls:
                call.free()


def each_failing(
    c: ctypes.CDLL, run: Callable[[], None], numbers: tuple[int, ...], step: int = 1
) -> tuple[int, int]:
    """Run with the n-th request failing for every n; how many there are, and how many were refused."""
    run()
    before = descriptors()
    assert c.fault_live() == 0
    c.fault_at(ctypes.c_long(-1), 0)
    run()
    total, refused = c.fault_requests(), 0
    for nth in range(0, total, step):
        for number in numbers:
            c.fault_at(ctypes.c_long(nth), number)
            try:
                run()
            except TYPED:
                refused += 1
            assert c.fault_live() == 0, nth
            assert descriptors() == before, nth
    c.fault_at(ctypes.c_long(-1), 0)
    run()
    return total, refused


def test_every_request_on_the_cpu(faulty: ctypes.CDLL, tree: Path) -> None:
    total, refused = each_failing(faulty, lambda: on_cpu(faulty, tree), (errno.ENOMEM, errno.EIO))
    assert total > 40
    # What can do without does: a block of /proc/cpuinfo, a memory file.
    assert refused > total


def test_every_request_on_cuda(faulty: ctypes.CDLL, cuda_tree: Path, fake: FakeCuda) -> None:
    def run() -> None:
        try:
            on_cuda(faulty, cuda_tree, fake)
        finally:
            assert fake.live() == (0, 0, 0)
            assert fake.c.fake_depth() == 0

    total, refused = each_failing(faulty, run, (errno.ENOMEM,))
    assert total > 40
    assert refused > total / 2


def test_a_sealed_library_asks_the_system_for_nothing(faulty: ctypes.CDLL, tree: Path) -> None:
    """Not even for shapes that it never saw, and more of them than it remembers."""
    with libkiln.Library(faulty, tree, threads=1) as library:
        library.prepare()
        library.set_scratch(1 << 16)
        library.seal()
        calls = []
        for n in range(1, 400):
            x = np.full((n, 3), n, np.float32)
            ops = ((library.negate, (x,)), (library.scale_negate, (x, x)))
            calls += [(op, x, op.prepared(operands, {})) for op, operands in ops]
        faulty.fault_at(ctypes.c_long(-1), 0)
        for _ in range(2):
            for op, x, (items, count, choice, made) in calls:
                made["out"][:] = 0
                library.call("kiln_run", op.handle, items, count, ctypes.byref(choice), None)
                assert np.array_equal(made["out"], -x if op.name == "negate" else -3 * x)
        assert faulty.fault_requests() == 0


@pytest.mark.parametrize("code", [2, 4, 700, 999])
def test_every_driver_call(faulty: ctypes.CDLL, cuda_tree: Path, fake: FakeCuda, code: int) -> None:
    def run() -> None:
        try:
            on_cuda(faulty, cuda_tree, fake)
        finally:
            assert fake.c.fake_depth() == 0

    fake.reset()
    run()
    names = fake.names()
    closing = {"cuModuleUnload", "cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2", "cuCtxPopCurrent_v2"}
    for nth, name in enumerate(names):
        fake.reset()
        fake.c.fake_fail(ctypes.c_long(nth), code)
        refused: Any = None
        before = fake.live()
        try:
            run()
        except KilnError as e:
            refused = e
        assert faulty.fault_live() == 0, (nth, name)
        if name not in closing:
            late = nth > max(i for i, n in enumerate(names) if n == "cuLaunchKernelEx")
            assert late or isinstance(refused, DriverError), (nth, name, refused)
            if isinstance(refused, DriverError):
                assert refused.code == code
                assert "cu" in str(refused)
        memory, modules, contexts = (now - then for now, then in zip(fake.live(), before, strict=True))
        # A context that cannot be entered any more took its modules and memory with it.
        assert contexts <= (name == "cuDevicePrimaryCtxRelease_v2"), (nth, name)
        if name not in ("cuCtxGetCurrent", "cuCtxPushCurrent_v2"):
            assert (memory, modules) == (0, 0), (nth, name)
