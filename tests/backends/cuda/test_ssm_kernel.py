"""The Triton convolutions and the split after them in Triton's interpreter."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.recipes.ssm import FORWARD, POST_CONV, UPDATE
from kiln.tests.arrays import i32
from kiln.tests.backends.cuda.interpreter import interpret

Array: TypeAlias = np.ndarray[Any, Any]

KERNELS = "kiln.backends.cuda.kernels.ssm"
BF16 = ml_dtypes.bfloat16
C, WIDTH = 20, 4


def _operands(rows: int, slots: int, dtype: Any) -> dict[str, Array]:
    rng = np.random.default_rng(rows)
    shapes = {"x": (rows, C), "weight": (C, WIDTH), "bias": (C,), "conv_state": (slots, (WIDTH - 1) * C)}
    return {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}


def _near(found: Array, wanted: Array) -> bool:
    bound = 1e-5 if found.dtype == np.float32 else 2.0**-8
    exact = wanted.astype(np.float64)
    return bool(np.linalg.norm(found.astype(np.float64) - exact) <= bound * np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("biased", [True, False])
def test_update(dtype: Any, biased: bool) -> None:
    given = _operands(4, 5, dtype) | {"state_indices": i32([3, 0, 1, -1])}
    call = given if biased else {n: x for n, x in given.items() if n != "bias"}
    assert UPDATE.reference is not None
    wanted, state = UPDATE.reference(**call, silu=True)
    out, kept = np.full((4, C), 99, dtype), given["conv_state"].copy()
    bias = given["bias"] if biased else None
    made = interpret(
        f"{KERNELS}:update", (2, 4), given["x"], given["weight"], bias, kept, given["state_indices"], kept,
        out, C, 5, C,
        (WIDTH - 1) * C, SILU=True, BLOCK=16,
    )  # fmt: skip
    assert _near(made[-1], wanted)
    assert made[-2].tobytes() == state.tobytes()


def _forward(given: dict[str, Array]) -> tuple[Array, Array]:
    """(out, conv_state) of the kernel."""
    rows, seqs = len(given["x"]), len(given["state_indices"])
    out, kept = np.full((rows, C), 99, given["x"].dtype), given["conv_state"].copy()
    made = interpret(
        f"{KERNELS}:forward", (2, -(-rows // 8) + seqs), given["x"], given["weight"], given["bias"], kept,
        given["cu_seqlens"], given["state_indices"], given["has_initial_state"], kept, out, rows, seqs, C,
        seqs + 1, C, (WIDTH - 1) * C, SILU=False, BLOCK=16, PIECE=8, STEP=4, LANES=16,
    )  # fmt: skip
    return made[8], made[7]


def _sequences(lengths: list[int], known: int, dtype: Any) -> dict[str, Array]:
    rows, seqs = sum(lengths), len(lengths)
    slots = np.arange(seqs, 0, -1, dtype=np.int32)
    slots[2:3] = 0
    return _operands(rows, seqs + 1, dtype) | {
        "state_indices": slots, "has_initial_state": np.full(seqs, known, np.int32),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("lengths", [[5], [1, 8, 2, 0, 23], [3, 17, 9]])
@pytest.mark.parametrize("known", [0, 1])
def test_forward(dtype: Any, lengths: list[int], known: int) -> None:
    given = _sequences(lengths, known, dtype)
    assert FORWARD.reference is not None
    wanted, state = FORWARD.reference(**given, silu=False)
    out, kept = _forward(given)
    assert _near(out, wanted)
    assert kept.tobytes() == state.tobytes()


def test_forward_without_its_state_is_not_near() -> None:
    given = _sequences([17], 1, BF16)
    assert FORWARD.reference is not None
    wanted, _ = FORWARD.reference(**given, silu=False)
    out, _ = _forward(given | {"has_initial_state": i32([0])})
    assert not _near(out[:3], wanted[:3])
    assert _near(out[3:], wanted[3:])


@pytest.mark.parametrize("rows", [1, 15, 17])
def test_post_conv(rows: int) -> None:
    heads, value_heads, key, value = 2, 4, 16, 8
    rng = np.random.default_rng(rows)
    qkv = rng.standard_normal((rows, 2 * heads * key + value_heads * value)).astype(BF16)
    a, b = (rng.standard_normal((rows, value_heads)).astype(BF16) for _ in range(2))
    a_log, dt_bias = (rng.standard_normal(value_heads).astype(np.float32) for _ in range(2))
    assert POST_CONV.reference is not None
    wanted = POST_CONV.reference(
        mixed_qkv=qkv, a=a, b=b, a_log=a_log, dt_bias=dt_bias, heads=heads, key_dim=key, value_dim=value
    )
    outs = [
        np.full(w.shape, np.nan, t)
        for w, t in zip(wanted, (BF16, BF16, BF16, np.float32, np.float32), strict=True)
    ]
    made = interpret(
        f"{KERNELS}:post_conv", (-(-rows // 4), heads + value_heads), qkv, a, b, a_log, dt_bias, *outs,
        rows, value_heads,
        heads, qkv.shape[1], value_heads, value_heads, K=key, V=value, ROWS=4,
    )  # fmt: skip
    assert made[7].tobytes() == wanted[2].tobytes()
    assert all(_near(made[5 + i], wanted[i]) for i in (0, 1, 3, 4))


def test_taps_in_the_other_order_are_not_near() -> None:
    given = _operands(4, 5, np.float32) | {"state_indices": i32([3, 2, 1, 4])}
    assert UPDATE.reference is not None
    wanted, _ = UPDATE.reference(**given | {"weight": given["weight"][:, ::-1]}, silu=True)
    out, kept = np.full((4, C), 99, np.float32), given["conv_state"].copy()
    made = interpret(
        f"{KERNELS}:update", (2, 4), given["x"], given["weight"], given["bias"], kept,
        given["state_indices"], kept, out, C, 5,
        C, (WIDTH - 1) * C, SILU=True, BLOCK=16,
    )  # fmt: skip
    assert not _near(made[-1], wanted)
