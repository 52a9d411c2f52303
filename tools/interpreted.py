"""Triton sources in Triton's interpreter, on small calls, against the declarations: generated ones on small
tiles, and the kernels of one's own catalogs as they are.

A generated kernel's source does not depend on its tile, its width or the number of its warps; so each
distinct source runs once, as a kernel of a small tile, through the same calls, red zones and comparisons as
real devices get, and stands for every artifact that was made from it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from kiln.backends.cuda.backend import CudaBackend
from kiln.backends.cuda.compile import Source, generated, handwritten, with_epilogue
from kiln.backends.cuda.epilogue import FUNCTION
from kiln.backends.cuda.hosted import EPILOGUE, EXTRA
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.schedule import Schedule
from kiln.compiler.backend import Job
from kiln.compiler.catalog import load
from kiln.compiler.digest import package_version
from kiln.compiler.plan import variant_name
from kiln.compiler.signatures import signature_json
from kiln.compiler.target import TARGETS
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Op, Ship
from kiln.runtime.cpu import CpuDevice
from kiln.runtime.device import Args, PlainLauncher
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import KilnError
from kiln.runtime.recipe import Recipe
from kiln.runtime.targets import cpu_count
from kiln.tools.campaign import Campaign, Result
from kiln.tools.cases import Style
from kiln.tools.console import emit, note, require
from kiln.tools.declared import catalogs
from kiln.tools.evidence import Interpreted, Proofs
from kiln.tools.interpreter import Address, enter, number
from kiln.tools.memory import HostRig
from kiln.tools.shelf import Shelf
from kiln.tools.trees import Tree, matches, read_tree, record_proofs, require_matches

TILE = 128
"""Columns of a tile: the least that holds a group of every size."""
ROWS, TALL = 4, 32
"""Rows of a tile; of a tile where rows come in blocks of 128, all of which are visited."""
STYLES = (
    Style(3, "dense", "mixed"),
    Style(130, "padded", "normal"),
    Style(1, "ragged", "special"),
    Style(5, "alias", "mixed"),
    Style(2, "dense", "normal", wide=True),
    Style(4, "columns", "special", least=True),
)
FEW = tuple(Style(min(s.rows, 17), s.layout, s.fill, s.wide, s.least) for s in STYLES)
"""Where no operand comes in blocks of 128 rows."""
MOST_ELEMENTS = 1 << 13
MARGIN = 1 << 16
"""Bytes around a call's memory: a store without its mask is told as a fault and does not end the process."""
PLACE = "sm_90a"
"""Interpreted kernels are put into a manifest of this name; nothing depends on which."""
FAST = {"kind": "envelope", "rel_l2": 2.0**-8, "max_eps": 2.0}


@dataclass
class Origin:
    """One distinct source, and the artifacts that come from it."""

    text: str
    entry: dict[str, Any]
    constants: Mapping[str, Any]
    module: str = ""
    """The module of the hand-written kernel; the text is its epilogue, or empty."""
    extra: tuple[str, ...] = ()
    """Names of the parameters that the kernel takes as one tuple."""
    artifacts: list[tuple[str, str, str]] = field(default_factory=list)
    """(target, variant, inputs digest)."""


@dataclass(frozen=True)
class Judged:
    """What came of one source, as plain data: it crosses processes."""

    op: str
    variant: str
    cases: int
    error: float
    faults: tuple[str, ...]
    artifacts: tuple[tuple[str, str, str], ...]
    contract: str


def origins(op: Op, names: tuple[str, ...], targets: Sequence[str]) -> list[Origin]:
    """Every distinct source of an op over the targets."""
    ops = load(names).ops
    found: dict[str, Origin] = {}
    lowered: dict[str, Origin] = {}
    for target in targets:
        for job in CudaBackend().plan({op.name: op}, names, target):
            if "schedule" not in job.payload:
                made = (_hosted if "types" in job.payload else _handwritten)(op, names, job)
                found.setdefault(f"{made.entry['variant']} {made.text}", made).artifacts.append(
                    (target, job.variant, job.inputs_digest)
                )
                continue
            features = sorted(TARGETS[target].features)
            specialization = {k: v for k, v in job.payload.items() if k != "schedule"}
            key = repr((features, specialization, job.payload["schedule"]["mode"]))
            if key not in lowered:
                made = _origin(op, ops, job)
                lowered[key] = found.setdefault(made.text, made)
            lowered[key].artifacts.append((target, job.variant, job.inputs_digest))
    return list(found.values())


