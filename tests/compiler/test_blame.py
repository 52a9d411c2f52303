"""What is wrong in a body is told at file:line:column, with the line and what to write instead."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kiln.compiler.catalog import load
from kiln.compiler.errors import CheckError
from kiln.ir.diagnostics import DeclarationError

HEAD = """\
import math
from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import BF16, F32, U8
from kiln.ir.language import *
from kiln.ir.spec import Op, Scalar, Ship, Tensor
from kiln.recipes import op
X, OUT = Tensor("x", BF16, ("M", "N")), Tensor("out", BF16, ("M", "N"), "out")
def body(x, k):
    {body}
OPS = ({ops},)
def catalog():
    return Catalog(OPS)
"""
ONE = 'Op("one", "MINE", (X, Scalar("k", F32), OUT), body=body, ship=(Ship(),))'


def _load(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, body: str, ops: str = ONE) -> Path:
    path = folder / f"{name}.py"
    path.write_text(HEAD.replace("{body}", body).replace("{ops}", ops))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    load.cache_clear()
    load((name,))
    return path


@pytest.mark.parametrize(
    ("body", "column", "said"),
    [
        ("return x * 2.0", 12, "cannot mul bf16 and bf16"),
        ("return (x.to(F32) * 2.0).to(U8)", 12, "no conversion from f32 to u8"),
        (
            "return math.sin(x)",
            12,
            "its body fails with TypeError: .*; bodies are written with kiln.ir.language",
        ),
        ("return x.sum()", 12, "has no attribute 'sum'; kiln.ir.language has row_sum"),
        ("return row_summ(x)", 12, "'row_summ' is not defined; kiln.ir.language has row_sum"),
        ("return max(x.to(F32), k)", 12, r"select\(\) instead of if; maximum\(\) instead of max\(\)"),
        ("return call(op('silu_mul'), x, x)", 12, "silu_mul: the type of out is free"),
        ("return x if x else k", 12, r"use select\(\) instead of if$"),
        ("é = 1; return x * 2.0", 19, "cannot mul"),
    ],
)
def test_a_mistake_is_shown_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, column: int, said: str
) -> None:
    with pytest.raises(DeclarationError) as caught:
        _load(tmp_path, "blamed", monkeypatch, body)
    first, line, marks = str(caught.value).split("\n")
    assert first.startswith(f"{tmp_path}/blamed.py:9:{column}: ")
    assert re.search(said, first), first
    assert line == f"    {body}"
    assert marks.index("^") - 4 == column - 5


def test_what_is_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load(tmp_path, "blamed", monkeypatch, "return maximum(x.to(F32), k).to(BF16)")


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        (
            ONE.replace('Scalar("k", F32)', 'Scalar("h", F32)'),
            r"its body is body\(x, k\): .*called by name with x, h",
        ),
        (
            ONE.replace("body=body", "reference=lambda y, k: (y,)"),
            r"its reference is <lambda>\(y, k\): .*called by name with x, k",
        ),
    ],
)
def test_parameters_are_the_operands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: str, said: str
) -> None:
    with pytest.raises(DeclarationError, match=said):
        _load(tmp_path, "blamed", monkeypatch, "return x", ops)


@pytest.mark.parametrize(
    ("ops", "said"),
    [("3", "lists a int among its ops, expected an Op$"), ("1 +", r"does not parse: .*/blamed.py:10:\d+: ")],
)
def test_a_catalog_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: str, said: str) -> None:
    with pytest.raises(CheckError, match=said):
        _load(tmp_path, "blamed", monkeypatch, "return x", ops)
