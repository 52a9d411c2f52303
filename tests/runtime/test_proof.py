"""The launch proof: true entries pass, every false one is told, and nothing is told of the rest."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from kiln.runtime.cubin import read_cubin
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import (
    MAX_THREADS,
    SHARED_LIMITS,
    measured_resources,
    prove_kernel,
    prove_launch,
    read_artifact,
)
from kiln.tests.cubins import CUDA_ARCHES, assemble, compiled, shared_object
from kiln.tests.trees import C_SOURCE, Json, cpu_kernel, cuda_kernel


def faults(entry: Json, target: str, data: bytes) -> list[str]:
    return prove_launch(parse_kernel(entry), target, data)


@pytest.mark.parametrize("target", CUDA_ARCHES)
@pytest.mark.parametrize("name", ["scaled_sum", "spilling", "doubled"])
def test_true_entries_are_proved(name: str, target: str) -> None:
    made = compiled()[name, target]
    assert faults(cuda_kernel(made), target, made.data) == []


def change(entry: Json, path: str, value: Any) -> Json:
    """A copy of the entry with one place set; a callable maps the old value to the new."""
    out: Any = copy.deepcopy(entry)
    *parts, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    inner = out
    for part in parts:
        inner = inner[part]
    inner[last] = value(inner[last]) if callable(value) else value
    return dict(out)


def scalar(name: str, dtype: str) -> Json:
    return {"name": name, "kind": "scalar", "dtype": dtype, "value": 1, "divisible_by": 1}


FALSE: list[tuple[str, Any, str]] = [
    ("entry", "scaled_sun", "must be the one kernel of its file"),
    ("block", [64, 1, 1], "requires the block (128, 1, 1)"),
    ("block", [1, 128, 1], "requires the block (128, 1, 1)"),
    ("params", lambda p: p[:-1], "takes 6 parameters in its file, the manifest passes 5"),
    ("params", lambda p: [*p, p[-1]], "the manifest passes 7"),
    ("params/2", scalar("n", "i64"), "the manifest passes 'n' as 8 bytes at offset 16"),
    ("params/3", scalar("s", "f64"), "the manifest passes 's' as 8 bytes at offset 24"),
    ("params/2", {"name": "n", "kind": "dropped", "dtype": "i32", "value": 1, "equals": 1}, "passes 5"),
    ("params/0", scalar("x", "i32"), "the manifest passes 'x' as 4 bytes at offset 0"),
    ("resources/registers", lambda n: n + 1, "registers in its file"),
    ("resources/stack", 8, "0 stack in its file, the manifest says 8"),
    ("resources/static_shared", 1024, "0 static_shared in its file, the manifest says 1024"),
    ("resources/code_bytes", lambda n: n - 128, "code_bytes in its file"),
    ("resources/spill_stores", 4, "no stack to spill to"),
    ("resources", lambda r: {k: v for k, v in r.items() if k != "spill_loads"}, "how many spill_loads"),
    ("resources", lambda r: {k: v for k, v in r.items() if k != "registers"}, "the manifest says None"),
    ("budget/warmth", 8, "has a budget for warmth"),
    ("budget/registers", 8, "its budget is 8"),
    ("budget/code_bytes", 1, "its budget is 1"),
    ("shared_bytes", 240000, "bytes of shared memory a block"),
]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(("path", "value", "words"), FALSE)
def test_false_entries_are_told(path: str, value: Any, words: str, target: str) -> None:
    made = compiled()["scaled_sum", target]
    found = faults(change(cuda_kernel(made), path, value), target, made.data)
    assert any(words in fault for fault in found), found
    assert all(fault.startswith("Kernel '") and fault.endswith(f"build {target} again.") for fault in found)


def test_entries_with_dropped_parameters_are_proved() -> None:
    made = compiled()["doubled", "sm_86"]
    entry = cuda_kernel(made)
    entry["params"].insert(2, {"name": "one", "kind": "dropped", "dtype": "i32", "value": 1, "equals": 1})
    assert faults(entry, "sm_86", made.data) == []


@pytest.mark.parametrize(
    "target", ["sm_86", "sm_89", "sm_90", "sm_100a", "sm_80a", "cpu-x86_64", "sm_", "SM_80"]
)
def test_another_target_is_told(target: str) -> None:
    made = compiled()["doubled", "sm_80"]
    assert faults(cuda_kernel(made), target, made.data)


def test_swapped_files_are_told_even_with_their_digests_swapped() -> None:
    one, two = compiled()["doubled", "sm_90a"], compiled()["scaled_sum", "sm_90a"]
    assert faults(cuda_kernel(one), "sm_90a", two.data)
    assert faults(cuda_kernel(compiled()["doubled", "sm_80"]), "sm_80", compiled()["doubled", "sm_86"].data)


PTX = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry one(.param .u64 p) .reqntid {threads}, 1, 1 {cluster} {{
  .shared .align 16 .b8 here[{shared}];
  .reg .b64 %d<4>; .reg .b32 %r<3>;
  ld.param.u64 %d1, [p]; mov.u64 %d2, here; cvt.u32.u64 %r1, %d2; ld.shared.u32 %r2, [%r1];
  st.global.u32 [%d1], %r2; ret;
}}
{more}
"""


