"""A catalog of three ops and a recipe, for tests of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import F32
from kiln.ir.spec import Op, Scalar, Step, Tensor


def _reference(**operands: Any) -> None:
    """Never run: these ops are only declared."""


def _op(name: str, doc: str = "", is_recipe: bool = False) -> Op:
    operands = (
        Tensor("x", F32, ("M", "N")),
        Tensor("y", F32, ("M", "N"), role="out"),
        Scalar("s", F32, default=2.0),
    )
    if is_recipe:
        return Op(name, "KERNEL-EW-NORM-ACT", operands, doc=doc, steps=_steps, is_recipe=True)
    return Op(name, "KERNEL-EW-NORM-ACT", operands, doc=doc, reference=_reference)


def _steps(_: Mapping[str, Any]) -> tuple[Step, ...]:
    """Never asked: the fake backend plans the recipe."""
    return ()


def catalog() -> Catalog:
    """What a catalog package offers."""
    names = ("doubled", "scaled_sum", "spilling")
    return Catalog((*map(_op, names), _op("doubled_sum", is_recipe=True)))
