"""The CUDA worker: one job in, one cubin and its manifest entry out. No GPU and no driver is needed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kiln.backends.cuda import contract, hosted
from kiln.backends.cuda.epilogue import FUNCTION, epilogue_source, extra_params
from kiln.backends.cuda.hidden import ALIGNMENTS, NAME, Hidden
from kiln.backends.cuda.hosted import EPILOGUE, EXTRA
from kiln.backends.cuda.schedule import Schedule
from kiln.backends.cuda.triton_emitter import TritonKernel, emit
from kiln.compiler.backend import Built, Job
from kiln.compiler.catalog import load
from kiln.compiler.errors import BuildError
from kiln.compiler.lower import Request, lower
from kiln.compiler.signatures import signature_json
from kiln.compiler.target import TARGETS, Target
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Op, Ship
from kiln.runtime.cubin import read_cubin

KNOBS = (
    "TRITON_",
    "PTXAS_OPTIONS",
    "DISABLE_PTXAS_OPT",
    "NVPTX_ENABLE_DUMP",
    "USE_IR_LOC",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES",
)
"""Environment names that can change or replace Triton's output (knobs.py, compiler.py)."""

BUDGET = {"registers": 255, "spill_stores": 0, "spill_loads": 0, "stack": 0}
"""What a kernel may take unless its table row says otherwise."""


