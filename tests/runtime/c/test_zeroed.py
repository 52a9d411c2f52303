"""Scratch that is all zeros between launches, on stand-ins for a driver: one table of cases drives the Python
runtime and libkiln."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.arrays import View
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import ContractError, UnavailableError
from kiln.runtime.manifest import canonical_json, parse_manifest
from kiln.runtime.scratch import ALIGN, GRAIN, ScratchPolicy
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.fake import FakeCuda, Launch, RecordingDriver, part_of_tree
from kiln.tests.runtime.c.test_cuda_calls import TREE, norm
from kiln.tests.runtime.test_call import counting_tree
from kiln.tests.runtime.trees import dim, write_tree
from kiln.tests.support.documents import manifest_document

COUNTERS = {"name": "counters", "bytes": ["mul", 4, dim("M")], "align": 256, "zeroed": True}
WORK = {"name": "work", "bytes": ["mul", 8, dim("M")], "align": 256}
STREAM, OTHER = 0x51, 0x52


class Half(Protocol):
    """A runtime on a driver whose memory is the host's."""

    lib: Any

    def capture(self, on: bool) -> None:
        """Whether streams are being captured from now on."""

    def names(self) -> list[str]:
        """The driver's functions that were called since the last `forget`."""

    def forget(self) -> None:
        """Forget calls and launches."""

    def launches(self) -> list[Launch]:
        """Launches since then."""

    def reserve(self, call: dict[str, Any], stream: int) -> None:
        """Make sure that a call finds its scratch."""


class MemoryDriver(RecordingDriver):
    """Memory that is there, of arbitrary content."""

    def __init__(self, manifest: Any) -> None:
        super().__init__(manifest)
        self.held: dict[int, Any] = {}

    def cuMemAllocAsync(self, size: int, stream: int) -> Any:
        raw = np.full(size + 512, 0x5A, np.uint8)
        address = -(-raw.ctypes.data // 512) * 512
        result = self._result("cuMemAllocAsync", (size, stream), address)
        if result[0] == 0:
            self.held[address] = raw
            self.allocated[address] = size
        return result

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> Any:
        ctypes.memset(address, value, count)
        return super().cuMemsetD8Async(address, value, count, stream)


class PythonHalf:
    """The Python runtime."""

    def __init__(self, root: Path, policy: ScratchPolicy) -> None:
        self.driver = MemoryDriver(parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes()))
        self.driver.stack = [0xC0]
        self.lib = kiln.load(root, CudaDevice(0, self.driver, scratch=policy))

    def capture(self, on: bool) -> None:
        self.driver.capturing = {STREAM, OTHER} if on else set()

    def names(self) -> list[str]:
        return self.driver.names()

    def forget(self) -> None:
        self.driver.log.clear()
        self.driver.recorded.clear()

    def launches(self) -> list[Launch]:
        return self.driver.recorded

    def reserve(self, call: dict[str, Any], stream: int) -> None:
        self.lib.reserve("rms_norm", **call, stream=stream)


class CHalf:
    """libkiln."""

    def __init__(self, c: ctypes.CDLL, fake: FakeCuda, root: Path, policy: ScratchPolicy) -> None:
        fake.know(root, parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes()))
        self.fake = fake
        fake.c.fake_push(0)
        how = {"poison_scratch": policy.poison, "scratch_per_call": not policy.pool}
        self.lib = libkiln.Library(c, root, "cuda", driver_path=fake.path, **how)

    def capture(self, on: bool) -> None:
        self.fake.c.fake_capture(on)

    def names(self) -> list[str]:
        return self.fake.names()

    def forget(self) -> None:
        self.fake.reset()

    def launches(self) -> list[Launch]:
        return self.fake.launches()

    def reserve(self, call: dict[str, Any], stream: int) -> None:
        bound = self.lib.rms_norm.bind(**call)
        for zeroed, size in ((False, bound.scratch_bytes), (True, bound.zeroed_bytes)):
            if size:
                self.lib.set_scratch(size, stream, zeroed=zeroed)
        bound.free()


def with_scratch(root: Path, *scratch: dict[str, Any]) -> Path:
    """rms_norm of the committed tree, whose hidden parameters, which its kernels never read, point to
    scratch."""
    part = part_of_tree(root / "part", TREE, "rms_norm", scratch=list(scratch))
    m = manifest_document(part / "sm_90a")
    for kernel in m["kernels"]:
        hidden = [i for i, p in enumerate(kernel["params"]) if p["kind"] == "null"]
        for i, s in zip(hidden, scratch, strict=False):
            kernel["params"][i] = {
                "kind": "ptr", "name": s["name"], "dtype": "u8", "operand": f"scratch:{s['name']}",
                "access": "write", "align": 256,
            }  # fmt: skip
    files = {k["file"]: (part / "sm_90a" / k["file"]).read_bytes() for k in m["kernels"]}
    return write_tree(root / "tree", {"sm_90a": canonical_json(m)}, files)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(tmp_path_factory.mktemp("cuda"))


Opens = Callable[..., Half]


