"""Packing of the delta rule's projections: worked numbers on the oracle and the compiled op, both against the
runtime's table of rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.compiler.pipeline import build
from kiln.recipes.gdn_pack import PACK, W
from kiln.runtime.errors import ContractError
from kiln.runtime.load import Library, load
from kiln.runtime.projections import Heads, Packed, pack_ba, pack_qkvz, packed_rows
from kiln.runtime.targets import cpu_target
from kiln.tests.arrays import f32
from kiln.tests.recipes.conftest import CATALOG
from kiln.tests.recipes.literals import literal

Array: TypeAlias = np.ndarray[Any, Any]
Pack: TypeAlias = Callable[..., Array]

B, A = f32([[1, 0], [0, 1], [1, 1], [2, 0]]), f32([[0, 2], [3, 0], [1, -1], [0, 0]])
BA = np.concatenate([B[:2], A[:2], B[2:], A[2:]])
X = f32([[2, 5]])
PAIR = {"heads": 2, "value_rows": 2}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    out: Path = tmp_path_factory.mktemp("pack") / "tree"
    build([CATALOG], [cpu_target()], out, backends=[CpuBackend()], ops=[PACK.name, "embedding"])
    with load(out, "cpu") as made:
        yield made


@pytest.fixture(params=["oracle", "cpu"])
def pack(request: pytest.FixtureRequest) -> Pack:
    if request.param == "cpu":
        op = request.getfixturevalue("library").op(PACK.name)
        return lambda **call: np.asarray(op(**call))
    assert PACK.reference is not None
    reference = PACK.reference
    return lambda **call: np.asarray(reference(**call)[0])


@literal("packed_ba/1.op")
def test_b_then_a(pack: Pack) -> None:
    packed = pack(first=B, second=A, **PAIR)
    assert packed.tolist() == [*B.tolist(), *A.tolist()]
    assert (X @ packed.T).tolist() == [[2, 5, 7, 4, 10, 6, -3, 0]]


@literal("packed_ba/2.op")
def test_an_interleaved_tensor_gives_the_same_rows(pack: Pack) -> None:
    assert pack(fused=BA, **PAIR).tobytes() == np.concatenate([B, A]).tobytes()


@literal("packed_ba/2.misread_op")
def test_an_interleaved_tensor_is_not_b_then_a(pack: Pack) -> None:
    """One key head has no other to alternate with: read so, the fused tensor stays as it is."""
    misread = pack(fused=BA, heads=1, value_rows=4)
    assert (X @ misread.T)[0, :4].tolist() == [2, 5, 10, 6]


@pytest.mark.parametrize(
    ("size", "fused"),
    [
        pytest.param(n, fused, marks=literal(f"packed_ba/5.{n}.{'interleaved' if fused else 'split'}_op"))
        for n in (2, 4)
        for fused in (False, True)
    ],
)
def test_ranks_together_are_the_whole(pack: Pack, size: int, fused: bool) -> None:
    """Every rank has its part of b below which lies its part of a."""
    b, a = (np.random.default_rng(size).standard_normal((8, 3)).astype(np.float32) for _ in "ba")
    both = np.concatenate([np.concatenate([b[2 * j : 2 * j + 2], a[2 * j : 2 * j + 2]]) for j in range(4)])
    given = {"fused": both} if fused else {"first": b, "second": a}
    ranks = [pack(**given, heads=4, value_rows=2, rank=r, size=size) for r in range(size)]
    halves = [np.concatenate(h) for h in zip(*(np.split(r, 2) for r in ranks), strict=True)]
    assert np.concatenate(halves).tobytes() == np.concatenate([b, a]).tobytes()


SHAPES = ((1, 1, 0, 1), (2, 3, 0, 5), (4, 5, 3, 2), (6, 2, 7, 33))
"""Key heads, rows of v and of q of one, columns."""


def operands(shape: tuple[int, int, int, int], fused: bool, dtype: Any) -> dict[str, Array]:
    """Random bits: what packs moves them, NaN payloads too."""
    heads, values, keys, columns = shape
    rows = heads * 2 * (keys + values)
    bits = np.random.default_rng(rows).integers(0, 256, (rows, columns * np.dtype(dtype).itemsize), np.uint8)
    whole: Array = bits.view(dtype)
    cut = heads * (2 * keys + values)
    return {"fused": whole} if fused else {"first": whole[:cut], "second": whole[cut:]}


def wanted(call: Mapping[str, Array], shape: tuple[int, int, int, int], rank: int, size: int) -> bytes:
    """By the runtime's table of rows."""
    heads, values, keys, _ = shape
    parts = (keys, keys, values, values) if keys else (values, values)
    index = packed_rows(parts, heads, interleaved="fused" in call, rank=rank, size=size)
    return np.concatenate(list(call.values()))[index].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_those_of_the_runtimes_table(
    pack: Pack, shape: tuple[int, int, int, int], fused: bool
) -> None:
    heads, values, keys, _ = shape
    for dtype in W.choices:
        call = operands(shape, fused, dtype.numpy)
        for size in (n for n in (1, 2, 3) if heads % n == 0):
            for rank in range(size):
                ranks = {"rank": rank, "size": size}
                found = pack(**call, heads=heads, value_rows=values, key_rows=keys, **ranks)
                assert found.tobytes() == wanted(call, shape, **ranks)


