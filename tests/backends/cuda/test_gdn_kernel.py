"""The Triton decode step of the gated delta rule in Triton's interpreter, with small heads."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda.variants.gdn import PRIMITIVES
from kiln.tests.backends import gdn_step
from kiln.tests.backends.cuda.interpreter import View, interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNEL = "kiln.backends.cuda.kernels.gdn:packed_decode"
ROWS, HEADS, VALUE_HEADS, KEY, VALUE, BLOCK = 4, 2, 4, 16, 8, 4


def _call(call: dict[str, Array], output: Any, scale: float = 0.25) -> tuple[Array, Array]:
    out = np.full((ROWS, VALUE_HEADS * VALUE), 99, output)
    strided = ("mixed_qkv", "a", "b", "state")
    strides = [call[n].strides[0] // call[n].itemsize for n in strided]
    views = {n: View(np.ascontiguousarray(call[n].base), 0) for n in ("mixed_qkv", "b")}
    views["a"] = View(np.ascontiguousarray(call["a"].base), VALUE_HEADS)
    state = call["state"].copy()
    results = interpret(
        KERNEL, (VALUE_HEADS * (VALUE // BLOCK), ROWS),
        views["mixed_qkv"], views["a"], views["b"], call["a_log"], call["dt_bias"], state,
        call["state_indices"],
        state, out, VALUE_HEADS, HEADS, len(state), scale, *strides, VALUE_HEADS * VALUE,
        K=KEY, V=VALUE, BLOCK_V=BLOCK, L2NORM=True, CACHE="", EVICT="",
    )  # fmt: skip
    return results[8], results[7]


@pytest.mark.parametrize(
    ("io", "kept", "output"),
    [(np.float32, np.float32, np.float32), (ml_dtypes.bfloat16, np.float32, ml_dtypes.bfloat16)],
)
def test_is_near_the_oracle(io: Any, kept: Any, output: Any) -> None:
    call = gdn_step.operands(ROWS, HEADS, VALUE_HEADS, KEY, VALUE, io, kept)
    wanted, pool = gdn_step.expected(call, HEADS, KEY, VALUE, 0.25)
    out, state = _call(call, output)
    assert gdn_step.distance(out, wanted) < (2e-6 if output is np.float32 else 2**-8)
    touched = call["state_indices"][call["state_indices"] > 0]
    assert gdn_step.distance(state[touched], pool[touched]) < 1e-6
    rest = [s for s in range(len(state)) if s not in touched]
    assert state[rest].tobytes() == call["state"][rest].tobytes()
    assert not out[call["state_indices"] <= 0].any()


def test_a_slot_beyond_the_pool_is_none() -> None:
    call = gdn_step.operands(ROWS, HEADS, VALUE_HEADS, KEY, VALUE, np.float32, np.float32)
    call["state_indices"][1] = len(call["state"])
    out, _ = _call(call, np.float32)
    assert not out[1].any()
    assert out[0].all()


def test_another_scale_is_not_near() -> None:
    call = gdn_step.operands(ROWS, HEADS, VALUE_HEADS, KEY, VALUE, np.float32, np.float32)
    wanted, _ = gdn_step.expected(call, HEADS, KEY, VALUE, 0.26)
    out, _ = _call(call, np.float32)
    assert gdn_step.distance(out, wanted) > 0.01


def test_every_ship_has_a_kernel_whose_rows_are_vectors() -> None:
    assert len({p.variant for p in PRIMITIVES}) == len(PRIMITIVES) == 9
    assert all(["aligned", "state", 16] in p.when for p in PRIMITIVES)
