"""A small catalog, and any of its ops taken through the pipeline up to a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlir import ir

from kiln.compiler.passes.expand import Expand
from kiln.compiler.passes.functions import Functions
from kiln.compiler.passes.rows import Rows
from kiln.compiler.passes.simplify import Simplify
from kiln.ir import trace
from kiln.ir.dialect import context
from kiln.ir.dtypes import BF16, F32, U8, DType
from kiln.ir.language import Value, call, exp, group, group_max, row_sum, spread, to_e4m3, ungroup
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Tensor

T = DTypeVar("T", (BF16, F32))
X, OUT = Tensor("x", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out")
ACC = Tensor("acc", T, ("M", "N"), "inout")
K = Scalar("k", F32)


def _grow(x: Value, k: Value, twice: bool) -> Value:
    y = exp(x.to(F32)) * k
    return y + y if twice else y


GROW = Op("grow", "F", (X, K, OUT), attrs=(Attr("twice", (False, True), False),), body=_grow)
SHARE = Op("share", "F", (X, OUT), body=lambda x: x.to(F32) / row_sum(x.to(F32)))
JOIN = Op(
    "join", "F", (X, Tensor("y", T, ("N",), optional=True), OUT),
    body=lambda x, y: x.to(F32) if y is None else x.to(F32) + y.to(F32),
)  # fmt: skip


def _levels(x: Value) -> tuple[Value, Value]:
    groups = group(x.to(F32), 4)
    top = group_max(groups)
    return ungroup(to_e4m3(groups / spread(top, 4))), top


LEVELS = Op(
    "levels",
    "F",
    (
        X,
        Tensor("out", U8, ("M", "N"), "out"),
        Tensor("tops", F32, ("M", ["floordiv", ["dim", "N"], 4]), "out", "strided"),
    ),
    body=_levels,
)


def _chain(x: Value, acc: Value, k: Value) -> tuple[Value, Value]:
    total = call(JOIN, x, None)[0]
    return call(SHARE, call(GROW, total, k, twice=True)[0])[0], total


CHAIN = Op("chain", "F", (X, ACC, K, OUT), body=_chain, is_recipe=True, returns=("out", "acc"))
OPS: dict[str, Op] = {op.name: op for op in (GROW, SHARE, JOIN, LEVELS, CHAIN)}
BF: dict[str, DType] = {"T": BF16}


@contextmanager
def lowered(
    op: Op,
    until: str,
    attrs: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    features: frozenset[str] = frozenset(),
    fast: bool = False,
) -> Iterator[ir.Module]:
    """The module after the pass `until`, its context current."""  # fmt: skip
    with context(OPS.values()):
        module = trace.graph(op, BF, attrs or {}, absent)
        for step in (Rows(op, BF, attrs or {}, absent), Expand(OPS), Functions(features, fast), Simplify()):
            if until == "graph":
                break
            module = step.run(module)
            if step.name == until:
                break
        yield module


def names(module: ir.Module) -> list[str]:
    """Every operation's name in order, those of regions after their owner."""
    found: list[str] = []

    def visit(operation: ir.Operation) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for child in block.operations:
                    found.append(child.operation.name)
                    visit(child.operation)

    visit(module.operation)
    return found


def body_file() -> str:
    """The file that locations point at."""
    return __file__
