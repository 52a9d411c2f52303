"""The CUDA backend: which kernels a catalog's declarations ask for. Plans without importing Triton or
MLIR.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import kiln.backends.cuda as here
from kiln.backends.cuda import tensor_map, tuned, variants
from kiln.backends.cuda.hosted import Hosted, hosted
from kiln.backends.cuda.primitive import CudaPrimitive, PrimitivePlan
from kiln.backends.cuda.schedule import Schedule, schedules
from kiln.backends.cuda.tuned import Candidates
from kiln.compiler import epilogue
from kiln.compiler.backend import Job
from kiln.compiler.catalog import OWN, Loaded, load
from kiln.compiler.digest import core_sources, inputs_digest, module_closure, package_version
from kiln.compiler.plan import plan_json, variant_name
from kiln.compiler.target import TARGETS
from kiln.ir.spec import Op, Ship

RUNNER = "kiln.backends.cuda.compile:run"
HOSTING = ("epilogue.py", "hosted.py", "primitive.py")
GENERATOR = ("triton_emitter.py", "prelude.py", "contract.py", "schedule.py", "compile.py", "hidden.py")


@lru_cache(maxsize=1)
def own_tables() -> tuple[CudaPrimitive | PrimitivePlan, ...]:
    """Every row of `variants/<family>.py`."""
    rows: list[CudaPrimitive | PrimitivePlan] = []
    for info in pkgutil.iter_modules(variants.__path__):
        module = importlib.import_module(f"{variants.__name__}.{info.name}")
        rows += [*getattr(module, "PRIMITIVES", ()), *getattr(module, "PLANS", ())]
    return (*rows, *(row for candidates in own_candidates().values() for row in candidates.rows))


@lru_cache(maxsize=1)
def own_candidates() -> Mapping[str, Candidates]:
    """By op: every `CANDIDATES`, `DEFAULTS` and `GENERAL` of `variants/<family>.py`."""
    found: dict[str, Candidates] = {}
    for info in pkgutil.iter_modules(variants.__path__):
        module = importlib.import_module(f"{variants.__name__}.{info.name}")
        defaults = tuple(getattr(module, "DEFAULTS", ()))
        general = frozenset(getattr(module, "GENERAL", defaults))
        rows: tuple[CudaPrimitive, ...] = getattr(module, "CANDIDATES", ())
        for op in dict.fromkeys(row.op for row in rows):
            own = tuple(row for row in rows if row.op == op)
            names = {row.variant for row in own}
            before = found.get(op, Candidates())
            ranked = (*before.defaults, *(n for n in defaults if n in names))
            found[op] = Candidates((*before.rows, *own), ranked, before.general | general & names)
    return found


def _rows(loaded: Loaded) -> tuple[Any, ...]:
    return (*(own_tables() if OWN in loaded.names else ()), *loaded.realizations)


def primitives(loaded: Loaded) -> tuple[CudaPrimitive, ...]:
    """Hand-scheduled kernels of the catalogs."""
    return tuple(r for r in _rows(loaded) if isinstance(r, CudaPrimitive))


def plans(loaded: Loaded) -> tuple[PrimitivePlan, ...]:
    """Ops of several launches."""
    return tuple(r for r in _rows(loaded) if isinstance(r, PrimitivePlan))


def hosted_pairs(op: Op, loaded: Loaded, capability: int) -> Iterator[Hosted]:
    """A recipe's epilogues in the kernels of its primitive op, for one target."""
    return hosted(op, (r for r in primitives(loaded) if r.min_sm <= capability <= r.max_sm))


