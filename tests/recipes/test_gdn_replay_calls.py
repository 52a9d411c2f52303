"""The delta rule's decode step with a ring through the runtime: what a call writes, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.recipes.gdn_replay import REPLAY_DECODE
from kiln.runtime.errors import ContractError, KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.targets import cpu_target
from kiln.tests.arrays import i32
from kiln.tests.backends.gdn_replay import WRITTEN, Sizes, advanced, expected, filled, operands, same, token
from kiln.tests.backends.gdn_step import distance
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]

SIZES = Sizes(4, 2, 4, 16, 8, 4)
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    out: Path = tmp_path_factory.mktemp("replay") / "tree"
    build_from(out, [cpu_target()], [REPLAY_DECODE.name], [CpuBackend()])
    with load(out, "cpu") as made:
        yield made


def _call(library: Library, call: dict[str, Any], **scalars: Any) -> tuple[Array, ...]:
    given = {**SIZES.scalars(), "scale": 0.25, **scalars}
    return tuple(np.asarray(x) for x in library.op(REPLAY_DECODE.name)(**call, **given))


@pytest.mark.parametrize(("io", "ring"), [(np.float32, np.float32), (BF16, np.float32), (BF16, BF16)])
def test_steps_write_in_place(library: Library, io: Any, ring: Any) -> None:
    """Ten steps of rows that stand apart, two of them forced: the caller moves positions, nothing else."""
    call = filled(SIZES, np.arange(4), io=io, ring=ring)
    for t in range(10):
        fresh = token(SIZES, io, 50 + t)
        call |= fresh | {"force_flush": i32([t == 3, 0, 0, t == 5])}
        wanted = expected(call, SIZES)
        given = {n: call[n].copy() if n in WRITTEN else call[n] for n in call}
        out, *written = _call(library, given)
        assert distance(out, wanted[0]) < (3e-6 if io == np.float32 else 2**-8)
        assert all(same(given[n], x) for n, x in zip(WRITTEN, written, strict=True))
        call |= dict(zip(WRITTEN, wanted[1:], strict=True))
        call["write_pos"] = advanced(call["write_pos"], SIZES.window, call["force_flush"])


def test_without_forced_rows_and_without_norms(library: Library) -> None:
    call = filled(SIZES, np.arange(4))
    given = {n: x.copy() for n, x in call.items()}
    found = _call(library, given, qk_l2norm=False)
    assert distance(found[0], expected(call, SIZES, qk_l2norm=False)[0]) < 3e-6
    assert distance(found[0], expected(call, SIZES)[0]) > 0.1


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"write_pos": np.zeros(4, np.int64)}, {}, "write_pos"),
    ({"write_pos": np.zeros(3, np.int32)}, {}, "write_pos"),
    ({"force_flush": np.zeros(4, bool)}, {}, "force_flush"),
    ({"ring_g": np.zeros((6, 16), BF16)}, {}, "ring_g"),
    ({"ring_g": np.zeros((6, 15), np.float32)}, {}, "ring_g"),
    ({"ring_k": np.zeros((6, 4 * 32), BF16)}, {}, "ring_k"),
    ({"ring_d": np.zeros((6, 3 * 32), np.float32)}, {}, "ring_d"),
    ({"state": np.zeros((6, 512), BF16)}, {}, "state"),
    ({}, {"window": 0}, "window"),
    ({}, {"scale": 0.0}, "scale"),
    ({}, {"heads": 3}, "HV must be divisible by H|mixed_qkv"),
)


@pytest.mark.parametrize(("changed", "scalars", "named"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    library: Library, changed: dict[str, Any], scalars: dict[str, Any], named: str
) -> None:
    call = operands(SIZES)
    with pytest.raises(KilnError, match=named):
        _call(library, call | changed, **scalars)
    _call(library, call)


def test_a_window_longer_than_kernels_hold_is_refused(library: Library) -> None:
    for window in (64, 65):
        sizes = Sizes(1, 1, 1, 4, 2, window)
        call, scalars = operands(sizes), {**sizes.scalars(), "scale": 0.25}
        if window == 64:
            library.op(REPLAY_DECODE.name)(**call, **scalars)
        else:
            with pytest.raises(KilnError, match="window"):
                library.op(REPLAY_DECODE.name)(**call, **scalars)


@pytest.mark.parametrize(("name", "value"), [("write_pos", 4), ("write_pos", -1), ("state_indices", 6)])
def test_an_index_out_of_range_is_refused(library: Library, name: str, value: int) -> None:
    call = operands(SIZES)
    call[name] = call[name].copy()
    call[name][1] = value
    with pytest.raises(ContractError, match="row 1 holds an index that is out of range"):
        _call(library, call)
