"""Outputs that a call would leave as they were made, or write nowhere, are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.arrays import described
from kiln.runtime.errors import ContractError
from kiln.tests.runtime.trees import cpu_manifest, dim, tensor, write_tree

X = np.arange(6, dtype=np.float32).reshape(1, 6)


def last_row(root: Path, ops_so: bytes) -> Path:
    """A tree whose `negate` has an output [N]: without rows it has elements, and nobody computes them."""
    document = cpu_manifest(ops_so)
    x = document["ops"]["negate"]["operands"][0]
    document["ops"]["negate"]["operands"] = [x, tensor("out", "out", [dim("N")])]
    document["recipes"] = []
    return write_tree(root, {"cpu-x86_64": document}, {"ops.so": ops_so})


@pytest.fixture
def uneven(tmp_path: Path, ops_so: bytes) -> Iterator[Any]:
    """A library of that tree."""
    with kiln.load(last_row(tmp_path / "tree", ops_so)) as library:
        yield library


WHY = r"negate: M is 0 and nothing would be computed, but the output out has shape \(6,\)"


def test_an_output_without_rows_to_compute_it_is_refused(uneven: Any) -> None:
    assert np.array_equal(uneven.negate(X), -X[0])
    for _ in range(2):
        with pytest.raises(ContractError, match=WHY):
            uneven.negate(X[:0])
        with pytest.raises(ContractError, match=WHY):
            uneven.negate(X[:0], out=np.zeros(6, np.float32))
    with pytest.raises(ContractError, match=WHY):
        uneven.op("negate").bind(X[:0], out=np.zeros(6, np.float32))


def test_an_output_without_elements_is_fine(uneven: Any) -> None:
    assert uneven.negate(X[:, :0]).shape == (0,)
    out = np.zeros(0, np.float32)
    assert uneven.negate(X[:0, :0], out=out) is out


def test_an_output_without_memory_is_refused(tree: Path) -> None:
    """As a torch tensor is whose storage was freed."""
    nowhere: Any = described((1, 6), "f32")
    with kiln.load(tree) as library:
        for out in (nowhere, X.copy(), nowhere):
            if out is nowhere:
                with pytest.raises(ContractError, match="an operand has a null address"):
                    library.negate(X, out=out)
                with pytest.raises(ContractError, match="an operand has a null address"):
                    library.accumulate(X, X.copy(), out=out)
            else:
                assert np.array_equal(library.negate(X, out=out), -X)
        assert library.negate(X[:0], out=described((0, 6), "f32")).shape == (0, 6)
