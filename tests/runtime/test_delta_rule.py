"""What engines decide for gated-delta-rule layers: truth tables, and one layer's types and launches, dense
and MoE alike."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.runtime.delta_rule import (
    DecodeBatch,
    Eligibility,
    LayerTypes,
    in_model_type,
    layer_types,
    packed_decode_eligibility,
    replay_decode_eligibility,
)
from kiln.runtime.errors import ContractError, KilnError
from kiln.runtime.load import Library, load
from kiln.runtime.projections import Heads, pack_ba, pack_qkvz
from kiln.runtime.targets import cpu_target
from kiln.tests.recipes.literals import literal
from kiln.tests.support.committed import build_from

Array: TypeAlias = np.ndarray[Any, Any]

NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
FINE: dict[str, Any] = {"packed_ba": True, "mixed_qkv": "bf16", "model": "bf16"}
CASES: tuple[tuple[Eligibility, DecodeBatch, dict[str, Any]], ...] = (
    (Eligibility.OK, DecodeBatch(4), {}),
    (Eligibility.OK, DecodeBatch(1), {"model": "f32", "mixed_qkv": "f32"}),
    (Eligibility.ENV_OFF, DecodeBatch(4), {"enabled": False}),
    (Eligibility.NO_PACKED_BA, DecodeBatch(4), {"packed_ba": False}),
    (Eligibility.SPEC_DECODE_ACTIVE, DecodeBatch(4, speculative=True), {}),
    (Eligibility.PREFILL_IN_BATCH, DecodeBatch(4, prefills=1), {}),
    (Eligibility.NO_DECODE_ROWS, DecodeBatch(0), {}),
    (Eligibility.FP8_TOWER_EXCLUDED, DecodeBatch(4), {"fp8_tower": True}),
    (Eligibility.MIXED_QKV_DTYPE_F32, DecodeBatch(4), {"mixed_qkv": "f32"}),
    (Eligibility.ENV_OFF, DecodeBatch(0, 1, True), {"enabled": False, "packed_ba": False}),
    (Eligibility.SPEC_DECODE_ACTIVE, DecodeBatch(0, 1, True), {"mixed_qkv": "f32"}),
)
REPLAY: tuple[tuple[Eligibility, Eligibility, dict[str, Any]], ...] = (
    (Eligibility.OK, Eligibility.OK, {"enabled": True}),
    (Eligibility.ENV_OFF, Eligibility.OK, {}),
    (Eligibility.KV_CONNECTOR, Eligibility.OK, {"enabled": True, "kv_connector": True}),
    (Eligibility.ALL_MODE_CACHE, Eligibility.OK, {"enabled": True, "all_mode_cache": True}),
    (Eligibility.SPEC_DECODE_ACTIVE, Eligibility.SPEC_DECODE_ACTIVE, {"enabled": True}),
)


@literal("packed_ba/6.table")
def test_every_reason_is_given_and_the_first_one_counts() -> None:
    found = [packed_decode_eligibility(batch, **FINE | given) for _, batch, given in CASES]
    assert found == [wanted for wanted, *_ in CASES]
    ring = [replay_decode_eligibility(packed, **given) for _, packed, given in REPLAY]
    assert ring == [wanted for wanted, *_ in REPLAY]
    assert {*found, *ring} == set(Eligibility)


@literal("packed_ba/6.terms")
def test_no_term_is_of_a_models_shape() -> None:
    names = {
        *inspect.signature(packed_decode_eligibility).parameters,
        *inspect.signature(layer_types).parameters,
    }
    assert names == {"batch", "packed_ba", "mixed_qkv", "model", "enabled", "fp8_tower", "flag"}


FLAGS = {
    "unset": (None, True), "empty": ("", True), "1": ("1", True), "0": ("0", False), "false": ("false", True),
}  # fmt: skip
"""Name -> the flag as read, and whether the model's type is kept."""


@pytest.mark.parametrize(
    ("flag", "kept"),
    [pytest.param(*case, marks=literal(f"bf16_out/4.{name}")) for name, case in FLAGS.items()],
)
def test_the_flag_rolls_back_by_0_alone(flag: str | None, kept: bool) -> None:
    assert in_model_type(flag) == kept
    assert layer_types("f16", flag) == (
        LayerTypes("f16", "f16", "f16", "f16") if kept else LayerTypes("f32", "f32", "f32", "f16")
    )


@pytest.mark.parametrize(
    ("types", "why"),
    [
        (("f32", "bf16", "f32", "bf16"), "dcore and z must have the same dtype"),
        (("f32", "f32", "bf16", "bf16"), "norm weight dtype must match dcore"),
        (("bf16", "bf16", "bf16", "f32"), "output dtype must be the model dtype or f32"),
    ],
)
def test_types_that_do_not_go_together_are_refused(types: tuple[str, ...], why: str) -> None:
    with pytest.raises(ContractError, match=why):
        LayerTypes(*types)
    assert LayerTypes("f32", "f32", "f32", "bf16").y == "bf16"


@dataclass(frozen=True)
class Model:
    """What a loader reads; `experts` is 0 in a dense model."""

    heads: Heads
    experts: int
    interleaved: bool


HEADS = Heads(2, 4, key_dim=16, value_dim=8)
MODELS = (Model(HEADS, 0, False), Model(HEADS, 64, False), Model(HEADS, 512, True))
WIDTH, ROWS = 12, 3
DECODE, NORM = "gated_delta_rule_packed_decode", "rms_norm_gated"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    out: Path = tmp_path_factory.mktemp("layer") / "tree"
    build_from(out, [cpu_target()], [DECODE, NORM], [CpuBackend()])
    with load(out, "cpu") as made:
        yield made


