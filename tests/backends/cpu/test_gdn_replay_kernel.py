"""The C decode step with a ring: near its oracle, the same bits on every tier and for every split, and the
plain step's bits in a window of one."""

from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.variants import gdn
from kiln.backends.cpu.variants.gdn_replay import STRIDED, replay_decode
from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Ship
from kiln.tests.arrays import i32
from kiln.tests.backends.cpu.native import Native, runnable_tiers
from kiln.tests.backends.gdn_replay import WRITTEN, Sizes, advanced, expected, filled, operands, same, token
from kiln.tests.backends.gdn_step import distance

Array: TypeAlias = np.ndarray[Any, Any]

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
COMBINATIONS = (
    ("f32", "f32", True), ("f32", "f32", False), ("bf16", "f32", True), ("bf16", "bf16", True),
    ("f16", "f32", True),
)  # fmt: skip
"""Types of inputs and outputs and of the rings; whether rows may be told to flush. Not all ship."""
SIZES = (Sizes(4, 2, 4, 16, 8, 4), Sizes(3, 1, 2, 24, 5, 16), Sizes(5, 2, 6, 128, 3, 16))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Native]]:
    folder: Path = tmp_path_factory.mktemp("replay")
    made = {}
    for io, ring, forced in COMBINATIONS:
        types = {"T": DTYPES[io], "R": DTYPES[ring], "O": DTYPES[io]}
        row = replay_decode(Ship(types, absent=() if forced else ("force_flush",)))
        made[io, ring, forced] = {t: Native(row, t, folder) for t in runnable_tiers()}
    return made


