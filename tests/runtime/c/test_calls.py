"""The Python runtime's own tests of calls, with libkiln in its place: results, and every misuse with its
sentence. What only Python can be given (lists, byte orders, positional operands) is left to it."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.errors import ContractError
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.test_call import (  # noqa: F401
    MISUSE,
    X,
    test_aliasing,
    test_aliasing_through_a_plan,
    test_attributes_constraints_and_ranges,
    test_bound_call_runs_again,
    test_forced_candidates,
    test_in_place_operand_and_its_written_side,
    test_integer_scalar_binds_a_dim,
    test_names_and_order,
    test_parameter_promises,
    test_plan_reads_what_it_wrote,
    test_rows_operand_with_leading_dims,
    test_scratch,
    test_selection_order,
    test_shapes_of_any_rank,
    test_strided_rows_and_broadcast,
    test_threads_do_not_change_results,
    test_zeroed_scratch,
)

PYTHON_ONLY = {
    "too many", "two outs", "float as array", "no array", "a string", "a number", "object", "complex",
    "structured", "big-endian", "stride between elements", "stream on the CPU", "read-only out",
    "read-only in place", "too few", "none", "None", "float as text", "twice",
}  # fmt: skip
"""Names of misuses that are no calls of C, or have a sentence of their own below."""

SENTENCES = {
    "too few": "scale_add: the operand y is missing",
    "none": "the operand x is missing",
    "None": "the operand x is missing",
    "float as text": "alpha is a str, expected a number",
    "twice": "x is given twice; give it once",
    "read-only out": "out is written but its tensor is read-only",
    "read-only in place": "sum is written but its tensor is read-only",
    "stream on the CPU": "found a stream on the CPU, expected NULL",
}


@pytest.fixture
def lib(c: ctypes.CDLL, tree: Path) -> Iterator[Any]:
    """libkiln where the tests expect the Python runtime."""
    with libkiln.Library(c, tree, threads=3) as library:
        yield library


@pytest.fixture(autouse=True)
def _opened_by_libkiln(c: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(root: Path, device: str = "cpu", **options: Any) -> libkiln.Library:
        return libkiln.Library(c, root, device, **options)

    monkeypatch.setattr(kiln, "load", load)


@pytest.mark.parametrize("name", [n for n in MISUSE if n not in PYTHON_ONLY or n in SENTENCES])
def test_misuse_is_refused_by_name(lib: libkiln.Library, name: str) -> None:
    call, why = MISUSE[name]
    for _ in range(2):
        with pytest.raises(ContractError, match=SENTENCES.get(name, why)):
            call(lib)  # type: ignore[arg-type]
    assert np.array_equal(lib.negate(X), -X)


def test_what_only_c_can_be_given(lib: libkiln.Library) -> None:
    op = lib.op("negate")

    def refused(why: str, *items: libkiln.Argument) -> None:
        with pytest.raises(ContractError, match=why):
            lib.call("kiln_run", op.handle, libkiln.arguments(list(items)), len(items), None, None)

    good = libkiln.argument("x", X)
    refused("the output out is missing; pass a tensor for it", good)
    refused("an argument has no name", libkiln.Argument(kind=libkiln.TENSOR))
    refused("x is an input; pass it with KILN_TENSOR", libkiln.argument("x", X, written=True))
    refused("x: found a int, expected a tensor", libkiln.argument("x", 5))
    for field, value, why in (
        ("rank", 9, "its rank is not 0 to 8"),
        ("rank", -1, "its rank is not 0 to 8"),
        ("dtype", 0, "its dtype is none"),
        ("dtype", 14, "its dtype is none"),
        ("data", None, "x has a null address"),
        ("device", 3, "x is on cuda:3, expected the CPU"),
    ):
        bad = libkiln.argument("x", X)
        setattr(bad.tensor.contents, field, value)
        refused(why, bad, libkiln.argument("out", X.copy()))
    for shape, strides, why in (
        ((-1, 6), (6, 1), "negative extent"),
        ((1 << 40, 1 << 40), (1 << 40, 1), "spans 2.56 elements"),
        ((4, 6), (1 << 60, 1), "spans 2.56 elements"),
    ):
        bad = libkiln.argument("x", X)
        bad.tensor.contents.shape[:2], bad.tensor.contents.strides[:2] = shape, strides
        refused(why, bad, libkiln.argument("out", X.copy()))
    with pytest.raises(ContractError, match="found no op"):
        lib.call("kiln_run", None, None, 0, None, None)
    with pytest.raises(ContractError, match="did you mean negate"):
        lib.op("negat")


def test_zero_rows_run_nothing(lib: libkiln.Library) -> None:
    assert lib.negate(np.ones((0, 4), np.float32)).shape == (0, 4)
    assert lib.negate(np.ones((3, 0), np.float32)).shape == (3, 0)
    assert lib.scale_negate(*[np.ones((2, 0, 4), np.float32)] * 2).shape == (2, 0, 4)
    assert lib.stats() == {}