@pytest.fixture(params=["python", "c"])
def opens(request: pytest.FixtureRequest, c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path) -> Iterator[Opens]:
    """What opens a half over a tree whose kernels need the given scratch."""
    opened: list[Half] = []

    def half(*scratch: dict[str, Any], policy: ScratchPolicy | None = None) -> Half:
        fake.reset()
        root = with_scratch(tmp_path, *(scratch or (COUNTERS, WORK)))
        known = policy or ScratchPolicy()
        opened.append(PythonHalf(root, known) if request.param == "python" else CHalf(c, fake, root, known))
        return opened[-1]

    yield half
    for found in opened:
        found.capture(False)
        found.lib.close()
        if isinstance(found, CHalf):
            fake.c.fake_pop()
            assert fake.live() == (0, 0, 0)
        else:
            assert isinstance(found, PythonHalf)
            assert found.driver.allocated == {}


def content(address: int, size: int) -> set[int]:
    """The different bytes of memory."""
    return set(ctypes.string_at(address, size))


def scratch_of(half: Half) -> list[int]:
    """The addresses of scratch in the last launch: its last parameters."""
    *_, first, second = half.launches()[-1].params
    return [first, second]


def test_zeroed_when_allocated_and_never_again(opens: Opens) -> None:
    half = opens()
    half.lib.rms_norm(**norm(), stream=STREAM)
    counters, work = scratch_of(half)
    assert half.names().count("cuMemsetD8Async") == 1
    order = [n for n in half.names() if n in ("cuMemsetD8Async", "cuStreamSynchronize", "cuLaunchKernelEx")]
    # A graph that uses it may be replayed on another stream: it is zero before any launch is queued.
    assert order[-3:] == ["cuMemsetD8Async", "cuStreamSynchronize", "cuLaunchKernelEx"]
    assert content(counters, GRAIN) == {0}
    assert counters % ALIGN == 0
    assert not counters <= work < counters + GRAIN
    # As a kernel would that was aborted: nobody else makes it zero again.
    ctypes.memset(counters, 7, 4)
    half.forget()
    half.lib.rms_norm(**norm(2), stream=STREAM)
    bound = half.lib.rms_norm.bind(**norm(3))
    bound(stream=STREAM)
    assert "cuMemsetD8Async" not in half.names()
    assert "cuMemAllocAsync" not in half.names()
    assert scratch_of(half) == [counters, work]
    assert content(counters, 4) == {7}
    assert half.lib.scratch.zeroed.counters == (2, 1, 0, 1, GRAIN)
    assert half.lib.scratch.counters == (2, 1, 0, 1, GRAIN)


def test_a_larger_block_is_zeroed(opens: Opens) -> None:
    half = opens()
    half.lib.rms_norm(**norm(), stream=STREAM)
    small, _ = scratch_of(half)
    rows = GRAIN // 4 + 1
    half.lib.rms_norm(**norm(rows, out=norm(rows)["out"]._replace(ptr=1 << 45)), stream=STREAM)
    large, _ = scratch_of(half)
    assert large != small
    assert content(large, 2 * GRAIN) == {0}
    assert half.lib.scratch.zeroed.counters.growths == 2


def test_streams_and_kinds_never_share(opens: Opens) -> None:
    half = opens()
    seen: set[tuple[int, int, int]] = set()
    for stream in (STREAM, OTHER, STREAM, OTHER):
        half.lib.rms_norm(**norm(), stream=stream)
        seen.update((stream, kind, at) for kind, at in enumerate(scratch_of(half)))
    assert len(seen) == len({at for *_, at in seen}) == 4


def test_it_is_not_poisoned(opens: Opens) -> None:
    half = opens(policy=ScratchPolicy(poison=True))
    for _ in range(2):
        half.lib.rms_norm(**norm(), stream=STREAM)
        counters, work = scratch_of(half)
        assert content(counters, GRAIN) == {0}
        assert content(work, 32) == {0xFF}
    assert half.lib.scratch.zeroed.counters.fills == 0
    assert half.lib.scratch.counters.fills == 2


def test_only_zeroed_scratch(opens: Opens) -> None:
    half = opens(COUNTERS)
    bound = half.lib.rms_norm.bind(**norm())
    assert (bound.scratch_bytes, bound.zeroed_bytes) == (0, ALIGN)
    bound(stream=STREAM)
    half.lib.rms_norm(**norm(), stream=STREAM)
    assert half.names().count("cuMemAllocAsync") == 1
    assert half.lib.scratch.counters == (0, 0, 0, 0, 0)


def test_a_capture_needs_it_prepared(opens: Opens) -> None:
    half = opens()
    half.lib.prepare(["rms_norm"])
    half.capture(True)
    with pytest.raises(UnavailableError, match=r"rms_norm.*scratch growth during graph capture"):
        half.lib.rms_norm(**norm(), stream=STREAM)
    half.capture(False)
    half.lib.set_scratch(View(1 << 44, (1024,), (1,), "u8", 0, False, None), STREAM)
    half.capture(True)
    with pytest.raises(UnavailableError, match=r"zeroed scratch growth during graph capture: need (16|256)"):
        half.lib.rms_norm(**norm(), stream=STREAM)
    half.capture(False)
    half.reserve(norm(), STREAM)
    half.capture(True)
    half.forget()
    half.capture(True)
    half.lib.rms_norm(**norm(), stream=STREAM)
    assert "cuMemsetD8Async" not in half.names()
    assert len(half.launches()) == 1