def _origin(op: Op, ops: Mapping[str, Op], job: Job) -> Origin:
    payload = job.payload
    ship = Ship(
        {k: DTYPES[v] for k, v in payload["types"].items()}, payload["attrs"], absent=tuple(payload["absent"])
    )
    mode = payload["schedule"]["mode"]
    small = Schedule(TILE, TALL if _in_blocks(op) else ROWS, 1, hinted=False, mode=mode)
    _, source = generated(op, ops, {**payload, "schedule": vars(small)}, TARGETS[job.target])
    variant = f"{variant_name(ship)}{'_fast' if mode == 'fast' else ''}_{job.target}"
    return Origin(source.text, _entry(op, variant, source), source.constants)


def _hosted(op: Op, names: tuple[str, ...], job: Job) -> Origin:
    """A kernel of a primitive op with the recipe's epilogue in it."""
    source = with_epilogue(op, load(names).ops, job.payload, names, TARGETS[job.target])
    entry = _entry(op, job.variant, source)
    entry["params"] += source.extra
    extra = tuple(p["name"] for p in source.extra)
    return Origin(source.epilogue, entry, source.constants, source.module, extra)


def _handwritten(op: Op, names: tuple[str, ...], job: Job) -> Origin:
    """A kernel that a catalog brings."""
    source = handwritten(op, job.payload, names, TARGETS[job.target].capability)
    return Origin("", _entry(op, job.variant, source), source.constants, source.module)


def _in_blocks(op: Op) -> bool:
    return any(t.layout == "nvfp4_128x4" for t in op.tensors)


def _entry(op: Op, variant: str, source: Source) -> dict[str, Any]:
    """The source's KERNEL entry; what describes a cubin is made up."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()
    resources = dict.fromkeys(
        ("registers", "spill_stores", "spill_loads", "stack", "static_shared", "code_bytes"), 0
    )
    contract = FAST if source.entry["mode"] == "fast" else signature_json(op)["contract"]
    return {
        "op": op.name,
        "variant": variant,
        "entry": source.function,
        "file": f"{op.name}.{variant}.cubin",
        "bytes": 1,
        "sha256": digest,
        "inputs_digest": digest,
        "toolchain": {},
        "params": list(source.params),
        "block": [32, 1, 1],
        "cluster": [1, 1, 1],
        "shared_bytes": 0,
        "launch": {},
        "isa": None,
        "resources": resources,
        "budget": {},
        "numerics": {"contract": contract, "selftest": {"seed": 0, "shape": {}}},
        "specialization": {},
        **{k: v for k, v in source.entry.items() if k != "budget"},
    }


class InterpretedDevice(CpuDevice):
    """Host memory, and kernels that Triton's interpreter runs."""

    def __init__(self, sources: Mapping[str, Origin]) -> None:
        """`sources` by variant."""
        super().__init__(threads=1)
        self._sources = sources

    @property
    def label(self) -> str:
        """How messages call it."""
        return "Triton's interpreter"

    def load(self, kernel: Kernel, data: bytes) -> Any:
        """The kernel's function, interpreted."""
        origin = self._sources[kernel.variant]
        module = import_module(origin.module) if origin.module else _module(origin.text)
        return getattr(module, kernel.entry)

    def launcher(self, kernel: Kernel, function: Any, recipe: Recipe) -> Any:
        """A launcher of an interpreted function."""
        origin = self._sources[kernel.variant]
        constants = dict(origin.constants)
        if origin.module and origin.text:
            constants[EPILOGUE] = getattr(_module(origin.text), FUNCTION)
        return InterpretedLauncher(kernel, function, recipe, constants, origin.extra)


