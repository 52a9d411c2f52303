"""Two engines that every literal is checked on: the oracle, and the compiled kernels of this CPU through
the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.compiler.catalog import load_catalogs
from kiln.compiler.pipeline import build
from kiln.compiler.target import TARGETS
from kiln.ir.dtypes import DType
from kiln.ir.interpret import run
from kiln.ir.spec import Op
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_features, cpu_target, missing_features
from kiln.tests.support.numbers import Array

CATALOG = "kiln.recipes"
TARGET = cpu_target()
OPS = load_catalogs((CATALOG,))
ROW_OPS = {name: op for name, op in OPS.items() if op.body is not None}


class Engine(Protocol):
    """Runs an op on NumPy arrays and numbers by name; results in return order, None for what is absent."""

    name: str

    def __call__(
        self, op: str, arrays: Mapping[str, Any], *, dtypes: Mapping[str, DType] | None = None, **attrs: Any
    ) -> tuple[Array | None, ...]: ...


class Oracle:
    """The op's body run in NumPy."""

    name = "oracle"

    def __call__(
        self, op: str, arrays: Mapping[str, Any], *, dtypes: Mapping[str, DType] | None = None, **attrs: Any
    ) -> tuple[Array | None, ...]:
        """See Engine."""
        return run(OPS[op], arrays, attrs=attrs, dtypes=dtypes)


class Compiled:
    """The runtime on a tree built for this CPU; `tier` picks a way to run."""

    def __init__(self, library: Library, tier: str | None = None) -> None:
        self.loaded, self.tier = library, tier
        self.name = tier or "cpu"

    def __call__(
        self, op: str, arrays: Mapping[str, Any], *, dtypes: Mapping[str, DType] | None = None, **attrs: Any
    ) -> tuple[Array | None, ...]:
        """See Engine. Free output types are given as arrays to write."""
        declared = OPS[op]
        held = {n: v.copy() if hasattr(v, "copy") else v for n, v in arrays.items()}
        wanted = {} if self.tier is None else {"tier": self.tier}
        out = outputs(declared, held, dtypes or {}) if dtypes else None
        got = self.loaded.op(op)(**held, **attrs, **wanted, **({} if out is None else {"out": out}))
        results = got if isinstance(got, tuple) else (got,)
        return tuple(None if r is None else np.asarray(r) for r in results)


def outputs(op: Op, arrays: Mapping[str, Any], dtypes: Mapping[str, DType]) -> Any:
    """Arrays, filled with ones, for outputs whose type no input gives."""
    first = next(arrays[t.name] for t in op.inputs if t.name in arrays)
    made = [
        np.ones(first.shape, dtypes[t.dtype.name].numpy) for t in op.outputs if not isinstance(t.dtype, DType)
    ]
    return tuple(made) if len(made) > 1 else made[0]


def best_tier() -> str:
    """The highest ISA tier that this machine runs."""
    features = cpu_features()
    return [t.name for t in TARGETS[TARGET].tiers if not missing_features(TARGET, t.features, features)][-1]


def one_tier(path: list[str], name: str) -> None:
    """Compile for one ISA tier alone: a third of the time. Called in workers too."""
    sys.path[:] = path
    target = TARGETS[TARGET]
    TARGETS[TARGET] = replace(target, tiers=tuple(t for t in target.tiers if t.name == name))


def build_one_tier(out: Path, ops: Iterable[str]) -> None:
    """The tree of some ops, compiled for the best ISA tier of this machine."""
    whole = TARGETS[TARGET]
    arguments = (list(sys.path), best_tier())
    workers = ProcessPoolExecutor(
        2, mp_context=get_context("spawn"), initializer=one_tier, initargs=arguments
    )
    try:
        one_tier(*arguments)
        build([CATALOG], [TARGET], out, backends=[CpuBackend()], ops=list(ops), executor=workers)
    finally:
        TARGETS[TARGET] = whole
        workers.shutdown()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Every expressible op and recipe of the catalog, compiled for the best ISA tier of this machine."""
    out: Path = tmp_path_factory.mktemp("recipes") / "tree"
    build_one_tier(out, ROW_OPS)
    with load(out, "cpu") as made:
        yield made


@pytest.fixture(params=["oracle", "cpu"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each way to run in turn."""
    return Oracle() if request.param == "oracle" else Compiled(request.getfixturevalue("library"))
