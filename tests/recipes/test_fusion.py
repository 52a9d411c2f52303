"""The fusion catalog: literals, and what must hold for every recipe, looped over the catalog."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.compiler.catalog import load_catalogs
from kiln.ir import signature
from kiln.ir.dtypes import DTYPES, DType
from kiln.ir.interpret import run
from kiln.ir.record import record
from kiln.ir.spec import ANY, DTypeVar, Op, Ship
from kiln.recipes import fusion
from kiln.runtime.expr import Env, parse_pred, why_not
from kiln.runtime.load import Library
from kiln.tests.recipes.conftest import ROW_OPS, Compiled, Engine
from kiln.tests.recipes.literals import literal
from kiln.tests.support.numbers import BF16 as bf16_type
from kiln.tests.support.numbers import Array, bf16, codes, f32, single

ROOT = Path(__file__).resolve().parents[2]
OPS = load_catalogs(("kiln.recipes",))
UP = bf16(0, 0.5, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 8, -8)
ONES = bf16(*[1.0] * 16)
ADD_NORM: dict[str, Any] = {
    "x": bf16(1, -2, 3, 0.5), "residual": bf16(0.25, 1, -1, 4), "weight": bf16(0, 0.5, -0.25, 1)[0],
    "eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "want"),
    [
        pytest.param("fused_add_rms_norm", "3ef7 bf14 3f14 405e", marks=literal("fusion/1.gemma")),
        pytest.param("fused_add_rms_norm_std", "0000 be46 be46 3fde", marks=literal("fusion/1.std")),
    ],
)
def test_add_then_norm(engine: Engine, op: str, want: str) -> None:
    out, residual = engine(op, ADD_NORM)
    assert residual is not None
    assert residual.astype(np.float32).tolist() == [[1.25, -1, 2, 4.5]]
    assert codes(out) == want


@literal("fusion/1.residual", "fusion/2.fp8")
def test_add_norm_then_fp8(engine: Engine) -> None:
    out, residual, *_ = engine("rms_norm_quant_fp8", {**ADD_NORM, "scale": 0.01})
    assert residual is not None
    assert residual.astype(np.float32).tolist() == [[1.25, -1, 2, 4.5]]
    assert codes(out) == "64 e6 66 7b"


@pytest.mark.parametrize(
    ("activation", "want"),
    [
        pytest.param("silu", "5f d4", marks=literal("fusion/3.silu")),
        pytest.param("sigmoid", "57 54", marks=literal("fusion/3.sigmoid")),
    ],
)
def test_gated_norm_then_fp8(engine: Engine, activation: str, want: str) -> None:
    arrays = {"x": bf16(3, 4), "weight": bf16(1, 2)[0], "gate": bf16(2, -1), "scale": 0.05, "eps": 1e-6}
    (out,) = engine("rms_norm_gated_quant_fp8", arrays, activation=activation)
    assert codes(out) == want


@pytest.mark.parametrize(
    ("activation", "want"),
    [
        pytest.param("silu", "3fbf bf1c", marks=literal("fusion/3.silu_intermediate")),
        pytest.param(
            "sigmoid", codes(bf16(0.74609375, 0.609375)), marks=literal("fusion/3.sigmoid_intermediate")
        ),
    ],
)
def test_the_intermediate_of_the_gated_norm(engine: Engine, activation: str, want: str) -> None:
    arrays = {"x": bf16(3, 4), "weight": bf16(1, 2)[0], "gate": bf16(2, -1), "eps": 1e-6}
    (out,) = engine("rms_norm_gated", arrays, dtypes={"O": DTYPES["bf16"]}, activation=activation)
    assert codes(out) == want


@pytest.mark.parametrize(
    ("gsi", "scale"),
    [
        pytest.param(1.0, "38", marks=literal("fusion/4.fp4")),
        pytest.param(8.0, "50", marks=literal("fusion/4.fp4_scaled")),
    ],
)
def test_silu_then_fp4(engine: Engine, gsi: float, scale: str) -> None:
    packed, scales = engine("silu_mul_fp4_quant", {"gate": ONES, "up": UP, "global_scale_inv": gsi})
    assert (codes(packed), codes(scales)) == ("10 91 b3 c4 d5 e6 e6 f7", scale)


@literal("fusion/4.largest")
def test_the_largest_intermediate_of_that_case(engine: Engine) -> None:
    (mid,) = engine("silu_mul", {"gate": ONES, "up": UP}, dtypes={"O": DTYPES["bf16"]})
    assert mid is not None
    assert float(np.abs(mid.astype(np.float32)).max()) == 5.84375


@literal("fusion/4.fp8")
def test_silu_then_fp8(engine: Engine) -> None:
    (out,) = engine("silu_mul_quant_fp8", {"gate": ONES, "up": UP, "scale": 0.02})
    assert codes(out) == "00 59 61 e1 69 e9 6e ee 71 f1 73 f3 76 f6 79 f9"


@literal("fusion/5.fp4")
def test_sigmoid_gate_then_fp4(engine: Engine) -> None:
    arrays = {"x": UP, "gate": f32(*[0.0] * 8, *[1.0] * 8), "global_scale_inv": 1.0}
    packed, scales = engine("sigmoid_gate_fp4_quant", arrays)
    assert (codes(packed), codes(scales)) == ("00 91 a2 b3 d5 e6 e6 f7", "38")


@pytest.mark.parametrize(
    ("gate", "up", "direct", "want"),
    [
        pytest.param(
            4.03125,
            -3.40625,
            "d5",
            "d6",
            marks=literal("fusion/6.direct", "fusion/6.rounded", "quant/3.first"),
        ),
        pytest.param(-3.0625, -1.9453125, "29", "28", marks=literal("quant/3.second")),
    ],
)
def test_the_rounding_between_the_ops_is_part_of_the_result(
    engine: Engine, gate: float, up: float, direct: str, want: str
) -> None:
    (out,) = engine("silu_mul_quant_fp8", {"gate": bf16(gate), "up": bf16(up), "scale": 1.0})
    assert codes(out) == want
    unrounded = np.array([[gate / (1 + np.exp(-gate)) * up]], np.float32)
    if want == "d6":
        assert unrounded[0, 0] == np.float32(-13.491935)
        assert unrounded.astype(bf16_type)[0, 0] == -13.5
    (skipped,) = engine("quant_fp8_static", {"x": unrounded, "scale": 1.0})
    assert codes(skipped) == direct


# -- every recipe of the catalog
# -------------------------------------------------------------------------------------

BODIES = {name: op for name, op in OPS.items() if op.is_recipe and op.body is not None}
RECIPES = {name: op for name, op in OPS.items() if op.is_recipe and op.family == fusion.FAMILY}
FUSABLE = {name: op for name, op in RECIPES.items() if op.body is not None}
CASES = [(name, n) for name, op in FUSABLE.items() for n in range(len(op.ship))]
SCALARS = {"scale": 0.37, "global_scale_inv": 3.0, "eps": 1e-5, "upper_bound": 100.0, "heads": 1}
SPECIAL = single([0.0, -0.0, np.inf, np.nan, 1e-40, 448.0, 3e38, -1e-5])


def test_the_catalog_is_counted() -> None:
    """Guards against a recipe that drops out unnoticed; a new one is added here."""
    assert sorted(RECIPES) == sorted(op.name for op in fusion.OPS)
    assert len(RECIPES) == 17
    from_the_sheet = {
        "fused_add_rms_norm", "fused_add_rms_norm_std", "rms_norm_quant_fp8", "rms_norm_gated_quant_fp8",
        "silu_mul_fp4_quant",
        "silu_mul_quant_fp8", "sigmoid_gate_fp4_quant", "attn_qk_norm_rope_gate", "attn_qk_norm_rope",
    }  # fmt: skip
    assert from_the_sheet <= RECIPES.keys()


def _legal(op: Op, attrs: Mapping[str, Any], width: int) -> bool:
    env = Env()
    env.dims, env.attrs = {op.rows: 3, op.width: width}, dict(attrs)
    return all(why_not(parse_pred(p), env) is None for p, _ in op.constraints)


def _array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    data = (rng.standard_normal(shape) * np.exp2(rng.integers(-4, 4, shape))).astype(np.float32)
    if len(shape) == 2 and shape[0] > 2:
        data[2, rng.integers(0, shape[1], 1 + shape[1] // 7)] = rng.choice(SPECIAL)
    with np.errstate(all="ignore"):
        return data.astype(dtype.numpy)


def _inputs(op: Op, ship: Ship, attrs: Mapping[str, Any], rows: int, width: int) -> dict[str, Any]:
    rng = np.random.default_rng([rows, width])
    made: dict[str, Any] = {s.name: SCALARS[s.name] for s in op.scalars}
    for t in op.inputs:
        if t.name not in ship.absent:
            kind = signature.row_kind(op, t, attrs)
            extent = int(width * (kind.shape.fraction or 1))
            shape = (rows, extent) if kind.per_row else (extent,)
            made[t.name] = _array(rng, shape, signature.resolve(op, t, ship.dtypes))
    return made


def _cases(name: str, number: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    op = RECIPES[name]
    ship = op.ship[number]
    attrs = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
    for rows, width in ((4, 1), (3, 16), (1, 127), (3, 128), (5, 129), (130, 64), (3, 512), (3, 2048)):
        if _legal(op, attrs, width):
            yield attrs, _inputs(op, ship, attrs, rows, width)


def _bits(results: tuple[Any, ...], names: list[str], absent: tuple[str, ...]) -> dict[str, str]:
    """Result bits by name; every NaN counts as one."""
    found = {}
    for name, r in zip(names, results, strict=True):
        if r is None or name in absent:
            continue
        array = np.array(r)
        if array.dtype != np.uint8:
            array[np.isnan(array.astype(np.float32))] = np.nan
        found[name] = codes(array)
    return found


def _optional_outputs(op: Op, absent: tuple[str, ...], arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Memory for outputs that are written only if they are asked for."""
    wanted = [t for t in op.outputs if t.role == "out" and t.optional and t.name not in absent]
    return {t.name: np.ones(arrays["x"].shape, signature.resolve(op, t, {}).numpy) for t in wanted}


