"""What NumPy computes beside Kiln is the same thing: a peer that does less would look fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.runtime.load import Library, load
from kiln.tools.peers_cpu import FORMULAS, cpu_peers

TREE = Path(__file__).resolve().parents[2] / "aot_artifacts"


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    """The committed kernels of this CPU."""
    with load(TREE) as found:
        yield found


def _operands(library: Library, op: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {t.name: (64,) if len(t.shape) == 1 else (5, 64) for t in library.op(op).sig.tensors}
    if op == "silu_and_mul":
        shapes["x"] = (5, 128)
    inputs = [t.name for t in library.op(op).sig.tensors if t.role != "out"]
    return {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in inputs}


@pytest.mark.parametrize("op", sorted(FORMULAS))
def test_numpy_computes_what_the_op_means(library: Library, op: str) -> None:
    names, formula = FORMULAS[op]
    operands = _operands(library, op)
    given: dict[str, Any] = {**operands, **({"eps": 1e-6} if "eps" in names else {})}
    wanted = formula(*(given[n] for n in names))
    got = library.op(op)(**given)
    first = got[0] if isinstance(got, tuple) else got
    assert np.allclose(first, wanted, rtol=1e-5, atol=1e-6)
    assert not np.allclose(first, wanted * np.float32(1.001), rtol=1e-5, atol=1e-6)


def test_a_peer_runs_on_our_arrays() -> None:
    peer = next(p for p in cpu_peers() if p.name == "numpy")
    x = np.ones((2, 64), np.float32)
    run = peer.ops["silu"]({"x": x})
    assert run is not None
    run()
    assert (x == 1).all()
    assert "matmul_bt" not in peer.ops
