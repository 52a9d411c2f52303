"""An op in words: what callers need, from its signature alone."""

from __future__ import annotations

import kiln.runtime as kiln
from kiln.runtime.manifest import parse_signature
from kiln.runtime.sheet import served, sheet
from kiln.tests.runtime.trees import dim, scalar, signature, tensor

MN = [dim("M"), dim("N")]
FREE = {"var": "T", "choices": ["bf16", "f32"]}
SIG = signature(
    [
        tensor("x", "in", MN, FREE, doc="rows"),
        tensor("bias", "in", [dim("N")], optional=True),
        tensor("out", "out", [dim("M"), ["floordiv", dim("N"), 2]], "u8", layout="strided"),
        scalar("eps", default=1e-6, minimum=0.0, positive=True, doc="of the mean"),
        scalar("k", "i32"),
    ],
    ["out"],
    attrs=[{"name": "mode_of", "choices": ["a", "b"], "default": "a", "doc": ""}],
    constraints=[[["divisible", dim("N"), 2], "N must be even"]],
    doc="halves",
)
TEXT = """\
halve(x, bias=None, eps=1e-06, k, mode_of='a') -> out
halves

  x        T[M, N]       read; rows
  bias     f32[N]        read; may be None
  out      u8[M, N // 2]  written; any strides
  eps      f32           default 1e-06; more than 0; of the mean
  k        i32
  mode_of  'a' | 'b'     default 'a'

  type T    bf16, f32
  M         stands for any number of leading dimensions
  numerics  exact: the same bits on every CPU and GPU, fused or not
  requires  N must be even"""


def _squeezed(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_everything_that_a_caller_needs() -> None:
    assert _squeezed(sheet("halve", parse_signature(SIG, "op halve"))) == _squeezed(TEXT)


def test_columns_line_up() -> None:
    found = [
        n for n, line in enumerate(sheet("halve", parse_signature(SIG, "op")).splitlines()) if "read" in line
    ]
    lines = sheet("halve", parse_signature(SIG, "op")).splitlines()
    assert len({lines[n].index("read") for n in found}) == 1


def test_an_envelope_has_its_bounds_and_no_constraint_no_line() -> None:
    contract = {"kind": "envelope", "rel_l2": 0.0039, "max_eps": 16.0}
    found = sheet("halve", parse_signature({**SIG, "contract": contract, "constraints": []}, "op halve"))
    assert "from float64 within 0.0039 (relative L2) and 16 epsilons" in found
    assert "requires" not in found


def test_the_shipped_tree_prints_its_ops() -> None:
    with kiln.load() as library:
        assert repr(library).startswith(f"<{len(library.ops)} ops of ")
        assert str(library.rms_norm).startswith("rms_norm(x, weight=None, eps=1e-06, gemma=False) -> out\n")
        calls = served(library.rms_norm.candidates)
    assert "x=bf16 weight=none out=bf16 gemma=false" in calls
    assert len(calls) == len(set(calls))
    assert not any("weight=f16" in call and "x=bf16" in call for call in calls)
