"""Calls made of words."""

from __future__ import annotations

from typing import Any

import pytest

from kiln.runtime.manifest import Signature, parse_signature
from kiln.tests.trees import signature
from kiln.tools.console import UsageError
from kiln.tools.pretend import attrs_of, describe, given, parse_call, scalar_of, view_of


def op() -> Signature:
    """A row op with a type variable, an optional operand, a derived shape, an attribute and numbers."""
    value: dict[str, Any] = signature()
    x, y, scale = value["operands"]
    dtype = {"var": "T", "choices": ["bf16", "f32"]}
    codes = {**x, "name": "codes", "dtype": "u8", "shape": [["dim", "M"], ["floordiv", ["dim", "N"], 2]]}
    bias = {**x, "name": "bias", "dtype": dtype, "shape": [["dim", "N"]], "optional": True}
    count = {**scale, "name": "k", "dtype": "i32", "default": None}
    out = {**y, "dtype": dtype, "shape": [["dim", "M"], ["dim", "K"]]}
    value["operands"] = [{**x, "dtype": dtype}, codes, bias, out, scale, count]
    value["attrs"] = [{"name": "gemma", "choices": [False, True], "default": False, "doc": ""}]
    return parse_signature(value)


def test_everything_that_can_be_said() -> None:
    words = "M=16 N=64 K=4 T=f32 bias=none x.stride=80 s=0.5 gemma=true".split()
    call = parse_call("f", op(), words)
    sig = op()
    x, codes, bias, _ = (view_of(t, call, -1) for t in sig.tensors)
    assert x is not None
    assert codes is not None
    assert (x.shape, x.strides, x.dtype) == ((16, 64), (80, 1), "f32")
    assert (codes.shape, codes.strides, codes.dtype) == ((16, 32), (32, 1), "u8")
    assert bias is None
    assert [scalar_of(s, call) for s in sig.scalars] == [0.5, 4]
    assert attrs_of(sig, call) == {"gemma": True}
    text = "f(x: f32[16, 64] stride 80, codes: u8[16, 32], bias: none, s=0.5, k=4, gemma=True)"
    assert describe("f", sig, call) == text


def test_an_output_counts_if_its_own_type_or_stride_is_said() -> None:
    value: dict[str, Any] = signature()
    x, y, _ = value["operands"]
    free = {"var": "U", "choices": ["bf16", "f32"]}
    value["operands"] = [x, {**y, "dtype": free}]
    sig = parse_signature(value)
    for words, said in (("M=1 N=2", False), ("M=1 N=2 U=f32", True), ("M=1 N=2 y.stride=8", True)):
        call = parse_call("f", sig, words.split())
        assert [given(t, sig, call) for t in sig.tensors] == [True, said]
    assert describe("f", sig, call) == "f(x: f32[1, 2], y: bf16[1, 2] stride 8)"


def test_an_absent_operand_fixes_no_type() -> None:
    value: dict[str, Any] = signature()
    x, y, _ = value["operands"]
    free = {"var": "U", "choices": ["bf16", "f32"]}
    value["operands"] = [x, {**x, "name": "bias", "dtype": free, "optional": True}, {**y, "dtype": free}]
    sig = parse_signature(value)
    for words, said in (("M=1 N=2 U=f32 bias=none", True), ("M=1 N=2 U=f32", False)):
        assert given(sig.tensors[-1], sig, parse_call("f", sig, words.split())) is said


def test_defaults() -> None:
    call = parse_call("f", op(), ["M=1", "N=2", "K=3"])
    text = "f(x: bf16[1, 2], codes: u8[1, 1], bias: bf16[2], s=2, k=3, gemma=False)"
    assert describe("f", op(), call) == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("M=16", "f needs N=… K=… as well"),
        ("M=16 N=64 K=1 m", "found 'm', expected key=value with one of M, N, K, x, T"),
        ("M=16 N=64 K=1 gema=true", "no key of f 'gema'; did you mean gemma?"),
        ("M=-1 N=64 K=1", "M=-1: expected an extent"),
        ("M=1.5 N=64 K=1", "M=1.5: expected an extent"),
        ("M=1 N=64 K=1 T=f16", "T=f16: expected one of bf16, f32"),
        ("M=1 N=64 K=1 x=none", "x=none: expected one of bf16, f32"),
        ("M=1 N=64 K=1 gemma=maybe", "expected one of false, true"),
        ("M=1 N=64 K=1 s=fast", "s=fast: "),
        ("M=1 N=64 K=1 bias.stride=4", "no key of f 'bias.stride'"),
    ],
)
def test_refusals(words: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_call("f", op(), words.split())
    assert told in str(caught.value)
