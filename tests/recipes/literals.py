"""The worked numbers of the specifications: an id for each, and the mark of a test that checks it.

A number here was worked by hand or by another program: a test that disagrees is wrong until proved otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest

LITERALS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "fusion": {
        "1": ("residual", "sum", "gemma", "std"),
        "2": ("fp8",),
        "3": ("silu", "silu_intermediate", "sigmoid", "sigmoid_intermediate"),
        "4": ("largest", "fp4", "fp4_scaled", "fp8"),
        "5": ("fp4",),
        "6": ("direct", "rounded"),
    },
    "act": {
        "1": ("sum", "inverse", "f32", "bf16", "gemma", "eps"),
        "2": ("residual", "sum", "bf16", "unrounded"),
        "3": ("one_rounding", "early_rounding"),
        "4": (
            "2048.codes",
            *(
                f"{width}.{order}"
                for width in (2048, 1000, 5120)
                for order in ("pair", "strided", "sequential", "norm")
            ),
        ),
        "5": ("layer_norm",),
        "6": ("silu_mul", "gelu_tanh", "soft_cap"),
        "7": ("silu", "sigmoid"),
        "n": ("silu", "silu_of_minus_infinity", "sigmoid", "special_rows", "zero_row"),
    },
    "quant": {
        "1": ("codes",),
        "2": ("multiply", "divide"),
        "3": ("first", "second"),
        "4": ("bf16", "fp8"),
        "5": ("hardware", "unsigned_zero"),
        "6": ("threes", "saturated"),
        "7": ("offsets", "bijective"),
        "n": ("floor", "underflow", "nan", "infinity"),
    },
    "gemm": {
        "1": ("out",),
        "2": ("tie", "above"),
        "3": ("separate", "guards"),
        "4": ("no_k", "no_m"),
        "5": ("nan", "infinity"),
    },
    "gemm_fp8": {
        "1": ("acc", "alpha", "scalar"),
        "2": ("0.9", "0.7", "0.7_negative", "0.3"),
        "3": ("largest", "to_largest", "clamped", "nan", "17", "19", "ties", "zero", "least"),
        "4": ("zero_row", "block"),
        "5": ("azp",),
    },
    "topk": {
        "1": ("two", "four"),
        "2": ("straddling", "larger_group"),
        "3": ("padded", "unpadded", "into_padding"),
        "4": ("nan", "infinities"),
        "5": ("three", "two"),
        "6": ("all_minus_infinity", "whole_row"),
        "7": ("keys", "raw"),
    },
    "gdn": {
        "1": ("step", "op"),
        "2": ("norm", "op"),
        "3": ("beta",),
        "4": ("threshold",),
        "5": ("padding",),
        "6": ("heads",),
    },
    "gdn_replay": {
        "1": ("1", "2", "4", "8", "16"),
        "2": ("plain",),
        "3": ("hand",),
        "4": ("forced",),
        "5": ("apart",),
        "6": ("reuse",),
        "7": ("padding",),
        "8": ("heads",),
    },
    "packed_ba": {
        "1": ("split", "op"),
        "2": ("interleaved", "misread", "op", "misread_op"),
        "3": ("swap",),
        "4": ("1", "3", "64"),
        "5": tuple(f"{n}.{of}{by}" for n in (2, 4) for of in ("split", "interleaved") for by in ("", "_op")),
        "6": ("table", "terms"),
        "7": ("views",),
        "8": ("counters",),
    },
    "bf16_out": {
        "1": ("silu", "sigmoid"),
        "2": ("before", "after"),
        "3": ("default", "rollback"),
        "4": ("unset", "empty", "1", "0", "false"),
        "5": ("padding",),
        "6": ("strided",),
    },
    "gdn_chunk": {
        "1": ("recurrence", "parts"),
        "2": ("1", "2", "4", "8", "16", "32", "64"),
        "3": ("split",),
        "7": ("chunks",),
    },
    "ssm": {
        "1": ("state", "zeros", "split", "silu", "products", "op", "products_op"),
        "3": ("norm", "gates"),
    },
}
"""Specification -> number of its test case -> what is worked there; `n` are numbers of its numerics section.

fusion: KERNEL-FUSION-FRAMEWORK, act: KERNEL-EW-NORM-ACT, quant: KERNEL-EW-NORM-QUANT,
gemm: KERNEL-GEMM-BF16, gemm_fp8: KERNEL-GEMM-FP8, topk: KERNEL-TOPK-PAIRS, gdn: KERNEL-GDN-PACKED-DECODE,
gdn_replay: KERNEL-GDN-REPLAYSSM, gdn_chunk: KERNEL-GDN-AOT-BF16, ssm: KERNEL-SSM-MAMBA,
packed_ba: GDN-MOE-PACKED-BA, bf16_out: GDN-MOE-BF16-OUT.
"""


def expected() -> frozenset[str]:
    """Every id, as `act/4.2048.pair`."""
    return frozenset(
        f"{sheet}/{case}.{name}"
        for sheet, cases in LITERALS.items()
        for case, names in cases.items()
        for name in names
    )


def literal(*ids: str) -> pytest.MarkDecorator:
    """The mark of a test, or of one of its parameters, that checks these numbers."""
    return pytest.mark.literal(*ids)


def checked(module: ModuleType) -> Iterator[str]:
    """The ids that the tests of a module check; a skipped test checks nothing."""
    for name, test in vars(module).items():
        marks = list(getattr(test, "pytestmark", ())) if name.startswith("test_") else []
        if any(mark.name in ("skip", "skipif", "xfail") for mark in marks):
            continue
        cases = (case for mark in marks if mark.name == "parametrize" for case in mark.args[1])
        for mark in (*marks, *(m for case in cases for m in getattr(case, "marks", ()))):
            if mark.name == "literal":
                yield from mark.args