@dataclass(frozen=True)
class InterpretedLauncher(PlainLauncher):
    """A function with everything of one call's shape fixed."""

    kernel: Kernel
    function: Any
    recipe: Recipe
    constants: Mapping[str, Any]
    extra: tuple[str, ...] = ()

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Run the grid, program by program."""
        values = self.recipe.fill(pointers, args)
        given: dict[str, Any] = dict(self.constants)
        for p, value in zip(self.kernel.params, values, strict=True):
            if p.kind == "ptr":
                given[p.name] = Address(value, DTYPES[p.dtype].triton)
            else:
                given[p.name] = number(value) if p.dtype == "f32" else value
        if self.extra:
            given[EXTRA] = tuple(given.pop(name) for name in self.extra)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.function[self.recipe.grid](**given)


@lru_cache(maxsize=256)
def _module(text: str) -> Any:
    """Source as a module, from a file: Triton reads a function's source through its file."""
    with tempfile.TemporaryDirectory(prefix="kiln-interpreted-") as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("kiln_interpreted", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"the generated source cannot be loaded from {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for function in list(vars(module).values()):
            if hasattr(function, "rewrite"):
                # Now, while the file is there.
                function.rewrite()
    return module


def shelf(op: Op, sources: Sequence[Origin]) -> Shelf:
    """The interpreted kernels of one op."""
    device = InterpretedDevice({s.entry["variant"]: s for s in sources})
    return Shelf(op, PLACE, [s.entry for s in sources], device, lambda kernel: device.load(kernel, b""))


def campaign(op: Op, sources: Sequence[Origin], brief: bool = False) -> Campaign:
    """The calls of every source, half of them if `brief`; in a process whose Triton interprets."""
    styles = STYLES if _in_blocks(op) else FEW
    styles = styles[1::2] if brief else styles
    return Campaign(
        shelf(op, sources),
        PLACE,
        {op.name: op},
        HostRig(MARGIN),
        lambda _: True,
        lambda _: None,
        styles,
        MOST_ELEMENTS,
    )


def interpret_op(name: str, names: tuple[str, ...], targets: tuple[str, ...]) -> list[Judged]:
    """Run every source of one op; in a process whose Triton interprets."""
    op = load(names).ops[name]
    return _interpret(op, origins(op, names, targets), brief=False)


def interpret_first(name: str, names: tuple[str, ...], targets: tuple[str, ...]) -> list[Judged]:
    """As `interpret_op`, of the op's first specialization alone and in half as many calls."""
    op = load(names).ops[name]
    first = next(s for s in op.ship if not s.rare)
    return _interpret(op, origins(replace(op, ship=(first,)), names, targets), brief=True)


def _interpret(op: Op, sources: Sequence[Origin], brief: bool) -> list[Judged]:
    by_variant = {s.entry["variant"]: s for s in sources}
    return [_judged(r, by_variant[r.variant]) for r in campaign(op, sources, brief).run()] if sources else []


def _judged(r: Result, source: Origin) -> Judged:
    return Judged(
        r.op, r.variant, r.cases, r.error, tuple(r.faults), tuple(source.artifacts), r.contract.kind
    )


def pool(workers: int) -> Executor:
    """Processes whose Triton interprets: the setting counts when Triton is imported."""
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=enter)


def interpret(
    names: tuple[str, ...], targets: Sequence[str], globs: Sequence[str] | None
) -> Iterator[Judged]:
    """Every source of the selected ops that have generated ones, or a kernel that a catalog brings."""
    loaded = load(names)
    brought = {r.op for r in loaded.realizations if isinstance(r, CudaPrimitive) and not r.scratch}
    ops = [
        op
        for op in loaded.ops.values()
        if (op.body is not None or op.name in brought) and matches(op.name, globs)
    ]
    with pool(min(cpu_count(), max(len(ops), 1))) as executor:
        waiting = [executor.submit(interpret_op, op.name, names, tuple(targets)) for op in ops]
        for op, future in zip(ops, waiting, strict=True):
            try:
                yield from future.result()
            except KilnError:
                raise
            except Exception as error:  # what a kernel of one's own may do to the interpreter is anything
                yield _not_interpreted(op, error)


