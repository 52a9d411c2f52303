"""The ops of `twins_right` under the same names, each a little wrong."""

from __future__ import annotations

from twins_right import make

from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import BF16, F32
from kiln.ir.language import Value, row_sum, select


def _swapped(a: Value, b: Value) -> Value:
    return b.to(F32) - a.to(F32)


def _at_least(x: Value, least: Value) -> Value:
    v = x.to(F32)
    return select(v >= least, v, 0.0)


def _rounded_early(x: Value) -> Value:
    v = x.to(F32)
    return v - row_sum(v).to(BF16).to(F32)


def catalog() -> Catalog:
    """Operands swapped, `>` made `>=`, a rounding too many."""
    made: Catalog = make(_swapped, _at_least, _rounded_early)
    return made
