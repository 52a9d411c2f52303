"""A catalog of one's own: what `--catalog` names."""

from __future__ import annotations

from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import F32
from kiln.ir.spec import Op, Scalar, Tensor


def _op(name: str, family: str, is_recipe: bool = False) -> Op:
    x, y = Tensor("x", F32, ("M", "N")), Tensor("y", F32, ("M", "N"), role="out")
    operands, doc = (x, Scalar("s", F32, 2.0), y), f"The op {name}."
    if is_recipe:
        return Op(name, family, operands, doc=doc, steps=lambda _: (), is_recipe=True)
    return Op(name, family, operands, doc=doc, reference=lambda **_: ())


def catalog() -> Catalog:
    """Two ops and a recipe."""
    add, softcap = _op("add", "KERNEL-EW-NORM-ACT"), _op("softcap", "KERNEL-SAMPLING")
    return Catalog((add, softcap, _op("add_softcap", "MY-FUSIONS", is_recipe=True)))
