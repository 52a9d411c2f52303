"""The Triton decode step with a ring in Triton's interpreter, with small heads."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda.variants.gdn_replay import PRIMITIVES, STRIDES
from kiln.tests.arrays import i32
from kiln.tests.backends.cuda.interpreter import View, interpret
from kiln.tests.backends.gdn_replay import WRITTEN, Sizes, expected, filled, operands, same
from kiln.tests.backends.gdn_step import distance

Array: TypeAlias = np.ndarray[Any, Any]

KERNEL = "kiln.backends.cuda.kernels.gdn_replay:replay_decode"
BF16 = ml_dtypes.bfloat16
BLOCK = 4
SIZES = Sizes(4, 2, 4, 16, 8, 4)
READ = (
    "mixed_qkv", "a", "b", "a_log", "dt_bias", "state", "ring_d", "ring_k", "ring_g", "state_indices",
    "write_pos", "force_flush",
)  # fmt: skip


def _call(call: dict[str, Array], sizes: Sizes = SIZES, scale: float = 0.25) -> tuple[Array, ...]:
    """(out, state, ring_d, ring_k, ring_g); in/out operands are written where they are read."""
    held: dict[str, Any] = {n: call[n].copy() for n in WRITTEN} | {"force_flush": None}
    held = {**call, **held, "force_flush": call.get("force_flush")}
    held["out"] = np.full((sizes.rows, sizes.value_heads * sizes.value), 99, call["mixed_qkv"].dtype)
    strides = [held[n].strides[0] // held[n].itemsize for n in STRIDES]
    views = {n: View(np.ascontiguousarray(call[n].base), 0) for n in ("mixed_qkv", "b")}
    views["a"] = View(np.ascontiguousarray(call["a"].base), sizes.value_heads)
    entries = 1 << (sizes.window - 1).bit_length()
    interpreted = interpret(
        KERNEL, (sizes.value_heads * (sizes.value // BLOCK), sizes.rows),
        *(views.get(n, held[n]) for n in READ), *(held[n] for n in (*WRITTEN, "out")),
        sizes.value_heads, sizes.heads, len(held["state"]), scale, *strides,
        K=sizes.key, V=sizes.value, WINDOW=sizes.window, BLOCK_V=BLOCK, ENTRIES=entries, PART=8,
    )  # fmt: skip
    *written, out = interpreted[-len(WRITTEN) - 1 :]
    return out, *written


@pytest.mark.parametrize(
    ("io", "ring", "forced"),
    [(np.float32, np.float32, True), (np.float32, np.float32, False), (BF16, BF16, True)],
)
@pytest.mark.parametrize("window", [3, 4])
def test_is_near_the_oracle(io: Any, ring: Any, forced: bool, window: int) -> None:
    """Rows at every position of the window, some forced; entries that are not live are NaN."""
    sizes = Sizes(5, 2, 4, 16, 8, window)
    for first in range(2):
        call = filled(sizes, (np.arange(5) + first) % window, io=io, ring=ring)
        call |= {"force_flush": i32([0, 5, 1, 0, 0])} if forced else {}
        wanted, found = expected(call, sizes), _call(call, sizes)
        for name, got, want in zip(("out", *WRITTEN), found, wanted, strict=True):
            live = np.isfinite(want.astype(np.float32))
            assert (np.isfinite(got.astype(np.float32)) == live).all()
            limit = 3e-6 if got.dtype == np.float32 else 2**-8
            assert distance(got[live], want[live]) < limit, name
        assert not found[0][2].any()
        assert same(found[1][3], call["state"][3])


@pytest.mark.parametrize(("name", "value"), [("state_indices", 6), ("write_pos", 4), ("write_pos", -1)])
def test_an_index_out_of_range_is_as_no_slot(name: str, value: int) -> None:
    call = operands(SIZES)
    call[name] = call[name].copy()
    call[name][1] = value
    out, *written = _call(call)
    assert not out[1].any()
    assert out[0].all()
    assert all(same(x[2], call[n][2]) for x, n in zip(written, WRITTEN, strict=True))


def test_a_window_of_one_leaves_the_rings() -> None:
    sizes = Sizes(4, 2, 4, 16, 8, 1)
    call = operands(sizes)
    wanted, found = expected(call, sizes), _call(call, sizes)
    assert distance(found[0], wanted[0]) < 3e-6
    assert distance(found[1], wanted[1]) < 1e-6
    assert all(same(x, call[n]) for x, n in zip(found[2:], WRITTEN[1:], strict=True))


def test_another_scale_is_not_near() -> None:
    call = filled(SIZES, np.arange(4))
    assert distance(_call(call)[0], expected(call, SIZES, scale=0.26)[0]) > 0.01


def test_shipped_kernels_are_those_of_models() -> None:
    """Rings of f32 and bf16; 16-byte rows."""
    assert {next(q.dtype for q in p.params if q.name == "ring_d") for p in PRIMITIVES} == {"f32", "bf16"}
    assert len(PRIMITIVES) == 2
    assert all(["aligned", n, 16] in p.when for p in PRIMITIVES for n in ("state", "ring_d", "ring_k"))