def one(threads: int = 128, shared: int = 512, cluster: str = "", more: str = "") -> tuple[Json, bytes]:
    data = assemble(PTX.format(threads=threads, shared=shared, cluster=cluster, more=more), "sm_90a")
    entry = cuda_kernel(compiled()["doubled", "sm_90a"])
    resources = measured_resources(read_artifact("sm_90a", data), "one") | {
        "spill_stores": 0,
        "spill_loads": 0,
    }
    entry |= {"entry": "one", "params": entry["params"][:1], "block": [threads, 1, 1], "resources": resources}
    return {**entry, "budget": {}, "shared_bytes": 0}, data


def test_static_shared_memory_counts_towards_the_limit() -> None:
    entry, data = one()
    assert entry["resources"]["static_shared"] == 512
    assert faults(change(entry, "shared_bytes", SHARED_LIMITS[90] - 512), "sm_90a", data) == []
    (fault,) = faults(change(entry, "shared_bytes", SHARED_LIMITS[90] - 511), "sm_90a", data)
    assert "232449 bytes of shared memory" in fault


def test_two_kernels_in_one_file_are_told() -> None:
    entry, data = one(more=".visible .entry two() { ret; }")
    (fault,) = faults(entry, "sm_90a", data)
    assert "holds ['one', 'two']" in fault


def test_the_cluster_must_be_the_files() -> None:
    entry, data = one(cluster=".reqnctapercluster 2, 1, 1")
    (fault,) = faults(entry, "sm_90a", data)
    assert "requires the cluster (2, 1, 1)" in fault
    assert faults({**entry, "cluster": [2, 1, 1]}, "sm_90a", data) == []


def test_a_file_that_fixes_no_block_is_told() -> None:
    entry, data = one()
    text = PTX.replace(".reqntid {threads}, 1, 1", "").format(shared=512, cluster="", more="")
    (fault,) = faults(entry, "sm_90a", assemble(text, "sm_90a"))
    assert "requires the block None" in fault
    assert faults(entry, "sm_90a", data) == []


def test_blocks_that_no_device_can_hold_are_told() -> None:
    made = compiled()["scaled_sum", "sm_90a"]
    found = faults(change(cuda_kernel(made), "block", [1024, 2, 1]), "sm_90a", made.data)
    assert any(f"the limit is {MAX_THREADS}" in fault for fault in found)
    cubin = read_cubin(made.data)
    greedy = replace(cubin.kernels["scaled_sum"], registers=80, reqntid=(1024, 1, 1))
    entry = change(cuda_kernel(made), "block", [1024, 1, 1])
    found = prove_kernel(parse_kernel(entry), "sm_90a", replace(cubin, kernels={"scaled_sum": greedy}))
    assert any("needs 81920 registers a block (1024 threads of 80)" in fault for fault in found)


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"version https://git-lfs.github.com/spec/v1\n", bytes(4096)]
)
@pytest.mark.parametrize("target", ["sm_90a", "cpu-x86_64"])
def test_bytes_that_are_no_artifact_are_told(data: bytes, target: str) -> None:
    assert len(faults(cuda_kernel(compiled()["doubled", "sm_90a"]), target, data)) == 1


@pytest.mark.parametrize("target", ["cpu-x86_64", "cpu-aarch64"])
def test_true_cpu_entries_are_proved(target: str) -> None:
    for name in ("doubled", "scaled_sum"):
        entry, data = cpu_kernel(name, target)
        assert faults(entry, target, data) == []


EXTRA = {
    "": ("cpu-aarch64", "is built for x86_64"),
    '__attribute__((constructor)) static void f(void) { __asm__ volatile(""); }': ("cpu-x86_64", "runs code"),
    "void hook(void); void g(void) { hook(); }": ("cpu-x86_64", "takes symbols from its process: hook"),
}


@pytest.mark.parametrize("extra", EXTRA)
def test_false_cpu_entries_are_told(extra: str) -> None:
    target, words = EXTRA[extra]
    entry, _ = cpu_kernel("doubled")
    (fault,) = faults(entry, target, shared_object(C_SOURCE + extra))
    assert words in fault


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("entry", "tripled", "is not among the functions of its file"),
        ("resources/code_bytes", 1, "code_bytes in its file, the manifest says 1"),
        ("budget/code_bytes", 2, "its budget is 2"),
    ],
)
def test_cpu_entries_are_compared_with_their_file(path: str, value: Any, words: str) -> None:
    entry, data = cpu_kernel("doubled")
    (fault,) = faults(change(entry, path, value), "cpu-x86_64", data)
    assert words in fault
