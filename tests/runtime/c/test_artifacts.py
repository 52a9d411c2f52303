"""libkiln's readers of cubins and shared objects, and its launch proof: the verdicts and the sentences of the
Python ones."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.cubin import read_cubin
from kiln.runtime.manifest import canonical_json, parse_kernel, parse_manifest
from kiln.runtime.proof import prove_launch, read_artifact
from kiln.runtime.shared_object import read_shared_object
from kiln.tests.cubins import CUDA_ARCHES, assemble, compiled, shared_object
from kiln.tests.runtime.c.core_build import ACCEPTED, Core, Verdict, python_verdict
from kiln.tests.runtime.test_cubin import (
    ARCHES,
    CONSTRUCTOR,
    DAMAGE,
    HIDDEN,
    INDIRECT,
    held,
    patched,
    record_of,
    row_of,
    samples,
)
from kiln.tests.runtime.test_proof import EXTRA, FALSE, change, one
from kiln.tests.trees import C_SOURCE, Json, cpu_kernel, cuda_kernel, manifest

TREE = Path(__file__).parents[3] / "aot_artifacts"


def agrees(core: Core, target: str, data: bytes) -> Verdict:
    """Both readers' verdict on an artifact, which must be one."""
    expected = python_verdict(lambda: read_artifact(target, data))
    found = core.artifact(target, data)
    assert found.code == expected.code, (expected, found)
    return found


@pytest.mark.parametrize("target", CUDA_ARCHES)
@pytest.mark.parametrize("name", ["scaled_sum", "spilling", "doubled"])
def test_real_cubins_are_read(libkiln_core: Core, name: str, target: str) -> None:
    assert agrees(libkiln_core, target, compiled()[name, target].data) == ACCEPTED


@pytest.mark.parametrize(("tool", "arch", "abi"), ARCHES)
def test_cubins_of_both_layouts_are_read(libkiln_core: Core, tool: str, arch: str, abi: int) -> None:
    assert agrees(libkiln_core, arch, held(arch, tool=tool)) == ACCEPTED


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(libkiln_core: Core, name: str) -> None:
    good = compiled()["scaled_sum", "sm_90a"].data
    found = agrees(libkiln_core, "sm_90a", DAMAGE[name][0](good))
    assert found.code == "IntegrityError"
    assert found.message.endswith(
        "; the file is damaged or not what its name says: build it again or restore it"
    )


def sample(which: int) -> tuple[str, bytes]:
    read, data = samples()[which]
    return ("sm_80" if read is read_cubin else "cpu-x86_64"), data


@pytest.mark.parametrize("which", range(6))
def test_every_truncation_and_extension_is_refused(libkiln_core: Core, which: int) -> None:
    target, data = sample(which)
    assert agrees(libkiln_core, target, data) == ACCEPTED
    for size in range(len(data)):
        assert libkiln_core.artifact(target, data[:size]).code == "IntegrityError", size
    for tail in (b"\0", b"x", bytes(64), data):
        assert libkiln_core.artifact(target, data + tail).code == "IntegrityError"


def test_a_file_over_the_cap_is_refused_unread(libkiln_core: Core) -> None:
    assert "the limit is 67108864" in agrees(libkiln_core, "sm_80", bytes((64 << 20) + 1)).message


def test_a_shared_object_is_no_cubin_and_the_reverse(libkiln_core: Core) -> None:
    assert "machine 62" in agrees(libkiln_core, "sm_80", shared_object(C_SOURCE)).message
    assert "machine 190" in agrees(libkiln_core, "cpu-x86_64", compiled()["doubled", "sm_80"].data).message


def test_sections_that_hide_the_dynamic_segment_are_refused(libkiln_core: Core) -> None:
    data = shared_object(C_SOURCE)
    assert (
        "isn't the dynamic segment"
        in agrees(libkiln_core, "cpu-x86_64", patched(data, "<Q", row_of(data, ".dynamic") + 16, 64)).message
    )
    section = read_shared_object(data).elf.find(".dynamic")
    assert section is not None
    tags = [at for at in range(section.offset, section.offset + section.size, 16)]
    for at in tags:
        for value in (0, 1, 5, 6, 7, 8, 10, 12, 17, 23, 25, 0x7FFFFFFF, len(data)):
            agrees(libkiln_core, "cpu-x86_64", patched(data, "<Q", at, value))
            agrees(libkiln_core, "cpu-x86_64", patched(data, "<Q", at + 8, value))


# ---- proofs ----


def proofs(core: Core, entry: Json, target: str, data: bytes) -> list[str]:
    """The faults that both find, which must be the same sentences."""
    document = canonical_json(manifest(target, [entry]))
    expected = prove_launch(parse_kernel(entry), target, data)
    found, verdict = core.prove(document, data)
    assert found == expected
    assert (verdict.code, verdict.message) == (("IntegrityError", expected[0]) if expected else ACCEPTED)
    return found


@pytest.mark.parametrize("target", CUDA_ARCHES)
@pytest.mark.parametrize("name", ["scaled_sum", "spilling", "doubled"])
def test_true_entries_are_proved(libkiln_core: Core, name: str, target: str) -> None:
    made = compiled()[name, target]
    assert proofs(libkiln_core, cuda_kernel(made), target, made.data) == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(("path", "value", "words"), FALSE)
def test_false_entries_are_told(libkiln_core: Core, path: str, value: Any, words: str, target: str) -> None:
    made = compiled()["scaled_sum", target]
    found = proofs(libkiln_core, change(cuda_kernel(made), path, value), target, made.data)
    assert any(words in fault for fault in found)