def test_rows_may_lie_apart_and_in_a_part_of_a_buffer(library: Library) -> None:
    shape = SHAPES[2]
    call = operands(shape, False, np.float32)
    apart = {}
    for name, x in call.items():
        wide = np.full((len(x), x.shape[1] + 3), np.nan, np.float32)
        wide[:, :-3] = x
        apart[name] = wide[:, :-3]
    whole = np.full((2 * 4 * 8, 5), -1, np.float32)
    sizes = {"heads": 4, "value_rows": 5, "key_rows": 3}
    library.op(PACK.name)(**apart, **sizes, out=whole[:, 2:4])
    assert np.ascontiguousarray(whole[:, 2:4]).tobytes() == wanted(call, shape, 0, 1)
    assert (whole[:, [0, 1, 4]] == -1).all()


def test_nothing_packs_to_nothing(pack: Pack) -> None:
    assert pack(first=B[:, :0], second=A[:, :0], **PAIR).shape == (8, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_embedding_gathers_the_same_rows_by_the_table(library: Library, fused: bool) -> None:
    """What a device may do, which has no kernel of the op."""
    call = operands(SHAPES[3], fused, ml_dtypes.bfloat16)
    rows = packed_rows((7, 7, 2, 2), 6, interleaved=fused)
    found = library.op("embedding")(np.concatenate(list(call.values())), rows)
    assert np.asarray(found).tobytes() == wanted(call, SHAPES[3], 0, 1)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"first": B}, "give in_proj_qkv and in_proj_z .* needs second present"),
    ({"second": A}, "give in_proj_qkv and in_proj_z .* needs first present"),
    ({"first": B, "second": A, "fused": BA}, "needs fused absent"),
    ({"fused": B}, "axis 0 of fused has extent 4, expected .* = 8"),
    ({"first": B, "second": A[:3]}, "axis 0 of second has extent 3, expected .* = 4"),
    ({"first": B, "second": A.astype(ml_dtypes.bfloat16)}, "make them the same type"),
    ({"first": B, "second": A[:, :1]}, "second has K=1 but first gave K=2"),
    ({"fused": BA.astype(np.int8)}, "fused is i8, expected one of bf16, f16, f32, f8e4m3"),
    ({"fused": np.asfortranarray(BA)}, "elements of a row of fused are 8 apart"),
    ({"fused": BA, "size": 3}, "ranks must divide the key heads"),
    ({"fused": BA, "size": 2, "rank": 2}, "rank must be below size"),
    ({"fused": BA, "rank": -1}, "rank is -1"),
    ({"fused": BA, "size": 0}, "size is 0"),
)


@pytest.mark.parametrize(("call", "why"), REFUSED)
def test_what_cannot_be_packed_is_refused(library: Library, call: dict[str, Any], why: str) -> None:
    with pytest.raises(ContractError, match=why):
        library.op(PACK.name)(**PAIR, **call)


def test_over_itself_it_is_refused(library: Library) -> None:
    """Rows move: the buffer of the checkpoint's tensor is not one to pack into."""
    fused = BA.copy()
    with pytest.raises(ContractError, match="overlap"):
        library.op(PACK.name)(fused=fused, **PAIR, out=fused)
    assert fused.tobytes() == BA.tobytes()


LAYER = Heads(2, 4, key_dim=3, value_dim=5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_runtimes_functions_may_use_the_op(library: Library, fused: bool, rank: int) -> None:
    projections: tuple[tuple[Callable[..., Packed], str, tuple[str, str], Any], ...] = (
        (pack_qkvz, "qkvz", ("qkv", "z"), (2, 10, 3, 4)), (pack_ba, "ba", ("b", "a"), (2, 2, 0, 4)),
    )  # fmt: skip
    for function, name, two, shape in projections:
        given = operands(shape, fused, np.float16).values()
        names = (name,) if fused else two
        tensors = {f"in_proj_{n}.weight": x for n, x in zip(names, given, strict=True)}
        before = sum(library.stats().get(PACK.name, {}).values())
        found = function(LAYER, tensors, rank=rank, size=2, library=library)
        assert sum(library.stats()[PACK.name].values()) == before + 1
        plain = function(LAYER, tensors, rank=rank, size=2)
        assert (found.weight.tobytes(), found.shards) == (plain.weight.tobytes(), plain.shards)
        assert found.weight.shape == plain.weight.shape


def test_scales_of_rows_are_packed_by_the_op_too(library: Library) -> None:
    scales = {"in_proj_ba.weight_scale": np.arange(8, dtype=np.float32)}
    packed = pack_ba(Heads(2, 4), scales, suffix=".weight_scale", library=library)
    assert packed.weight.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