def test_sealed_it_must_be_reserved(opens: Opens) -> None:
    half = opens(COUNTERS)
    half.lib.prepare(["rms_norm"])
    half.reserve(norm(), STREAM)
    half.lib.seal()
    half.forget()
    half.lib.rms_norm(**norm(), stream=STREAM)
    assert set(half.names()) <= {"cuLaunchKernelEx", "cuCtxGetCurrent"}
    with pytest.raises(UnavailableError, match=r"zeroed scratch.*sealed"):
        half.lib.rms_norm(**norm(), stream=OTHER)


def test_release_gives_a_fresh_one(opens: Opens) -> None:
    half = opens()
    half.lib.rms_norm(**norm(), stream=STREAM)
    ctypes.memset(scratch_of(half)[0], 7, 4)
    half.forget()
    half.lib.scratch.release(STREAM)
    names = half.names()
    assert names.index("cuStreamSynchronize") < min(i for i, n in enumerate(names) if "MemFree" in n)
    assert sum("MemFree" in n for n in names) == 2
    assert half.lib.scratch.zeroed.counters[3:] == half.lib.scratch.counters[3:] == (0, 0)
    half.lib.rms_norm(**norm(), stream=STREAM)
    assert content(scratch_of(half)[0], GRAIN) == {0}


def test_a_buffer_of_the_callers(opens: Opens) -> None:
    """The caller's, to fill with zeros; it is never touched here, and too small a one is refused."""
    half = opens(COUNTERS)
    need = half.lib.rms_norm.bind(**norm(64)).zeroed_bytes
    mine = View(1 << 44, (need,), (1,), "u8", 0, False, None)
    half.lib.set_scratch(mine, STREAM, zeroed=True)
    half.forget()
    half.lib.rms_norm(**norm(64), stream=STREAM)
    assert mine.ptr in scratch_of(half)
    assert {"cuMemsetD8Async", "cuMemAllocAsync"}.isdisjoint(half.names())
    rows = 64 + ALIGN // 4
    with pytest.raises(UnavailableError, match=r"zeroed scratch.*(caller's buffer|buffer given)"):
        half.lib.rms_norm(**norm(rows), stream=STREAM)
    with pytest.raises(ContractError, match="256"):
        half.lib.set_scratch(mine._replace(ptr=mine.ptr + 8), STREAM, zeroed=True)
    half.lib.scratch.release(STREAM)
    half.lib.rms_norm(**norm(rows), stream=STREAM)
    assert content(scratch_of(half)[0], GRAIN) == {0}


def test_without_a_pool_each_launch_zeroes(opens: Opens) -> None:
    half = opens(policy=ScratchPolicy(pool=False, poison=True))
    for _ in range(2):
        half.forget()
        half.lib.rms_norm(**norm(), stream=STREAM)
        assert half.names().count("cuMemAllocAsync") == half.names().count("cuMemFreeAsync") == 2
        assert half.names().count("cuMemsetD8Async") == 2
        assert "cuStreamSynchronize" not in half.names()
    assert half.lib.scratch.zeroed.counters[1:] == (2, 0, 0, 0)


def test_memory_that_cannot_be_zeroed_is_given_back(opens: Opens) -> None:
    half = opens(COUNTERS)
    half.lib.prepare(["rms_norm"])
    if isinstance(half, CHalf):
        half.fake.c.fake_fail_named(b"cuMemsetD8Async", 1)
    else:
        assert isinstance(half, PythonHalf)
        half.driver.fail["cuMemsetD8Async"] = 1  # type: ignore[assignment]
    with pytest.raises(kiln.KilnError, match="cuMemsetD8Async"):
        half.lib.rms_norm(**norm(), stream=STREAM)
    assert half.lib.scratch.zeroed.counters[3:] == (0, 0)
    assert not half.launches()
    if isinstance(half, PythonHalf):
        half.driver.fail.clear()


def test_it_shows_in_no_explanation(opens: Opens) -> None:
    half = opens()
    verdicts = half.lib.explain("rms_norm", **norm()).verdicts
    assert [v.variant for v in verdicts if v.why is None]
    assert "cuMemAllocAsync" not in half.names()


def test_the_selftests_run_it(c: ctypes.CDLL, tmp_path: Path) -> None:
    """Each kernel runs twice and must find zeros."""
    root = counting_tree(tmp_path)
    with kiln.load(root, scratch=ScratchPolicy(poison=True)) as python:
        report = python.selftest()
        assert report.ok, str(report)
        assert python.scratch.zeroed.counters.growths == 1
    with libkiln.Library(c, root, poison_scratch=1) as library:
        failures = ctypes.c_uint32(1)
        seen = libkiln.SelftestSeen(lambda *_: None)
        library.call("kiln_selftest", library.handle, seen, None, ctypes.byref(failures))
        assert failures.value == 0
        assert library.stats()["negate"]["base"] == 2
