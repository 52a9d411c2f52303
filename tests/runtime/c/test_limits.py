"""libkiln where a call has nothing to compute, a number is the largest, or a handle is several streams."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.errors import ContractError, IntegrityError, UnavailableError
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.test_cuda_calls import Fake, fake, loaded, opened, scratch_call
from kiln.tests.runtime.test_unwritten import (
    WHY,
    X,
    last_row,
    test_an_output_without_elements_is_fine,
)
from kiln.tests.runtime.trees import SOURCE, compile_c, cpu_manifest, dim, write_tree

__all__ = ["fake", "loaded", "test_an_output_without_elements_is_fine"]

PER_THREAD = 2
"""CU_STREAM_PER_THREAD."""


@pytest.fixture
def uneven(c: ctypes.CDLL, tmp_path: Path, ops_so: bytes) -> Iterator[Any]:
    with libkiln.Library(c, last_row(tmp_path / "tree", ops_so)) as library:
        yield library


def test_an_output_without_rows_to_compute_it_is_refused(uneven: Any) -> None:
    assert np.array_equal(uneven.negate(X), -X[0])
    with pytest.raises(ContractError, match=WHY):
        uneven.negate(X[:0])
    with pytest.raises(ContractError, match=WHY):
        uneven.negate(X[:0], out=np.zeros(6, np.float32))


@pytest.mark.parametrize("name", ["kiln_set_scratch", "kiln_set_zeroed_scratch"])
def test_more_scratch_than_there_are_addresses(c: ctypes.CDLL, fake: Fake, name: str) -> None:
    with opened(c, fake) as library:
        for size in (1 << 48, (1 << 64) - (1 << 21) + 1, (1 << 64) - 1):
            with pytest.raises(
                ContractError, match=f"found {size} bytes of scratch, expected fewer than 2.48"
            ):
                library.call(name, library.handle, 7, None, ctypes.c_size_t(size))
        assert "cuMemAllocAsync" not in fake.names()
        library.call(name, library.handle, 7, None, ctypes.c_size_t(1))
        assert fake.names().count("cuMemAllocAsync") == 1


def test_scratch_is_of_one_stream(c: ctypes.CDLL, fake: Fake) -> None:
    why = "found stream 2, which is another one in each thread"
    with opened(c, fake) as library:
        call = scratch_call(library, 64)
        for name in ("kiln_set_scratch", "kiln_set_zeroed_scratch"):
            for buffer in (None, 1 << 45):
                with pytest.raises(UnavailableError, match=why):
                    library.call(name, library.handle, PER_THREAD, buffer, call.scratch_bytes)
        with pytest.raises(UnavailableError, match=why):
            call.launch(PER_THREAD)
        call.launch(PER_THREAD + 1)
        call.free()
    with opened(c, fake, scratch_per_call=1) as library:  # taken and given back in the order of that stream
        call = scratch_call(library, 64)
        call.launch(PER_THREAD)
        call.free()


def test_an_object_that_is_refused_is_not_kept(c: ctypes.CDLL, tmp_path: Path) -> None:
    data = compile_c(tmp_path, f"{SOURCE}\ni64 kiln_check(void) {{ return 5; }}\n")
    root = write_tree(tmp_path / "tree", {"cpu-x86_64": cpu_manifest(data)}, {"ops.so": data})
    with libkiln.Library(c, root) as library:
        before = Path("/proc/self/maps").read_text().count("ops.so")
        for _ in range(3):
            with pytest.raises(IntegrityError, match="check 5 fails"):
                library.negate(X)
        assert Path("/proc/self/maps").read_text().count("ops.so") == before


LEAST = -(1 << 63)


@pytest.mark.parametrize("by", [LEAST, LEAST + 1, -2, -1, 1, 7, (1 << 63) - 1])
def test_remainders_are_pythons(c: ctypes.CDLL, tmp_path: Path, ops_so: bytes, by: int) -> None:
    """Also where the product of the quotient and the divisor fits no 64 bits."""
    found = []
    for rows in (1, 5):
        document = cpu_manifest(ops_so)
        document["ops"]["negate"]["constraints"] = [
            [["eq", ["mod", dim("M"), by], rows % by], "a remainder of another kind"]
        ]
        root = write_tree(tmp_path / f"{rows}", {"cpu-x86_64": document}, {"ops.so": ops_so})
        x = np.ones((rows, 2), np.float32)
        with kiln.load(root) as python, libkiln.Library(c, root) as library:
            found.append(np.array_equal(python.negate(x), library.negate(x)))
    assert all(found)


def test_steps_of_plans_stay_the_trees(c: ctypes.CDLL, tree: Path) -> None:
    """As kiln.h says of providers."""
    asked: list[dict[str, Any]] = []
    x = np.ones((2, 3), np.float32)

    def serve(values: dict[str, Any], stream: int | None) -> int:
        asked.append(values)
        return 0

    with libkiln.Library(c, tree) as library:
        library.register("negate", "mine", serve, priority=1)
        assert np.array_equal(library.scale_negate(x, x), -3 * x)
        assert not asked
        library.negate(x)
        assert asked


def test_numbers_on_the_way_have_64_bits_too(c: ctypes.CDLL, tmp_path: Path, ops_so: bytes) -> None:
    """Both runtimes refuse what one of them could not compute."""
    document = cpu_manifest(ops_so)
    halved = ["floordiv", ["mul", dim("M"), 1 << 61], 1 << 61]
    document["ops"]["negate"]["constraints"] = [[["le", halved, 100], "too many rows"]]
    root = write_tree(tmp_path / "tree", {"cpu-x86_64": document}, {"ops.so": ops_so})
    fits, wide = np.ones((3, 2), np.float32), np.ones((4, 2), np.float32)
    with kiln.load(root) as python, libkiln.Library(c, root) as library:
        for lib in (python, library):
            assert np.array_equal(lib.negate(fits), -fits)
            with pytest.raises(ContractError, match="leaves the range of 64-bit integers in this call"):
                lib.negate(wide)