class CudaBackend:
    """See kiln.compiler.backend.Backend."""

    name = "cuda"

    def __init__(self) -> None:
        self._planned: dict[tuple[tuple[str, ...], str], list[tuple[Ship, Schedule]]] = {}
        self._codes: dict[int, tuple[CudaPrimitive, str]] = {}
        self._candidates: dict[tuple[tuple[str, ...], str, str], list[Job]] = {}

    def targets(self) -> tuple[str, ...]:
        """Every CUDA target of the table."""
        return tuple(t.name for t in TARGETS.values() if t.kind == "cuda")

    def toolchain(self, target: str) -> dict[str, str]:
        """Packages that determine the bytes; the assembler's version is in each kernel's entry."""
        return {"triton": package_version("triton"), "mlir": package_version("xtc-mlir-python-bindings")}

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        """Generated kernels of every specialization, then the tables' rows."""
        loaded = load(tuple(catalogs))
        tools = self.toolchain(target)
        jobs = [
            job
            for op in ops.values()
            if op.name in loaded.expressible
            for job in self._generated(op, loaded, target, tools)
        ]
        for op in ops.values():
            if op.body is not None and op.name not in loaded.expressible:
                jobs += self._hosted(op, loaded, target, tools)
        capability = TARGETS[target].capability
        competing = {id(row) for own in own_candidates().values() for row in own.rows}
        for row in primitives(loaded):
            if row.op in ops and id(row) not in competing and row.min_sm <= capability <= row.max_sm:
                jobs.append(self._handwritten(row, loaded, target, tools))
        for name in sorted(own_candidates().keys() & ops.keys()):
            jobs += self._chosen(ops[name], catalogs, target)
        return jobs

    def _chosen(self, op: Op, catalogs: Sequence[str], target: str) -> Iterator[Job]:
        """The candidates that the target ships, each with its uses."""
        jobs = {job.variant: job for job in self.candidate_jobs(op.name, catalogs, target)}
        own = own_candidates()[op.name]
        own = replace(own, rows=tuple(row for row in own.rows if row.variant in jobs))
        known = tuned.database(op.name, target)
        old = {name for name, _ in tuned.stale(known, {v: j.inputs_digest for v, j in jobs.items()})}
        for kernel in tuned.shipped(own, op, known, old):
            uses = tuple(entry.selection() for entry in kernel.entries)
            yield replace(jobs[kernel.row.variant], selections=uses)

    def candidate_jobs(self, op: str, catalogs: Sequence[str], target: str) -> list[Job]:
        """Every candidate of an op that the target can have, each for whatever its needs admit."""
        key = (tuple(catalogs), op, target)
        if key not in self._candidates:
            loaded, tools = load(tuple(catalogs)), self.toolchain(target)
            known = own_candidates().get(op, Candidates()) if OWN in loaded.names else Candidates()
            rows = tuned.legal(known.rows, target)
            self._candidates[key] = [self._handwritten(row, loaded, target, tools) for row in rows]
        return self._candidates[key]

    def stale_samples(
        self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str
    ) -> list[tuple[str, str]]:
        """See Backend."""
        found = []
        for op in own_candidates().keys() & ops.keys():
            known = tuned.database(op, target)
            if known.runs:
                now = {j.variant: j.inputs_digest for j in self.candidate_jobs(op, catalogs, target)}
                found += [(f"{op}.{name}", why) for name, why in tuned.stale(known, now)]
        return sorted(found)

    def recipes(self, ops: Mapping[str, Op], catalogs: Sequence[str]) -> list[dict[str, Any]]:
        """PLAN entries: composites of recipes, and ops of several launches."""
        made = [plan_json(op, s) for op in ops.values() if op.is_recipe for s in op.ship]
        return made + [p.json() for p in plans(load(tuple(catalogs))) if p.op in ops]

    def _generated(self, op: Op, loaded: Loaded, target: str, tools: Mapping[str, str]) -> Iterator[Job]:
        sources = frozenset((*core_sources(), *loaded.sources(op.name), *_own_files(GENERATOR)))
        for ship, schedule in self._schedules(op, loaded):
            payload = {
                "catalogs": list(loaded.names), "types": {k: d.name for k, d in ship.dtypes.items()},
                "attrs": dict(ship.attrs),
                "absent": list(ship.absent), "schedule": vars(schedule),
            }  # fmt: skip
            variant = f"{variant_name(ship)}_{schedule.name}"
            contents = {**payload, "catalogs": (), "op": op.name, "target": target}
            digest = inputs_digest(sources, contents, tools)
            yield Job(target, op.name, variant, digest, RUNNER, payload)

    def _schedules(self, op: Op, loaded: Loaded) -> list[tuple[Ship, Schedule]]:
        """Every kernel of an op, the same for all targets: bodies are recorded once."""
        key = (loaded.names, op.name)
        if key not in self._planned:
            shipped = (s for s in op.ship if not s.rare)
            self._planned[key] = [(ship, s) for ship in shipped for s in schedules(op, ship)]
        return self._planned[key]

    def _hosted(self, op: Op, loaded: Loaded, target: str, tools: Mapping[str, str]) -> Iterator[Job]:
        for pair in hosted_pairs(op, loaded, TARGETS[target].capability):
            payload = {
                "catalogs": list(loaded.names), "types": {k: d.name for k, d in pair.ship.dtypes.items()},
                "attrs": dict(pair.ship.attrs), "absent": list(pair.ship.absent), "variant": pair.variant,
            }  # fmt: skip
            contents = {**payload, "catalogs": (), "op": op.name, "target": target, "row": repr(pair.row)}
            sources = (
                *core_sources(), *loaded.sources(op.name), *module_closure(pair.row.kernel.partition(":")[0]),
                *_own_files((*GENERATOR, *HOSTING)), Path(epilogue.__file__),
            )  # fmt: skip
            yield Job(target, op.name, pair.variant, inputs_digest(sources, contents, tools), RUNNER, payload)

    def _handwritten(self, row: CudaPrimitive, loaded: Loaded, target: str, tools: Mapping[str, str]) -> Job:
        payload = {"catalogs": list(loaded.names), "op": row.op, "variant": row.variant}
        contents = {**payload, "catalogs": (), "target": target, "row": self._code(row)}
        maps = tensor_map.takes_maps(row)
        sources = _handwritten_files(row.kernel.partition(":")[0])
        own = _own_files(tensor_map.FILES) if maps else ()
        digest = inputs_digest((*sources, *own), contents, tools)
        use = {"variant": row.variant, "when": row.when, "priority": row.priority, "tuned": None}
        runner = tensor_map.RUNNER if maps else RUNNER
        return Job(target, row.op, row.variant, digest, runner, payload, (use,))


    def _code(self, row: CudaPrimitive) -> str:
        """What of a row determines its kernel's bytes: where it is used does not, so that another measurement
        recompiles nothing. Written once for all targets."""
        known = self._codes.get(id(row))
        if known is None or known[0] is not row:
            known = self._codes[id(row)] = (row, repr(replace(row, when=True, priority=0)))
        return known[1]


@lru_cache(maxsize=256)
def _handwritten_files(module: str) -> frozenset[Path]:
    return frozenset({*module_closure(module), *_own_files(("compile.py", "hidden.py", "primitive.py"))})


@lru_cache(maxsize=16)
def _own_files(names: tuple[str, ...]) -> tuple[Path, ...]:
    folder = Path(next(iter(here.__path__)))
    return tuple(folder / n for n in names)