@pytest.mark.parametrize(("name", "number"), [(k, n) for k, o in BODIES.items() for n in range(len(o.ship))])
def test_a_composite_runs_whatever_its_recipe_ships(name: str, number: int) -> None:
    """Each of its ops ships the types, attributes and absent operands that the composite calls it with."""
    op, ship = BODIES[name], BODIES[name].ship[number]
    attrs = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
    recorder, _ = record(op, ship.dtypes, attrs, ship.absent, inline=False)
    kinds = {n: d for n, (d, _) in recorder.types.items()}
    kinds |= {t.name: signature.resolve(op, t, ship.dtypes) for t in op.inputs if t.name not in ship.absent}
    for called in recorder.calls:
        own = {t.name: t.dtype.name for t in called.op.tensors if isinstance(t.dtype, DTypeVar)}
        names = {**called.operands, **called.results}
        types = {own[o]: kinds[v] for o, v in names.items() if v is not None and o in own}
        absent = {o for o, v in called.operands.items() if v is None}
        serving = [s for s in called.op.ship if _serves(called.op, s, types, called.attrs, absent)]
        assert any(ship.rare or not s.rare for s in serving), f"{called.op.name}: {types}"


def _serves(
    op: Op, ship: Ship, types: Mapping[str, DType], attrs: Mapping[str, Any], absent: set[str]
) -> bool:
    chosen = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
    return (
        set(ship.absent) == absent
        and chosen == dict(attrs)
        and all(ship.dtypes.get(k) is v for k, v in types.items())
    )


