"""The CPU backend: which C entries a catalog's declarations ask for. Plans without importing MLIR or a
compiler."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import kiln.backends.cpu as here
from kiln.backends.cpu import variants
from kiln.backends.cpu.prelude import HEADERS, ORDER
from kiln.backends.cpu.primitive import CpuPrimitive
from kiln.compiler.backend import Job
from kiln.compiler.catalog import OWN, Loaded, load
from kiln.compiler.digest import core_sources, inputs_digest, package_version
from kiln.compiler.plan import plan_json
from kiln.compiler.target import TARGETS
from kiln.ir.record import expressible
from kiln.ir.spec import Op

RUNNER = "kiln.backends.cpu.compile:run"
VARIANT = "c"
"""One job makes every variant of an op: `c.<specialization>.<ISA tier>`."""
ALWAYS = ("compile.py", "prelude.py", "primitive.py", "toolchain.py")
GENERATOR = ("abi.py", "c_body.py", "c_emitter.py", "c_expr.py", "c_loops.py", "schedule.py")


@lru_cache(maxsize=1)
def own_tables() -> tuple[CpuPrimitive, ...]:
    """Every row of `variants/<family>.py`."""
    rows: list[CpuPrimitive] = []
    for info in pkgutil.iter_modules(variants.__path__):
        rows += getattr(importlib.import_module(f"{variants.__name__}.{info.name}"), "PRIMITIVES", ())
    return tuple(rows)


def primitives(loaded: Loaded) -> tuple[CpuPrimitive, ...]:
    """Hand-written realizations of the catalogs."""
    own = own_tables() if OWN in loaded.names else ()
    return (*own, *(r for r in loaded.realizations if isinstance(r, CpuPrimitive)))


def specializations(op: Op) -> list[dict[str, Any]]:
    """What is shipped of an expressible op, as plain data: one entry serves every row width."""
    found: dict[str, dict[str, Any]] = {}
    for ship in op.ship if expressible(op) else ():
        attrs = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
        types = {k: d.name for k, d in ship.dtypes.items()}
        entry = {"types": types, "attrs": dict(ship.attrs), "absent": list(ship.absent)}
        found.setdefault(repr((types, attrs, sorted(ship.absent))), entry)
    return list(found.values())


class CpuBackend:
    """See kiln.compiler.backend.Backend."""

    name = "cpu"

    def targets(self) -> tuple[str, ...]:
        """Every CPU target of the table."""
        return tuple(t.name for t in TARGETS.values() if t.kind == "cpu")

    def toolchain(self, target: str) -> dict[str, str]:
        """Packages that determine the bytes."""
        return {"ziglang": package_version("ziglang"), "mlir": package_version("xtc-mlir-python-bindings")}

    def stale_samples(
        self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str
    ) -> list[tuple[str, str]]:
        """None: nothing here is chosen by measurement."""
        return []

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        """One job an op, for all its specializations and ISA tiers."""
        loaded = load(tuple(catalogs))
        rows: dict[str, list[CpuPrimitive]] = {}
        for row in primitives(loaded):
            rows.setdefault(row.op, []).append(row)
        jobs = (self._job(op, rows.get(op.name, []), loaded, target) for op in ops.values())
        return [job for job in jobs if job is not None]

    def recipes(self, ops: Mapping[str, Op], catalogs: Sequence[str]) -> list[dict[str, Any]]:
        """PLAN entries: the composites of recipes."""
        return [plan_json(op, ship) for op in ops.values() if op.is_recipe for ship in op.ship]

    def _job(self, op: Op, rows: Sequence[CpuPrimitive], loaded: Loaded, target: str) -> Job | None:
        ships = specializations(op) if op.name in loaded.expressible else []
        if not ships and not rows:
            return None
        payload = {"catalogs": list(loaded.names), "ships": ships}
        contents = {
            **payload, "catalogs": (), "op": op.name, "target": target, "rows": [repr(r) for r in rows],
            "tiers": repr(TARGETS[target]),
        }  # fmt: skip
        sources = [
            *loaded.sources(op.name),
            *_own(*ALWAYS),
            *(path for r in rows for path in _templates(r.template)),
            *(HEADERS / name for name in ORDER),
        ]
        if ships:
            sources += [*core_sources(), *_own(*GENERATOR)]
        return Job(
            target,
            op.name,
            VARIANT,
            inputs_digest(sources, contents, self.toolchain(target)),
            RUNNER,
            payload,
        )


def _folder() -> Path:
    return Path(next(iter(here.__path__)))


@lru_cache(maxsize=64)
def _templates(name: str) -> tuple[Path, ...]:
    """A template's file, and those that it includes."""
    (path,) = _own(f"kernels/{name}")
    included = re.findall(r'{% include "([^"]+)" %}', path.read_text("utf-8"))
    return (path, *(file for other in included for file in _templates(other)))


def _own(*names: str) -> list[Path]:
    return [_folder() / n for n in names]