@dataclass(frozen=True)
class Source:
    """A kernel ready for Triton."""

    module: str
    function: str
    text: str
    """Generated source; empty for a kernel imported from its module."""
    params: tuple[dict[str, Any], ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    epilogue: str = ""
    """Generated source of a function that the imported kernel inlines."""
    extra: tuple[dict[str, Any], ...] = ()
    """The parameters of that function, which follow the kernel's own as one tuple."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """The manifest fields that do not depend on the compiled bytes."""
    contract: Mapping[str, Any] | None = None
    """The kernel's own numerics contract; None: the op's."""


@dataclass(frozen=True)
class Compiled:
    """What the assembler produced and said."""

    cubin: bytes
    asm: Mapping[str, Any]
    name: str
    shared: int
    warps: int
    hidden: Hidden
    launch: Mapping[str, bool]
    """Launch attributes that it was compiled for, as the manifest has them."""
    spill_stores: int
    spill_loads: int
    ptxas: str


@lru_cache(maxsize=1)
def private_environment() -> Path:
    """Once per process: no inherited knob, an empty cache of its own, line info off (paths would enter the
    bytes).
    """
    for name in list(os.environ):
        if name.startswith(KNOBS):
            del os.environ[name]
    folder = Path(tempfile.mkdtemp(prefix="kiln-triton-"))
    os.environ |= {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_ALWAYS_COMPILE": "1",
    }
    import triton

    triton.knobs.nvidia.dump_ptxas_log = True
    return folder


def load_source(text: str, name: str) -> ModuleType:
    """Generated source as a module, from a file: Triton reads a function's source through its file."""
    folder = private_environment()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"generated source of {name} cannot be loaded from {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assemble(source: Source, target: Target) -> Compiled:
    """Triton source to cubin; the assembler's log gives spills."""
    private_environment()
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from triton.experimental.gluon import GluonASTSource, GluonJITFunction

    module = (
        load_source(source.text, source.function) if source.text else importlib.import_module(source.module)
    )
    function = getattr(module, source.function)
    signature, constants, hints = _arguments(source, function.arg_names)
    language = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = triton_compile(
            language(function, signature, constants, hints),
            target=GPUTarget("cuda", target.capability, 32),
            options=dict(source.options),
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    if spills is None:
        raise BuildError(
            f"the assembler's log of {source.function} for {target.name} does not state its spills"
        )
    meta = made.metadata
    hidden = _hidden(meta, f"{source.function} for {target.name}")
    launch = {"pdl": meta.launch_pdl, "cooperative": meta.launch_cooperative_grid}
    return Compiled(
        made.asm["cubin"], made.asm, meta.name, meta.shared, meta.num_warps, hidden,
        {name: True for name, wanted in launch.items() if wanted},
        int(spills.group(1)), int(spills.group(2)), ptxas_version(get_ptxas(target.capability).path),
    )  # fmt: skip


def _arguments(source: Source, names: list[str]) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """Signature, constants and hints, as Triton takes them; an epilogue's parameters are one tuple."""
    constants = dict(source.constants)
    types: dict[str, Any] = {p["name"]: contract.triton_type(p) for p in source.params}
    places: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((names.index(p["name"]),), p) for p in source.params
    ]
    if source.epilogue:
        constants[EPILOGUE] = getattr(load_source(source.epilogue, FUNCTION), FUNCTION)
        types[EXTRA] = tuple(contract.triton_type(p) for p in source.extra)
        places += [((names.index(EXTRA), i), p) for i, p in enumerate(source.extra)]
    hinted = (at for at, p in places if p.get("align", 1) % 16 == 0 or p.get("divisible_by") == 16)
    hints = {at: [["tt.divisibility", 16]] for at in hinted}
    return types | dict.fromkeys(constants, "constexpr"), constants, hints


def _hidden(meta: Any, who: str) -> Hidden:
    """What the launch must add for Triton; raises BuildError for what it cannot."""
    if meta.profile_scratch_size:
        raise BuildError(f"{who} was compiled for Triton's profiler; compile it without instrumentation")
    if meta.global_scratch_align not in ALIGNMENTS:
        raise BuildError(
            f"{who} needs hidden scratch aligned to {meta.global_scratch_align} bytes, a launch gives at "
            f"most {ALIGNMENTS[-1]}"
        )
    return Hidden(meta.global_scratch_size, meta.global_scratch_align, meta.num_ctas)


@lru_cache(maxsize=4)
def ptxas_version(path: str) -> str:
    """`12.9.86`, in the assembler's own words."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    if found is None:
        raise BuildError(f"{path} --version does not state a version: {said!r}")
    return found.group(1)


def _ship(payload: Mapping[str, Any]) -> Ship:
    types = {k: DTYPES[v] for k, v in payload["types"].items()}
    return Ship(types, dict(payload["attrs"]), absent=tuple(payload["absent"]))


def generated(
    op: Op, ops: Mapping[str, Op], payload: Mapping[str, Any], target: Target
) -> tuple[TritonKernel, Source]:
    """The source of a generated kernel, and the launch contract that goes with it."""
    schedule, ship = Schedule(**payload["schedule"]), _ship(payload)
    fast = schedule.mode == "fast"
    features = target.features if schedule.hinted else target.features - {"e2m1_words"}
    lowered = lower(Request(op, ship.dtypes, ship.attrs, ship.absent, features, fast), ops)
    kernel = emit(lowered.program, op, dict(ship.attrs), f"kiln_{op.name}", fast)
    params = tuple(
        contract.parameter_json(op, p, ship.dtypes, schedule.hinted and contract.is_hinted(op, p, ship.attrs))
        for p in kernel.parameters
        if schedule.width is None or p.kind != "N"
    )
    constants = {"P": schedule.block, "R": schedule.rows, "LEVELS": schedule.block.bit_length() - 1}
    if schedule.width is not None:
        constants["N"] = schedule.width
    entry = {
        "tier": "fused" if op.is_recipe else "generated",
        "mode": schedule.mode,
        "grid": contract.grid_json(op, kernel, schedule),
        "when": contract.when_json(op, ship, kernel, schedule),
        "priority": contract.priority(schedule),
        "scratch": [],
    }
    options = {"num_warps": schedule.warps, "num_stages": 1, "enable_fp_fusion": fast}
    return kernel, Source("", kernel.name, kernel.source, params, constants, options, entry=entry)


def handwritten(op: Op, payload: Mapping[str, Any], catalogs: tuple[str, ...], capability: int) -> Source:
    """The source of a hand-scheduled kernel, from its table row."""
    from kiln.backends.cuda.backend import primitives

    wanted = (op.name, payload["variant"])
    rows = (p for p in primitives(load(catalogs)) if p.min_sm <= capability <= p.max_sm)
    row = next(p for p in rows if (p.op, p.variant) == wanted)
    module, _, function = row.kernel.partition(":")
    entry = {
        "tier": "fast" if op.body is not None else "primitive", "mode": row.mode, "grid": list(row.grid),
        "when": row.when, "priority": row.priority, "scratch": [s.json() for s in row.scratch],
        "budget": {**BUDGET, **row.budget},
    }  # fmt: skip
    contract_json = None if row.contract is None else asdict(row.contract)
    return Source(
        module,
        function,
        "",
        tuple(row.json_params()),
        dict(row.constants),
        row.compile_options(),
        entry=entry,
        contract=contract_json,
    )


def with_epilogue(
    op: Op, ops: Mapping[str, Op], payload: Mapping[str, Any], catalogs: tuple[str, ...], target: Target
) -> Source:
    """The source of a hand-scheduled kernel with a recipe's epilogue in it."""
    from kiln.backends.cuda.backend import hosted_pairs

    pairs = hosted_pairs(op, load(catalogs), target.capability)
    pair = next(p for p in pairs if p.variant == payload["variant"])
    made = epilogue_source(pair, ops, target.features)
    module, _, function = pair.row.kernel.partition(":")
    constants = {k: v for k, v in pair.row.constants.items() if k not in (EXTRA, EPILOGUE)}
    entry = hosted.entry(op, pair) | {"budget": {**BUDGET, **pair.row.budget}}
    return Source(
        module, function, "", hosted.params(op, pair), constants, pair.row.compile_options(), made.source,
        extra_params(pair, made), entry,
    )  # fmt: skip


def manifest_entry(job: Job, op: Op, source: Source, made: Compiled, file: str) -> dict[str, Any]:
    """The complete KERNEL entry; the parameter tail is counted in the cubin."""
    kernel = read_cubin(made.cubin).kernels[made.name]
    hidden = len(kernel.params) - len(source.params) - len(source.extra)
    if hidden != 2:
        raise BuildError(
            f"{op.name}.{job.variant} for {job.target}: the cubin has {hidden} parameters beyond the "
            "declared ones, Triton 3.9 adds 2"
        )
    if made.hidden.bytes and any(s["name"] == NAME for s in source.entry["scratch"]):
        raise BuildError(
            f"{op.name}.{job.variant}: its scratch {NAME} has the name of Triton's own; call it otherwise"
        )
    resources = {
        "registers": kernel.registers, "spill_stores": made.spill_stores, "spill_loads": made.spill_loads,
        "stack": kernel.stack,
        "static_shared": kernel.static_shared, "code_bytes": kernel.code_bytes,
    }  # fmt: skip
    contract_json = source.contract or signature_json(op)["contract"]
    if source.entry["mode"] == "fast":
        contract_json = {"kind": "envelope", "rel_l2": 2.0**-8, "max_eps": 2.0}
    return {
        "op": op.name, "variant": job.variant, "entry": made.name, "file": file, "bytes": len(made.cubin),
        "sha256": hashlib.sha256(made.cubin).hexdigest(), "inputs_digest": job.inputs_digest,
        "toolchain": {"ptxas": made.ptxas},
        "params": [*source.params, *source.extra, *made.hidden.parameters()],
        "block": [32 * made.warps, 1, 1],
        "cluster": [made.hidden.ctas, 1, 1], "shared_bytes": made.shared, "launch": dict(made.launch),
        "isa": None,
        "resources": resources,
        "budget": BUDGET,
        "numerics": {
            "contract": contract_json, "selftest": {"seed": 0, "shape": {op.rows: 3, op.width: 256}},
        },
        "specialization": {
            **job.payload.get("types", {}), **job.payload.get("attrs", {}), **source.constants,
        },
        **source.entry,
        "grid": made.hidden.grid(source.entry["grid"]),
        "scratch": [*source.entry["scratch"], *made.hidden.scratch(source.entry["grid"])],
    }  # fmt: skip


def run(job: Job) -> Built:
    """Compile one job; raises BuildError with the reason."""
    private_environment()  # before a catalog can import Triton: some knobs count at import
    target = TARGETS[job.target]
    catalogs = tuple(job.payload["catalogs"])
    loaded = load(catalogs)
    op = loaded.ops[job.op]
    if "schedule" in job.payload:
        _, source = generated(op, loaded.ops, job.payload, target)
    elif "types" in job.payload:
        source = with_epilogue(op, loaded.ops, job.payload, catalogs, target)
    else:
        source = handwritten(op, job.payload, catalogs, target.capability)
    made = assemble(source, target)
    file = f"{job.op}.{job.variant}.cubin"
    return Built((manifest_entry(job, op, source, made, file),), {file: made.cubin})
