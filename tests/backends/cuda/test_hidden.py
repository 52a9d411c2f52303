"""What Triton adds to a kernel: memory for tensor maps, clusters, launch attributes; and kernels in Gluon."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kiln.runtime as kiln
from kiln.backends.cuda import compile as worker
from kiln.backends.cuda.backend import CudaBackend
from kiln.backends.cuda.hidden import Hidden
from kiln.compiler.backend import Job
from kiln.compiler.catalog import load
from kiln.compiler.errors import BuildError
from kiln.compiler.signatures import signature_json
from kiln.runtime.arrays import View
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import IntegrityError
from kiln.runtime.manifest import canonical_json, parse_kernel
from kiln.runtime.proof import prove_launch
from kiln.tests.runtime.fake_driver import FakeDriver, read_params
from kiln.tests.runtime.trees import write_tree

CATALOGS = Path(__file__).parents[2] / "catalogs"
TARGET = "sm_90a"
M, N = ["dim", "M"], ["dim", "N"]
NULLS = [{"name": n, "kind": "null", "dtype": "ptr"} for n in ("global_scratch", "profile_scratch")]
Json = Any


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Job]]:
    """The catalog's jobs by variant."""
    sys.path.append(str(CATALOGS))
    ops = load(("tma_copies",)).ops
    yield {j.variant: j for j in CudaBackend().plan(ops, ("tma_copies",), TARGET)}
    sys.path.remove(str(CATALOGS))


@pytest.fixture(scope="module")
def built(jobs: dict[str, Job]) -> dict[str, tuple[Json, bytes]]:
    """Manifest entry and cubin by variant."""
    found = {}
    for variant, job in jobs.items():
        made = worker.run(job)
        found[variant] = (made.kernels[0], next(iter(made.files.values())))
    return found


def test_device_side_tensor_maps_get_memory(built: dict[str, tuple[Json, bytes]]) -> None:
    entry, data = built["any_rows16_cols64"]
    assert entry["params"][-2:] == [
        {
            "name": "global_scratch", "kind": "ptr", "dtype": "u8", "operand": "scratch:global_scratch",
            "access": "write", "align": 128,
        },
        NULLS[1],
    ]  # fmt: skip
    grid = [["cdiv", M, 16], ["cdiv", N, 64], 1]
    size = ["mul", ["mul", 256, grid[0]], grid[1]]
    assert entry["grid"] == grid
    assert entry["scratch"] == [{"name": "global_scratch", "bytes": size, "align": 128}]
    assert prove_launch(parse_kernel(entry), TARGET, data) == []


def test_ctas_of_a_cluster_are_counted(built: dict[str, tuple[Json, bytes]]) -> None:
    """Triton's grid is one of clusters, the driver's one of CTAs, each with a part of its own."""
    entry, data = built["any_rows32_cols64"]
    grid = [["mul", 2, ["cdiv", M, 32]], ["cdiv", N, 64], 1]
    assert (entry["cluster"], entry["grid"]) == ([2, 1, 1], grid)
    assert entry["scratch"][0]["bytes"] == ["mul", ["mul", 256, grid[0]], grid[1]]
    assert prove_launch(parse_kernel(entry), TARGET, data) == []


def test_launch_attributes_are_those_it_was_compiled_for(built: dict[str, tuple[Json, bytes]]) -> None:
    assert {v: e["launch"] for v, (e, _) in built.items() if e["launch"]} == {
        "any_rows64_cols64": {"pdl": True}
    }


@pytest.mark.parametrize("variant", ["any_cols512", "any_cols512_unaligned"])
def test_gluon(built: dict[str, tuple[Json, bytes]], variant: str) -> None:
    entry, data = built[variant]
    assert (entry["op"], entry["entry"]) == ("spelled_out", "spelled_out")
    assert (entry["params"][-2:], entry["scratch"]) == (NULLS, [])
    assert prove_launch(parse_kernel(entry), TARGET, data) == []


