"""Declarations as a manifest's SIG entries."""

from __future__ import annotations

from typing import Any

from kiln.ir.spec import DTypeVar, Op, Scalar, Tensor


def _tensor_json(t: Tensor) -> dict[str, Any]:
    variable = isinstance(t.dtype, DTypeVar)
    dtype = {"var": t.dtype.name, "choices": [c.name for c in t.dtype.choices]} if variable else t.dtype.name  # type: ignore[union-attr]
    return {
        "name": t.name, "kind": "tensor", "role": t.role, "dtype": dtype, "shape": list(t.dims),
        "layout": t.layout,
        "optional": t.optional, "doc": t.doc,
    }  # fmt: skip


def _scalar_json(s: Scalar) -> dict[str, Any]:
    return {
        "name": s.name, "kind": "scalar", "dtype": s.dtype.name, "default": s.default, "minimum": s.minimum,
        "positive": s.positive,
        "doc": s.doc,
    }  # fmt: skip


def signature_json(op: Op) -> dict[str, Any]:
    """The op's SIG entry of a manifest."""
    return {
        "family": op.family,
        "kind": "recipe" if op.is_recipe else "op",
        "rows": op.rows,
        "width": op.width,
        "operands": [_tensor_json(o) if isinstance(o, Tensor) else _scalar_json(o) for o in op.operands],
        "returns": [t.name for t in op.outputs],
        "attrs": [
            {"name": a.name, "choices": list(a.choices), "default": a.default, "doc": a.doc} for a in op.attrs
        ],
        "constraints": [[predicate, sentence] for predicate, sentence in op.constraints],
        "contract": {"kind": op.contract.kind, "rel_l2": op.contract.rel_l2, "max_eps": op.contract.max_eps},
        "doc": op.doc,
    }
