"""The offline launch proof: what a manifest promises of an artifact, against what the artifact says of
itself.

No device, driver or compiler is needed. It runs when a tree is built, when it is verified, and when a kernel
is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kiln.runtime import tensor_map
from kiln.runtime.cubin import Cubin, CubinKernel, read_cubin
from kiln.runtime.elf import ElfError
from kiln.runtime.shared_object import SharedObject, read_shared_object

if TYPE_CHECKING:
    from kiln.runtime.manifest import Kernel, Param

SHARED_LIMITS = {
    80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448,
    100: 232448, 103: 232448, 110: 232448, 120: 101376, 121: 101376,
}  # fmt: skip
"""Most shared memory that a block may ask for, static and dynamic together, by compute capability (bytes)."""

MAX_THREADS = 1024
REGISTER_FILE = 65536
REGISTER_UNIT = 256
"""Registers are handed out to a warp in this many at a time, from sm_80 to sm_121."""

_PARAM_BYTES = {"i32": 4, "f32": 4, "i64": 8, "f64": 8}
_CUDA_TARGET = re.compile(r"sm_(\d{2,3}[af]?)", re.ASCII)


def prove_launch(kernel: Kernel, target: str, data: bytes) -> list[str]:
    """Whether `data` is the artifact that `kernel` describes, and can be launched as it says on `target`.

    Returns the faults, a sentence each; none means proved. Never raises for bad bytes.
    """
    try:
        artifact = read_artifact(target, data)
    except ElfError as e:
        return [str(e)]
    return prove_kernel(kernel, target, artifact)


def read_artifact(target: str, data: bytes) -> Cubin | SharedObject:
    """The parsed artifact of a target: a cubin for `sm_…`, else a shared object.

    Raises kiln.runtime.elf.ElfError for bytes that are neither.
    """
    return read_cubin(data) if target.startswith("sm_") else read_shared_object(data)


def measured_resources(artifact: Cubin | SharedObject, entry: str) -> dict[str, int]:
    """The `resources` of a manifest that the artifact itself determines.

    Raises KeyError if it has no such entry. Spilled bytes are not among them: only the assembler's log has
    those.
    """
    if isinstance(artifact, SharedObject):
        return {"code_bytes": artifact.exports[entry]}
    found = artifact.kernels[entry]
    return {
        "registers": found.registers,
        "stack": found.stack,
        "static_shared": found.static_shared,
        "code_bytes": found.code_bytes,
    }


def prove_kernel(kernel: Kernel, target: str, artifact: Cubin | SharedObject) -> list[str]:
    """As `prove_launch`, for an artifact that was parsed before (CPU kernels share one file)."""
    prove: Iterator[str] = (
        _prove_shared_object(kernel, target, artifact)
        if isinstance(artifact, SharedObject)
        else _prove_cubin(kernel, target, artifact)
    )
    subject = f"Kernel {kernel.entry!r} ({kernel.op}.{kernel.variant})"
    return [f"{subject} {fault}; build {target} again." for fault in (*prove, *_prove_budget(kernel))]


def _prove_budget(kernel: Kernel) -> Iterator[str]:
    resources, budget = dict(kernel.resources), dict(kernel.budget)
    for name, most in sorted(budget.items()):
        if name not in resources:
            yield f"has a budget for {name}, but does not say how many it takes"
        elif resources[name] > most:
            yield f"takes {resources[name]} {name}, its budget is {most}; use fewer or raise it"


def _prove_measured(kernel: Kernel, artifact: Cubin | SharedObject) -> Iterator[str]:
    resources = dict(kernel.resources)
    for name, found in measured_resources(artifact, kernel.entry).items():
        told = resources.get(name)
        if told != found:
            yield f"has {found} {name} in its file, the manifest says {told}"


def _prove_cubin(kernel: Kernel, target: str, cubin: Cubin) -> Iterator[str]:
    if _CUDA_TARGET.fullmatch(target) is None or cubin.arch != target:
        yield f"is built for {cubin.arch}, its target is {target}"
    if sorted(cubin.kernels) != [kernel.entry]:
        yield f"must be the one kernel of its file, which holds {sorted(cubin.kernels)[:8]}"
    found = cubin.kernels.get(kernel.entry)
    if found is None:
        return
    yield from _prove_params(kernel, found)
    yield from _prove_shape(kernel, found)
    yield from _prove_measured(kernel, cubin)
    yield from _prove_limits(kernel, cubin, found)


def _prove_params(kernel: Kernel, found: CubinKernel) -> Iterator[str]:
    passed = [p for p in kernel.params if p.kind != "dropped"]
    if len(passed) != len(found.params):
        yield f"takes {len(found.params)} parameters in its file, the manifest passes {len(passed)}"
        return
    end = 0
    for told, there in zip(passed, found.params, strict=True):
        size, unit = _place(told)
        offset = -(-(found.param_base + end) // unit) * unit - found.param_base if unit else end
        if (there.offset, there.size) != (offset, size):
            yield (
                f"takes {there.size} bytes at offset {there.offset} as parameter {there.ordinal} in its "
                "file, "
                f"the manifest passes {told.name!r} as {size} bytes at offset {offset}"
            )
        end = offset + size


def _place(p: Param) -> tuple[int, int]:
    """Bytes of a parameter, and what its place in the constant bank is a multiple of."""
    if p.kind == "tensor_map":
        return tensor_map.BYTES, tensor_map.ALIGN
    size = _PARAM_BYTES.get(p.dtype, 0) if p.kind == "scalar" else 8
    return size, size


def _prove_shape(kernel: Kernel, found: CubinKernel) -> Iterator[str]:
    block, cluster = tuple(kernel.block), tuple(kernel.cluster)
    if found.reqntid != block:
        yield f"requires the block {found.reqntid} in its file, the manifest launches {block}"
    if found.cluster is not None and found.cluster != cluster:
        yield f"requires the cluster {found.cluster} in its file, the manifest launches {cluster}"


def _prove_limits(kernel: Kernel, cubin: Cubin, found: CubinKernel) -> Iterator[str]:
    threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
    per_warp = -(-found.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    if not 0 < threads <= MAX_THREADS:
        yield f"launches {threads} threads a block, the limit is {MAX_THREADS}"
    elif -(-threads // 32) * per_warp > REGISTER_FILE:
        yield (
            f"needs {-(-threads // 32) * per_warp} registers a block "
            f"({threads} threads of {found.registers}), the limit is {REGISTER_FILE}"
        )
    limit = SHARED_LIMITS.get(cubin.sm)
    shared = kernel.shared_bytes + found.static_shared
    if limit is None:
        yield f"is for sm_{cubin.sm}, whose shared memory limit is not known here"
    elif shared > limit:
        yield f"needs {shared} bytes of shared memory a block, the limit of sm_{cubin.sm} is {limit}"
    resources = dict(kernel.resources)
    for name in ("spill_stores", "spill_loads"):
        if name not in resources:
            yield f"does not say how many {name} its assembler reported"
    if not found.stack and (resources.get("spill_stores") or resources.get("spill_loads")):
        yield "is said to spill registers, but its file has no stack to spill to"


def _prove_shared_object(kernel: Kernel, target: str, shared: SharedObject) -> Iterator[str]:
    if target != f"cpu-{shared.machine}":
        yield f"is built for {shared.machine}, its target is {target}"
    if kernel.entry not in shared.exports:
        yield f"is not among the functions of its file, which are {sorted(shared.exports)[:8]}"
    else:
        yield from _prove_measured(kernel, shared)
    if shared.needed:
        yield f"lies in a file that opens other libraries: {', '.join(shared.needed[:8])}"
    if shared.undefined:
        yield f"lies in a file that takes symbols from its process: {', '.join(shared.undefined[:8])}"
    if shared.has_init:
        yield "lies in a file that runs code when it is opened or closed"
    if shared.exec_stack:
        yield "lies in a file that asks for memory both writable and executable"