def _call(kernel: Native, call: dict[str, Array], sizes: Sizes, split: int = 1, norm: int = 1) -> Any:
    """(out, state, ring_d, ring_k, ring_g) of a kernel that computes its tiles in `split` pieces."""
    held = {n: call[n].copy() if n in WRITTEN else call[n] for n in call}
    io = TYPES[str(kernel.primitive.constants["output"])]
    held["out"] = np.full((sizes.rows, sizes.value_heads * sizes.value), 99, io)
    numbers: dict[str, float] = {f"{t}_stride": held[t].strides[0] // held[t].itemsize for t in STRIDED}
    numbers |= {
        "HV": sizes.value_heads, "heads": sizes.heads, "slots": len(held["state"]), "K": sizes.key,
        "V": sizes.value, "window": sizes.window, "norm": norm, "scale": 0.25,
    }  # fmt: skip
    edges = np.linspace(0, sizes.rows * sizes.value_heads, split + 1).astype(int)
    for begin, end in reversed(list(pairwise(edges))):
        kernel(held, numbers, int(begin), int(end))
    return tuple(held[n] for n in ("out", *WRITTEN))


def _forced(call: dict[str, Array], forced: bool, every: int) -> dict[str, Array]:
    rows = len(call["write_pos"])
    return {**call, "force_flush": (np.arange(rows) % every == 0).astype(np.int32)} if forced else call


@pytest.mark.parametrize("types", COMBINATIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_is_near_the_oracle_and_the_same_on_every_tier(kernels: Any, types: Any, sizes: Sizes) -> None:
    """Rows at every position of the window, some forced; entries that are not live are NaN."""
    io, ring, forced = types
    for first in range(0, sizes.window, sizes.rows):
        positions = (first + np.arange(sizes.rows)) % sizes.window
        call = _forced(filled(sizes, positions, io=TYPES[io], ring=TYPES[ring]), forced, 3)
        wanted = expected(call, sizes)
        found = [_call(k, call, sizes, n) for n, k in enumerate(kernels[types].values(), 1)]
        assert all(same(a, b) for other in found for a, b in zip(other, found[0], strict=True))
        for name, got, want in zip(("out", *WRITTEN), found[0], wanted, strict=True):
            live = np.isfinite(want.astype(np.float32))
            assert (np.isfinite(got.astype(np.float32)) == live).all()
            limit = 3e-6 if got.dtype == np.float32 else 2**-8
            assert distance(got[live], want[live]) < limit, name
        assert not found[0][0][call["state_indices"] <= 0].any()


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("types", COMBINATIONS)
def test_steps_in_a_row_stay_near_the_oracle(kernels: Any, types: Any, window: int) -> None:
    """2 L + 1 steps: the kernel's own state and rings are what it goes on with."""
    io, ring, forced = types
    sizes = Sizes(4, 2, 4, 16, 8, window)
    kernel = next(iter(kernels[types].values()))
    ours = operands(sizes, TYPES[io], TYPES[ring])
    exact = {n: x.astype(np.float64) if n in WRITTEN else x for n, x in ours.items()}
    for t in range(2 * window + 1):
        fresh = token(sizes, TYPES[io], t)
        force = {"force_flush": i32([t == 2, 0, 0, t == 3])} if forced else {}
        ours, exact = ours | fresh | force, exact | fresh | force
        out, *written = _call(kernel, ours, sizes)
        want, *states = expected(exact, sizes)
        assert distance(out, want) < (3e-6 if (io, ring) == ("f32", "f32") else 2e-2)
        position = {"write_pos": advanced(ours["write_pos"], window, force.get("force_flush"))}
        ours = ours | dict(zip(WRITTEN, written, strict=True)) | position
        exact = exact | dict(zip(WRITTEN, states, strict=True)) | position
    assert distance(ours["state"], exact["state"]) < (1e-6 if ring == "f32" else 1e-2)


def test_a_window_of_one_has_the_bits_of_the_plain_step(kernels: Any, tmp_path: Path) -> None:
    sizes = Sizes(4, 2, 4, 24, 8, 1)
    call = operands(sizes)
    plain = next(
        p for p in gdn.PRIMITIVES if set(p.constants[k] for k in ("io", "state", "output")) == {"f32"}
    )
    held = {**call, "state": call["state"].copy(), "out": np.full((4, 32), 99, np.float32)}
    numbers: dict[str, float] = {f"{t}_stride": held[t].strides[0] // 4 for t in gdn.STRIDED}
    numbers |= {"HV": 4, "heads": 2, "slots": 6, "K": 24, "V": 8, "norm": 1, "scale": 0.25}
    Native(plain, "baseline", tmp_path)(held, numbers, 0, 16)
    for kernel in kernels["f32", "f32", False].values():
        out, state, *rings = _call(kernel, call, sizes)
        assert same(out, held["out"])
        assert same(state, held["state"])
        assert all(same(r, call[n]) for r, n in zip(rings, WRITTEN[1:], strict=True))


@pytest.mark.parametrize(("name", "value"), [("state_indices", 6), ("write_pos", 4), ("write_pos", -1)])
def test_an_index_out_of_range_is_told_by_its_row(kernels: Any, name: str, value: int) -> None:
    sizes = Sizes(4, 2, 4, 16, 8, 4)
    call = operands(sizes)
    call[name] = call[name].copy()
    call[name][1] = value
    kernel = kernels["f32", "f32", False]["baseline"]
    with pytest.raises(ValueError, match="returned 2"):
        _call(kernel, call, sizes)
    call["state_indices"][1] = 0
    assert not _call(kernel, call, sizes)[0][1].any()


def test_keys_that_are_not_normalized_are_kept_as_they_are(kernels: Any) -> None:
    sizes = Sizes(4, 2, 4, 16, 8, 4)
    call = operands(sizes)
    wanted = expected(call, sizes, qk_l2norm=False)
    found = _call(kernels["f32", "f32", False]["baseline"], call, sizes, norm=0)
    assert distance(found[0], wanted[0]) < 3e-6
    keys = found[3][1].reshape(2, 4, 16)[:, 0]
    assert same(keys, call["mixed_qkv"][0, 32:64].reshape(2, 16))
