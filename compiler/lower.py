"""An op, a choice of types and attributes, and a target's features in; its lowered row program out, every
stage kept for inspection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mlir import ir

from kiln.compiler.legality import check_stage
from kiln.compiler.passes.expand import Expand
from kiln.compiler.passes.functions import Functions
from kiln.compiler.passes.rows import Rows
from kiln.compiler.passes.simplify import Simplify
from kiln.compiler.rowprogram import RowProgram, read
from kiln.ir import trace
from kiln.ir.dialect import context_of, dialect_text, verify
from kiln.ir.dtypes import DType
from kiln.ir.spec import Op


@dataclass(frozen=True)
class Request:
    """What is to be lowered."""

    op: Op
    types: Mapping[str, DType]
    attrs: Mapping[str, bool | int | str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    fast: bool = False


@dataclass(frozen=True)
class Lowered:
    """The row program, and the IR text after each stage."""

    program: RowProgram
    stages: dict[str, str]


@lru_cache(maxsize=4)
def _context(dialect: str) -> ir.Context:
    return context_of(dialect)


def lower(request: Request, ops: Mapping[str, Op]) -> Lowered:
    """Run the pipeline. IR legality is checked after every pass; the first violation is an error at the
    body's file and line.
    """
    with _context(dialect_text(ops.values())):
        module = trace.graph(request.op, request.types, request.attrs, request.absent)
        stages = {"graph": _text(module)}
        check_stage(module, "graph")
        passes = (
            Rows(request.op, request.types, request.attrs, request.absent),
            Expand(ops),
            Functions(request.features, request.fast),
            Simplify(),
        )
        for step in passes:
            module = step.run(module)
            verify(module)
            check_stage(module, step.name)
            stages[step.name] = _text(module)
        return Lowered(read(module), stages)


def _text(module: ir.Module) -> str:
    return str(module)
