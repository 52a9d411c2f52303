"""The CUDA worker for kernels that take tensor maps made by the host: as `compile`, whose text is an input of
every other kernel's digest and stays as it is."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kiln.backends.cuda import compile as worker
from kiln.backends.cuda.compile import Compiled, Source
from kiln.backends.cuda.primitive import CudaPrimitive, Number, Pointer
from kiln.backends.cuda.tensor_map import TensorMap, takes_maps
from kiln.compiler.backend import Built, Job
from kiln.compiler.catalog import load
from kiln.compiler.errors import BuildError
from kiln.compiler.target import TARGETS, Target


def passed(params: Iterable[Pointer | Number]) -> tuple[dict[str, Any], ...]:
    """The manifest's params of what Triton passes for these."""
    return tuple(e for p in params for e in (p.passed() if isinstance(p, TensorMap) else [p.json()]))


def assemble(row: CudaPrimitive, source: Source, target: Target) -> Compiled:
    """Gluon source to cubin; BuildError where a map was compiled for something else than declared."""
    worker.private_environment()
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon import GluonASTSource

    who = f"{source.function} for {target.name}"
    function = getattr(importlib.import_module(source.module), source.function)
    signature, constants, hints = worker._arguments(source, function.arg_names)
    maps = [p for p in row.params if isinstance(p, TensorMap)]
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = triton_compile(
            GluonASTSource(function, signature | {p.name: p.triton for p in maps}, constants, hints),
            target=GPUTarget("cuda", target.capability, 32),
            options=dict(source.options),
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    if spills is None:
        raise BuildError(f"the assembler's log of {who} does not state its spills")
    meta = made.metadata
    declared = [p.compiled() for p in maps]
    if meta.tensordesc_meta != declared:
        raise BuildError(f"{who} takes the tensor maps {meta.tensordesc_meta}, declared are {declared}")
    launch = {"pdl": meta.launch_pdl, "cooperative": meta.launch_cooperative_grid}
    return Compiled(
        made.asm["cubin"], made.asm, meta.name, meta.shared, meta.num_warps, worker._hidden(meta, who),
        {name: True for name, wanted in launch.items() if wanted}, int(spills[1]), int(spills[2]),
        worker.ptxas_version(get_ptxas(target.capability).path),
    )  # fmt: skip


def run(job: Job) -> Built:
    """Compile one job; raises BuildError with the reason."""
    from kiln.backends.cuda.backend import primitives

    worker.private_environment()  # before a catalog can import Triton: some knobs count at import
    catalogs, target = tuple(job.payload["catalogs"]), TARGETS[job.target]
    loaded = load(catalogs)
    op = loaded.ops[job.op]
    row = next(r for r in primitives(loaded) if (r.op, r.variant) == (job.op, job.variant) and takes_maps(r))
    source = worker.handwritten(op, job.payload, catalogs, target.capability)
    made = assemble(row, source, target)
    file = f"{job.op}.{job.variant}.cubin"
    source = replace(source, params=passed(row.params))
    return Built((worker.manifest_entry(job, op, source, made, file),), {file: made.cubin})