def test_limits_are_told(libkiln_core: Core) -> None:
    made = compiled()["scaled_sum", "sm_90a"]
    assert proofs(libkiln_core, change(cuda_kernel(made), "block", [1024, 2, 1]), "sm_90a", made.data)
    assert proofs(libkiln_core, change(cuda_kernel(made), "block", [1024, 1, 1]), "sm_90a", made.data)
    entry, data = one()
    assert proofs(libkiln_core, {**entry, "shared_bytes": 232448 - 512}, "sm_90a", data) == []
    assert proofs(libkiln_core, {**entry, "shared_bytes": 232448 - 511}, "sm_90a", data)


@pytest.mark.parametrize(
    ("registers", "fits"), [(1, True), (64, True), (65, False), (255, False), (2**32 - 1, False)]
)
def test_registers_of_a_block_are_counted_in_whole_units(
    libkiln_core: Core, registers: int, fits: bool
) -> None:
    entry, data = one(threads=1024)
    entry["resources"]["registers"] = registers
    changed = patched(data, "<I", record_of(data, ".nv.info", 0x2F) + 4, registers)
    assert (proofs(libkiln_core, entry, "sm_90a", changed) == []) == fits


def test_clusters_and_second_kernels_are_told(libkiln_core: Core) -> None:
    entry, data = one(cluster=".reqnctapercluster 2, 1, 1")
    (fault,) = proofs(libkiln_core, entry, "sm_90a", data)
    assert "requires the cluster (2, 1, 1)" in fault
    assert proofs(libkiln_core, {**entry, "cluster": [2, 1, 1]}, "sm_90a", data) == []
    more = "\n".join(f".visible .entry k{i}() {{ ret; }}" for i in range(12))
    entry, data = one(more=more)
    (fault,) = proofs(libkiln_core, entry, "sm_90a", data)
    assert "holds ['k0', 'k1', 'k10', 'k11', 'k2', 'k3', 'k4', 'k5']" in fault


def test_unknown_architectures_are_told(libkiln_core: Core) -> None:
    entry = cuda_kernel(compiled()["doubled", "sm_80"])
    head = ".version 8.8\n.target sm_75\n.address_size 64\n"
    text = f"{head}.visible .entry {entry['entry']}() .reqntid 32, 1, 1 {{ ret; }}"
    found = proofs(libkiln_core, entry, "sm_75", assemble(text, "sm_75"))
    assert any("whose shared memory limit is not known here" in fault for fault in found)
    for target in ("sm_86", "sm_90", "sm_80a"):
        assert proofs(libkiln_core, entry, target, compiled()["doubled", "sm_80"].data)


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"version https://git-lfs.github.com/spec/v1\n", bytes(4096)]
)
def test_bytes_that_are_no_artifact_are_told(libkiln_core: Core, data: bytes) -> None:
    document = canonical_json(manifest("sm_90a", [cuda_kernel(compiled()["doubled", "sm_90a"])]))
    found, verdict = libkiln_core.prove(document, data)
    assert [verdict.message] == found
    assert verdict.code == "IntegrityError"


@pytest.mark.parametrize("target", ["cpu-x86_64", "cpu-aarch64"])
@pytest.mark.parametrize("name", ["doubled", "scaled_sum"])
def test_true_cpu_entries_are_proved(libkiln_core: Core, name: str, target: str) -> None:
    entry, data = cpu_kernel(name, target)
    assert proofs(libkiln_core, entry, target, data) == []


@pytest.mark.parametrize("extra", [*EXTRA, CONSTRUCTOR, INDIRECT, HIDDEN])
@pytest.mark.parametrize("target", ["cpu-x86_64", "cpu-aarch64"])
def test_cpu_files_are_told_alike(libkiln_core: Core, extra: str, target: str) -> None:
    entry, _ = cpu_kernel("doubled")
    if target == "cpu-aarch64":
        entry["isa"] = {"tier": "neon", "features": []}
    found = proofs(libkiln_core, entry, target, shared_object(C_SOURCE + extra))
    assert (found == []) == (target == "cpu-x86_64" and extra in ("", HIDDEN))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("entry", "tripled"),
        ("resources/code_bytes", 1),
        ("budget/code_bytes", 2),
        ("budget/a", 2),
        ("resources", {}),
    ],
    ids=str,
)
def test_cpu_entries_are_compared_with_their_file(libkiln_core: Core, path: str, value: Any) -> None:
    entry, data = cpu_kernel("doubled")
    assert proofs(libkiln_core, change(entry, path, value), "cpu-x86_64", data)


def test_libraries_and_executable_memory_are_told(libkiln_core: Core) -> None:
    entry, data = cpu_kernel("doubled")
    header = data.index(struct.pack("<II", 0x6474E551, 6))
    assert proofs(libkiln_core, entry, "cpu-x86_64", patched(data, "<I", header + 4, 7))
    system = Path("/lib/x86_64-linux-gnu/libm.so.6")
    if not system.exists():
        pytest.skip("no libm at the place where Debian has it")
    assert any(
        "opens other libraries: libc.so.6" in f
        for f in proofs(libkiln_core, entry, "cpu-x86_64", system.read_bytes())
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120a", "cpu-x86_64", "cpu-aarch64"])
def test_committed_artifacts_are_proved(libkiln_core: Core, target: str) -> None:
    document = (TREE / target / "MANIFEST.json").read_bytes()
    kernels = parse_manifest(document, target).kernels
    for i in random.Random(3).sample(range(len(kernels)), 12):
        data = (TREE / target / kernels[i].file).read_bytes()
        assert libkiln_core.prove(document, data, i) == ([], ACCEPTED)
        assert (
            libkiln_core.prove(document, data, i - 1)[1].code == "IntegrityError"
            or kernels[i].file == kernels[i - 1].file
            or kernels[i].entry == kernels[i - 1].entry  # a tier beside it
        )
