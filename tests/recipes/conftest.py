"""Two engines that every literal is checked on: the oracle, and the compiled kernels of this CPU through
the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.compiler.catalog import load_catalogs
from kiln.ir.dtypes import DType
from kiln.ir.interpret import run
from kiln.ir.spec import Op
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.support.committed import build_from
from kiln.tests.support.numbers import Array

CATALOG = "kiln.recipes"
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


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Every expressible op and recipe of the catalog, for this machine."""
    out: Path = tmp_path_factory.mktemp("recipes") / "tree"
    build_from(out, [cpu_target()], ROW_OPS, [CpuBackend()])
    with load(out, "cpu") as made:
        yield made


@pytest.fixture(params=["oracle", "cpu"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each way to run in turn."""
    return Oracle() if request.param == "oracle" else Compiled(request.getfixturevalue("library"))