def _interleaved(parts: list[Array]) -> Array:
    """Parts of all heads as one tensor, head by head."""
    by_head = [p.reshape(HEADS.keys, -1, WIDTH) for p in parts]
    return np.concatenate(by_head, axis=1).reshape(-1, WIDTH)


def _tensors(model: Model, dtype: Any) -> dict[str, Array]:
    rng = np.random.default_rng(8)
    keys, values = 2 * 16, 4 * 8
    q, k, v, z, b, a = (
        rng.standard_normal((n, WIDTH)).astype(dtype) for n in (keys, keys, values, values, 4, 4)
    )
    if model.interleaved:
        fused = {"qkvz": _interleaved([q, k, v, z]), "ba": _interleaved([b, a])}
        return {f"in_proj_{n}.weight": w for n, w in fused.items()}
    split = {"qkv": np.concatenate([q, k, v]), "z": z, "b": b, "a": a}
    return {f"in_proj_{n}.weight": w for n, w in split.items()}


def _layer(library: Library, model: Model, flag: str | None, swap: bool = False, copy: bool = False) -> Any:
    """(types seen, y) of one decode step of one layer."""
    types = layer_types("bf16", flag)
    held = NUMPY[types.dcore]
    tensors = _tensors(model, np.float32)
    x = np.random.default_rng(9).standard_normal((ROWS, WIDTH)).astype(np.float32)
    qkvz, ba = pack_qkvz(model.heads, tensors), pack_ba(model.heads, tensors)
    mixed, z = qkvz.views((x @ qkvz.weight.T).astype(held))
    b, a = ba.views((x @ ba.weight.T).astype(held))
    b, a = (a, b) if swap else (b, a)
    b, a = (b.copy(), a.copy()) if copy else (b, a)
    zeros = np.zeros(4, np.float32)
    dcore = np.full((ROWS, 32), np.nan, held)
    state = np.zeros((ROWS + 1, 4 * 8 * 16), np.float32)
    sizes = {"heads": 2, "scale": 0.25, "key_dim": 16, "value_dim": 8}
    slots = np.array([1, 0, 3], np.int32)
    library.op(DECODE)(mixed, a, b, zeros, zeros, state, slots, **sizes, out=(dcore, state))
    weight = np.ones(8, NUMPY[types.norm_weight])
    gate = z.reshape(ROWS * 4, 8)
    y = np.asarray(
        library.op(NORM)(dcore.reshape(-1, 8), gate, weight, out=np.empty((12, 8), NUMPY[types.y]))
    )
    seen = tuple(np.dtype(x.dtype).name for x in (dcore, z, weight, y))
    return seen, y


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        pytest.param(None, ("bfloat16",) * 4, marks=literal("bf16_out/3.default")),
        pytest.param("0", ("float32",) * 3 + ("bfloat16",), marks=literal("bf16_out/3.rollback")),
    ],
)
def test_dense_and_moe_models_have_the_same_types(library: Library, flag: Any, wanted: Any) -> None:
    cells = [_layer(library, model, flag) for model in MODELS]
    assert [seen for seen, _ in cells] == [wanted] * len(MODELS)
    assert len({y.tobytes() for _, y in cells}) == 1


@literal("bf16_out/5.padding", "packed_ba/7.views")
def test_rows_without_a_slot_end_as_zeros_and_views_are_as_good_as_copies(library: Library) -> None:
    _, y = _layer(library, MODELS[1], None)
    assert not y.reshape(ROWS, -1)[1].any()
    assert y.reshape(ROWS, -1)[[0, 2]].all()
    assert _layer(library, MODELS[1], None, copy=True)[1].tobytes() == y.tobytes()


BAD_NORMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"weight": np.ones(7, np.float32)}, "N=7 but x gave N=8"),
    ({"gate": np.ones((12, 16), np.float32)[:, ::2]}, "elements of a row of gate are 2 apart"),
    ({"gate": np.ones((11, 8), np.float32)}, "M=11 but x gave M=12"),
    ({"activation": "tanh"}, "activation"),
    ({"gate": np.ones((12, 8), ml_dtypes.bfloat16)}, "gate is bf16 but x is f32|no kernel|none of"),
)


@pytest.mark.parametrize(("changed", "why"), BAD_NORMS)
def test_a_gated_norm_that_does_not_fit_is_refused(
    library: Library, changed: dict[str, Any], why: str
) -> None:
    shapes = {"x": (12, 8), "gate": (12, 8), "weight": (8,)}
    given: dict[str, Any] = {n: np.ones(shape, np.float32) for n, shape in shapes.items()}
    with pytest.raises(KilnError, match=why):
        library.op(NORM)(**given | changed)
    library.op(NORM)(**given)


@literal("packed_ba/3.swap")
def test_b_and_a_are_not_interchangeable(library: Library) -> None:
    assert (
        _layer(library, MODELS[0], None, swap=True)[1].tobytes()
        != _layer(library, MODELS[0], None)[1].tobytes()
    )


@literal("packed_ba/8.counters")
def test_a_moe_model_launches_the_packed_step(library: Library) -> None:
    before = _launches(library)
    _layer(library, MODELS[2], None)
    assert _launches(library) == before + 1


def _launches(library: Library) -> int:
    return sum(library.stats().get(DECODE, {}).values())
