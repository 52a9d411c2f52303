"""A catalog of one's own: what `--catalog` names."""

from __future__ import annotations

from kiln.ir.dtypes import F32
from kiln.ir.spec import Op, Scalar, Tensor


def _op(name: str, family: str, is_recipe: bool = False) -> Op:
    x, y = Tensor("x", F32, ("M", "N")), Tensor("y", F32, ("M", "N"), role="out")
    return Op(name, family, (x, Scalar("s", F32, 2.0), y), doc=f"The op {name}.", is_recipe=is_recipe)


def catalog() -> tuple[Op, ...]:
    """Two ops and a recipe."""
    return (
        _op("add", "KERNEL-EW-NORM-ACT"),
        _op("softcap", "KERNEL-SAMPLING"),
        _op("add_softcap", "MY-FUSIONS", is_recipe=True),
    )