@pytest.mark.parametrize(("name", "number"), [c for c in CASES if "rope" not in c[0]])
def test_fused_is_composite_is_the_oracle(library: Library, name: str, number: int) -> None:
    op, absent = RECIPES[name], RECIPES[name].ship[number].absent
    linear = name.removesuffix("_swizzled")
    names = [t.name for t in op.outputs]
    count = 0
    for attrs, arrays in _cases(name, number):
        asked = {**arrays, **_optional_outputs(op, absent, arrays)}
        fused, composite = (Compiled(library, tier)(name, asked, **attrs) for tier in ("fused", "composite"))
        assert _bits(fused, names, absent) == _bits(composite, names, absent)
        if linear == name:
            oracle = run(op, arrays, attrs=attrs, dtypes=op.ship[number].dtypes)
            assert _bits(fused, names, absent) == _bits(oracle, names, absent)
        count += 1
    assert count >= 3


def test_swizzled_recipes_hold_the_scales_of_the_linear_ones(library: Library) -> None:
    for name in (n for n in FUSABLE if n.endswith("_swizzled")):
        for attrs, arrays in _cases(name, 0):
            swizzled = Compiled(library)(name, arrays, **attrs)
            linear = Compiled(library)(name.removesuffix("_swizzled"), arrays, **attrs)
            assert codes(swizzled[0]) == codes(linear[0])
            padded, plain = np.asarray(swizzled[1]).reshape(-1), np.asarray(linear[1]).reshape(-1)
            assert sorted(padded[padded != 0]) == sorted(plain[plain != 0])