def test_a_launch_gets_its_memory(
    jobs: dict[str, Job], built: dict[str, tuple[Json, bytes]], tmp_path: Path
) -> None:
    """Through the loader: proved, selected, launched with the address of a block that is large enough."""
    root = tree(jobs, built, tmp_path)
    driver = FakeDriver()
    driver.stack = [0xC0]
    with kiln.load(root, CudaDevice(0, driver)) as lib:
        operands = {
            n: View(at << 20, (100, 128), (128, 1), "bf16", 0, False, None)
            for n, at in (("x", 1), ("out", 2))
        }
        bound = lib.mapped.bind(**operands, variant="any_rows16_cols64")
        assert (bound.scratch_bytes, bound.zeroed_bytes) == (256 * 7 * 2, 0)
        bound()
        *_, memory, profiler = read_params(driver.launches[-1]["params"], "QQiiqqQQ")
        assert (memory in driver.allocated, profiler) == (True, 0)
        assert "mapped" in str(lib.explain("mapped", **operands))


def test_a_null_for_its_memory_is_not_what_was_compiled(
    jobs: dict[str, Job], built: dict[str, tuple[Json, bytes]], tmp_path: Path
) -> None:
    """Another size of the parameter list is refused; a null in its place is eight bytes as well, and only the
    digest of the manifest stands against it."""
    entry, data = built["any_rows16_cols64"]
    short = {**entry, "params": entry["params"][:-1]}
    (fault,) = prove_launch(parse_kernel(short), TARGET, data)
    assert "takes 8 parameters in its file, the manifest passes 7" in fault
    with (
        pytest.raises(IntegrityError, match="takes 8 parameters"),
        kiln.load(
            tree(jobs, {"any_rows16_cols64": (short, data)}, tmp_path), CudaDevice(0, FakeDriver())
        ) as lib,
    ):
        lib.prepare()


def tree(jobs: dict[str, Job], built: dict[str, tuple[Json, bytes]], folder: Path) -> Path:
    """A tree of these kernels."""
    ops = load(("tma_copies",)).ops
    entries = sorted((e for e, _ in built.values()), key=lambda e: (e["op"], e["variant"]))
    m = {
        "schema": 1, "abi": 1, "target": TARGET, "toolchain": {}, "kernels": entries, "recipes": [],
        "sources": {}, "ops": {n: signature_json(o) for n, o in ops.items()},
    }  # fmt: skip
    return write_tree(folder, {TARGET: canonical_json(m)}, {e["file"]: data for e, data in built.values()})


def test_constants_are_folded() -> None:
    assert Hidden().grid([4, 1, 1]) == [4, 1, 1]
    assert Hidden(ctas=2).grid([4, M, 1]) == [8, M, 1]
    assert Hidden(128, 64, 2).scratch([M, 1, 3])[0]["bytes"] == ["mul", ["mul", 128, ["mul", 2, M]], 3]
    assert Hidden(128, 64).scratch([2, 5, 1])[0]["bytes"] == 1280
    assert Hidden(128, 64).scratch([M, 1, 1])[0]["bytes"] == ["mul", 128, M]
    assert Hidden().scratch([M, 1, 1]) == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"profile_scratch_size": 64}, "compiled for Triton's profiler"),
        ({"global_scratch_align": 512}, "aligned to 512 bytes, a launch gives at most 256"),
        ({"global_scratch_align": 3}, "aligned to 3 bytes"),
    ],
)
def test_what_no_launch_provides(changed: dict[str, int], why: str) -> None:
    good = {"global_scratch_size": 8, "global_scratch_align": 8, "profile_scratch_size": 0, "num_ctas": 1}
    assert worker._hidden(SimpleNamespace(**good), "it") == Hidden(8, 8)
    with pytest.raises(BuildError, match=why):
        worker._hidden(SimpleNamespace(**{**good, **changed}), "it")


def test_scratch_of_the_same_name_is_refused(jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.handwritten

    def clashing(*args: Any) -> worker.Source:
        source = real(*args)
        own = [{"name": "global_scratch", "bytes": 4, "align": 4}]
        return replace(source, entry={**source.entry, "scratch": own})

    monkeypatch.setattr(worker, "handwritten", clashing)
    with pytest.raises(BuildError, match="has the name of Triton's own"):
        worker.run(jobs["any_rows16_cols64"])
