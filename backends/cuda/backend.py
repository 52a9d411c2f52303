"""The CUDA backend: which kernels a catalog's declarations ask for. Plans without importing Triton or
MLIR.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import kiln.backends.cuda as here
from kiln.backends.cuda import variants
from kiln.backends.cuda.primitive import CudaPrimitive, PrimitivePlan
from kiln.backends.cuda.schedule import Schedule, schedules
from kiln.compiler.backend import Job
from kiln.compiler.catalog import OWN, Loaded, load
from kiln.compiler.digest import core_sources, inputs_digest, module_closure, package_version
from kiln.compiler.plan import plan_json, variant_name
from kiln.compiler.target import TARGETS
from kiln.ir.spec import Op, Ship

RUNNER = "kiln.backends.cuda.compile:run"
GENERATOR = ("triton_emitter.py", "prelude.py", "contract.py", "schedule.py", "compile.py", "hidden.py")


@lru_cache(maxsize=1)
def own_tables() -> tuple[CudaPrimitive | PrimitivePlan, ...]:
    """Every row of `variants/<family>.py`."""
    rows: list[CudaPrimitive | PrimitivePlan] = []
    for info in pkgutil.iter_modules(variants.__path__):
        module = importlib.import_module(f"{variants.__name__}.{info.name}")
        rows += [*getattr(module, "PRIMITIVES", ()), *getattr(module, "PLANS", ())]
    return tuple(rows)


def _rows(loaded: Loaded) -> tuple[Any, ...]:
    return (*(own_tables() if OWN in loaded.names else ()), *loaded.realizations)


def primitives(loaded: Loaded) -> tuple[CudaPrimitive, ...]:
    """Hand-scheduled kernels of the catalogs."""
    return tuple(r for r in _rows(loaded) if isinstance(r, CudaPrimitive))


def plans(loaded: Loaded) -> tuple[PrimitivePlan, ...]:
    """Ops of several launches."""
    return tuple(r for r in _rows(loaded) if isinstance(r, PrimitivePlan))


class CudaBackend:
    """See kiln.compiler.backend.Backend."""

    name = "cuda"

    def __init__(self) -> None:
        self._planned: dict[tuple[tuple[str, ...], str], list[tuple[Ship, Schedule]]] = {}

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
            if op.body is not None
            for job in self._generated(op, loaded, target, tools)
        ]
        for row in primitives(loaded):
            if row.op in ops and row.min_sm <= TARGETS[target].capability <= row.max_sm:
                jobs.append(self._handwritten(row, loaded, target, tools))
        return jobs

    def recipes(self, ops: Mapping[str, Op], catalogs: Sequence[str]) -> list[dict[str, Any]]:
        """PLAN entries: composites of recipes, and ops of several launches."""
        made = [plan_json(op, s) for op in ops.values() if op.is_recipe for s in op.ship]
        return made + [p.json() for p in plans(load(tuple(catalogs))) if p.op in ops]

    def _generated(self, op: Op, loaded: Loaded, target: str, tools: Mapping[str, str]) -> Iterator[Job]:
        sources = (*core_sources(), *loaded.sources(op.name), *_own_files(GENERATOR))
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

    def _handwritten(self, row: CudaPrimitive, loaded: Loaded, target: str, tools: Mapping[str, str]) -> Job:
        payload = {"catalogs": list(loaded.names), "op": row.op, "variant": row.variant}
        contents = {**payload, "catalogs": (), "target": target, "row": repr(row)}
        module = row.kernel.partition(":")[0]
        sources = (*module_closure(module), *_own_files(("compile.py", "hidden.py", "primitive.py")))
        return Job(target, row.op, row.variant, inputs_digest(sources, contents, tools), RUNNER, payload)


@lru_cache(maxsize=16)
def _own_files(names: tuple[str, ...]) -> tuple[Path, ...]:
    folder = Path(next(iter(here.__path__)))
    return tuple(folder / n for n in names)