def test_rows_of_zeros_give_bytes_of_zero(engine: Engine) -> None:
    for name, op in FUSABLE.items():
        if "rope" in name or "per_token" in name or "per_group" in name:
            continue
        attrs: dict[str, Any] = {a.name: op.ship[0].attrs.get(a.name, a.default) for a in op.attrs}
        arrays = _inputs(op, op.ship[0], attrs, 3, 64)
        arrays = {n: np.zeros_like(v) if hasattr(v, "shape") else v for n, v in arrays.items()}
        for tensor, result in zip(op.outputs, engine(name, arrays, **attrs), strict=True):
            if result is not None and tensor.name not in op.ship[0].absent:
                assert not np.asarray(result).view(np.uint8).any(), f"{name} {tensor.name}"


def test_twice_is_the_same(library: Library) -> None:
    for name, number in CASES:
        if "rope" in name:
            continue
        attrs, arrays = next(_cases(name, number))
        first, second = (Compiled(library)(name, arrays, **attrs) for _ in range(2))
        names = [t.name for t in RECIPES[name].outputs]
        assert _bits(first, names, ()) == _bits(second, names, ())


def test_no_backend_names_a_recipe() -> None:
    """A recipe is a declaration and its test: what compiles it knows none by name."""
    named = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in RECIPES))
    suffixes = (".py", ".h", ".j2", ".c")
    files = [
        p
        for f in ("backends", "compiler", "runtime", "ir")
        for p in (ROOT / f).rglob("*")
        if p.suffix in suffixes
    ]
    assert len(files) > 50
    assert [str(p.relative_to(ROOT)) for p in files if named.search(p.read_text("utf-8"))] == []


def test_every_fusable_recipe_has_a_fused_kernel_and_a_composite(library: Library) -> None:
    for name in FUSABLE:
        tiers = {v.tier for v in library.explain(name, **_call(name)).verdicts}
        assert {"fused", "composite"} <= tiers, name


def _call(name: str) -> dict[str, Any]:
    op = ROW_OPS[name]
    attrs = {a.name: op.ship[0].attrs.get(a.name, a.default) for a in op.attrs}
    if "rope" not in name:
        return {**_inputs(op, op.ship[0], attrs, 2, 128), **attrs}
    arrays = {t.name: np.ones((2, 128) if len(t.dims) == 2 else (128,), bf16_type) for t in op.inputs}
    return {**arrays, "positions": np.zeros(2, np.int64), "heads": 1, **attrs}


def test_widths_are_those_of_real_models() -> None:
    widths = {w for op in FUSABLE.values() for s in op.ship for w in s.widths if w != ANY}
    assert {2048, 4096, 5120} <= widths
