"""Ops whose twins in `twins_wrong` compute something else."""

from __future__ import annotations

from collections.abc import Callable

from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import BF16, F32
from kiln.ir.language import Value, row_sum, select
from kiln.ir.spec import DTypeVar, Op, Scalar, Ship, Tensor

T = DTypeVar("T", (F32, BF16))
ROW = ("M", "N")


def _difference(a: Value, b: Value) -> Value:
    return a.to(F32) - b.to(F32)


def _above(x: Value, least: Value) -> Value:
    v = x.to(F32)
    return select(v > least, v, 0.0)


def _centred(x: Value) -> Value:
    v = x.to(F32)
    return v - row_sum(v)


Body = Callable[..., Value]


def make(difference: Body, above: Body, centred: Body) -> Catalog:
    """A catalog of three ops with these bodies."""
    x, out = Tensor("x", T, ROW), Tensor("out", T, ROW, "out")
    ship = (Ship({"T": F32}), Ship({"T": BF16}))
    operands = (Tensor("a", T, ROW), Tensor("b", T, ROW), out)
    return Catalog(
        (
            Op("difference", "TWINS", operands, body=difference, ship=ship[:1], doc="a - b"),
            Op("above", "TWINS", (x, Scalar("least", F32, 0.0), out), body=above, ship=ship, doc="x > least"),
            Op("centred", "TWINS", (x, out), body=centred, ship=ship, doc="x - sum"),
        )
    )


def catalog() -> Catalog:
    """The ops as they should be."""
    return make(_difference, _above, _centred)