def _not_interpreted(op: Op, error: Exception) -> Judged:
    """An op whose run ended the interpreter."""
    why = f"Triton's interpreter cannot run it: {type(error).__name__}: {error}"
    if isinstance(error, BrokenExecutor):
        why = "the process that interpreted it, or an op beside it, died: does a kernel leave its operands? "
        why += "--op runs one"
    return Judged(op.name, "*", 0, float("inf"), (why,), (), op.contract.kind)


def run(args: argparse.Namespace) -> int:
    """`kiln test --interpret`."""
    names = catalogs(args)
    known = CudaBackend().targets()
    require(args.target or (), known, "CUDA target")
    require_matches(args.op, load(names).ops)
    began = time.perf_counter()
    judged = []
    for j in interpret(names, args.target or known, args.op):
        judged.append(j)
        for fault in j.faults[:1]:
            note(f"FAILED {j.op}.{j.variant}: {fault}")
    seconds = time.perf_counter() - began
    recorded = _record(read_tree(args.tree), judged) if args.evidence else None
    ok = bool(judged) and not any(j.faults for j in judged)
    emit(args, document(judged, ok, recorded, seconds), lambda: summary(judged, recorded, seconds))
    return 0 if ok else 1


def _record(tree: Tree, judged: Iterable[Judged]) -> int:
    """Write `interpreted` proofs of every artifact that was made from a source that ran; how many."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    made = {(a[0], a[2], j.op): j for j in judged if j.cases for a in j.artifacts}
    ops = {op for _, _, op in made}
    count = stale = 0
    for target, manifest in tree.manifests.items():
        proofs: dict[str, Proofs] = {}
        for k in manifest.kernels:
            j = made.get((target, k.inputs_digest, k.op))
            if j is not None:
                worst = j.error if j.error < float("inf") else 1e300
                seen = Interpreted(package_version("triton"), date, j.cases, worst, not j.faults)
                proofs[k.sha256] = Proofs(interpreted=seen)
            elif k.op in ops and k.isa is None and k.tier in ("generated", "fused"):
                stale += 1
        if proofs:
            record_proofs(tree.root, target, proofs)
            count += len(proofs)
    if stale:
        note(f"{stale} artifacts of {tree.root} come from other sources than these: build the tree again")
    return count


def document(judged: Sequence[Judged], ok: bool, recorded: int | None, seconds: float) -> dict[str, Any]:
    """What scripts get."""
    listed = [
        {
            "op": j.op,
            "variant": j.variant,
            "contract": j.contract,
            "cases": j.cases,
            "max_error": j.error if j.error < float("inf") else None,
            "passed": not j.faults,
            "faults": list(j.faults),
            "artifacts": [f"{target}/{j.op}.{variant}" for target, variant, _ in j.artifacts],
        }
        for j in judged
    ]
    return {"ok": ok, "seconds": round(seconds, 3), "recorded": recorded, "results": listed}


def summary(judged: Sequence[Judged], recorded: int | None, seconds: float) -> str:
    """A table of ops, then faults, then one sentence."""
    from kiln.tools.console import Cell, plural, table, width

    rows: list[list[Cell]] = []
    for op in dict.fromkeys(j.op for j in judged):
        of_op = [j for j in judged if j.op == op]
        failed = sum(bool(j.faults) for j in of_op)
        artifacts = sum(len(j.artifacts) for j in of_op)
        rows.append(
            [op, len(of_op), artifacts, sum(j.cases for j in of_op), max(j.error for j in of_op), failed]
        )
    faults = [f"{j.op}.{j.variant}: {fault}" for j in judged for fault in j.faults]
    lines = [
        table(["op", "sources", "artifacts", "cases", "worst", "failed"], rows, width()),
        "",
        *faults[:20],
    ]
    failed = sum(bool(j.faults) for j in judged)
    passed = "all passed" if judged else "failed, nothing ran: no selected op has a source to interpret"
    verdict = f"{plural(failed, 'source')} failed" if failed else passed
    written = f", {plural(recorded, 'proof')} recorded" if recorded is not None else ""
    lines.append(
        f"{verdict}: {plural(len(judged), 'source')} in Triton's interpreter{written} ({seconds:.1f} s)"
    )
    return "\n".join(lines)
