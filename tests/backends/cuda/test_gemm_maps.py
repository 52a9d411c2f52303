"""Hopper's products with tensor maps that the host makes: their own Python functions over a model of Gluon,
to the bit those of the kernels that make their maps themselves; what the assembler makes of them; and that
they are candidates and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda import backend, compile_maps, tensor_map, tuned
from kiln.backends.cuda import compile as worker
from kiln.backends.cuda.backend import CudaBackend, own_candidates
from kiln.backends.cuda.kernels import (
    gemm_fp8_maps,
    gemm_fp8_ws,
    gemm_fp8_ws_sums,
    gemm_hopper,
    gemm_hopper_maps,
)
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.tensor_map import TensorMap
from kiln.backends.cuda.variants import gemm_fp8_maps as fp8_table
from kiln.backends.cuda.variants import gemm_hopper_maps as table
from kiln.compiler.backend import Job
from kiln.compiler.catalog import OWN, load
from kiln.compiler.errors import BuildError
from kiln.compiler.target import TARGETS
from kiln.compiler.tuning import Database
from kiln.recipes.gemm import MATMUL_BT
from kiln.runtime.expr import Env, parse_pred, why_not
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_launch
from kiln.runtime.tensor_map import why_not as why_not_map
from kiln.tests.backends.cuda.gluon_model import Descriptor, Int, Pointer, functions, launch
from kiln.tests.runtime.trees import kernel

Array: TypeAlias = np.ndarray[Any, Any]
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
TARGET = "sm_90a"
ROWS = (*table.CANDIDATES, *fp8_table.CANDIDATES)


# ---- numbers


def operands(m: int, n: int, k: int, kind: Any) -> tuple[Array, Array, Array]:
    """x and weight in rows that are wider than K, and an output of poison with a margin."""
    rng = np.random.default_rng(m + n + k)
    unit = 16 // np.dtype(kind).itemsize
    pitch, width = -(-k // unit) * unit + unit, -(-n // 8) * 8 + 8
    x, weight = (np.full((rows, pitch), np.nan).astype(kind) for rows in (m, n))
    x[:, :k], weight[:, :k] = (rng.standard_normal((rows, k)).astype(kind) for rows in (m, n))
    return x, weight, np.full((m + 1, width), 99, BF16)


def boxed(row: CudaPrimitive, name: str, memory: Array, shape: tuple[int, int]) -> Descriptor:
    """The map of an operand, as the table declares it."""
    (p,) = (p for p in row.params if isinstance(p, TensorMap) and p.name == name)
    return Descriptor(Pointer(memory.reshape(-1)), shape, memory.shape[1], (p.box[0], p.box[1]))


def both_ways(
    row: CudaPrimitive,
    made: Any,
    given: Callable[[], dict[str, Any]],
    m: int,
    n: int,
    k: int,
    kind: Any,
    programs: int,
) -> tuple[Array, Array, Array, Array]:
    """x, weight, and what the two kernels of an op give; nothing beside it is written."""
    name = row.kernel.partition(":")[2]
    constants = {name: value for name, value in row.constants.items() if name != "extra"}
    outs = []
    for maps in (True, False):
        x, weight, out = operands(m, n, k, kind)
        call = {**constants, **given(), "M": Int(m), "N": Int(n), "K": Int(k)}
        if maps:
            call |= {
                "x": boxed(row, "x", x, (m, k)), "weight": boxed(row, "weight", weight, (n, k)),
                "out": boxed(row, "out", out, (m, n)),
            }  # fmt: skip
        else:
            matrices = {"x": x, "weight": weight, "out": out}
            call |= {name: Pointer(a.reshape(-1)) for name, a in matrices.items()}
            call |= {f"{name}_stride": a.shape[1] for name, a in matrices.items()}
        with np.errstate(invalid="ignore"):
            launch(made[maps][name], programs, call)
        assert (out[-1] == 99).all()
        assert (out[:, n:] == 99).all()
        outs.append(out[:-1, :n])
    return x[:, :k], weight[:, :k], outs[0], outs[1]


CALLS = (((1, 8, 8), 2), ((200, 264, 520), 2), ((64, 136, 2100), 5))
"""M, N and K, and programs: of the last call several share a block."""


@pytest.mark.parametrize(("call", "programs"), CALLS, ids=str)
@pytest.mark.parametrize(
    "row", [r for r in table.CANDIDATES if r.variant.startswith("bf16_maps")], ids=lambda r: r.variant
)
def test_dense_products_are_the_others_to_the_bit(
    row: CudaPrimitive, call: tuple[int, int, int], programs: int
) -> None:
    made = {True: functions(gemm_hopper_maps, gemm_hopper), False: functions(gemm_hopper)}
    counters = np.zeros(programs * 2, np.int32)
    size = row.constants["BLOCK_M"] * row.constants["BLOCK_N"]

    def given() -> dict[str, Any]:
        parts = np.full(programs * size, np.nan, np.float32)
        return {"parts": Pointer(parts), "counters": Pointer(counters), "extra": ()}

    x, weight, mapped, plain = both_ways(row, made, given, *call, BF16, programs)
    assert not counters.any()
    assert mapped.tobytes() == plain.tobytes()
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.linalg.norm(mapped.astype(np.float64) - want) <= 2.0**-8 * np.linalg.norm(want)


@pytest.mark.parametrize("call", [(1, 8, 8), (130, 264, 520)], ids=str)
@pytest.mark.parametrize("row", fp8_table.CANDIDATES, ids=lambda r: f"{r.op}-{r.variant}")
def test_scaled_products_are_the_others_to_the_bit(row: CudaPrimitive, call: tuple[int, int, int]) -> None:
    made = {
        True: functions(gemm_fp8_maps, gemm_fp8_ws, gemm_fp8_ws_sums),
        False: functions(gemm_fp8_ws, gemm_fp8_ws_sums),
    }
    m, n, k = call
    block_m, block_n, split = (row.constants[c] for c in ("BLOCK_M", "BLOCK_N", "SPLIT"))
    tiles = -(-m // block_m) * -(-n // block_n)
    counters = np.zeros(2 * tiles, np.int32)
    rng = np.random.default_rng(k)
    blocks = row.constants["BLOCKS"]
    size = (-(-k // 128), -(-n // 128)) if blocks else (1, n)
    scales = {
        "x_scale": rng.random((m, size[0])).astype(np.float32),
        "weight_scale": rng.random((size[1], size[0])).astype(np.float32),
    }
    bias = rng.standard_normal(n).astype(BF16)

    def given() -> dict[str, Any]:
        parts = np.full(tiles * split * block_m * block_n, np.nan, np.float32)
        shared = split > 1
        found: dict[str, Any] = {
            "parts": Pointer(parts) if shared else None, "counters": Pointer(counters) if shared else None,
            "bias": Pointer(bias),
        }  # fmt: skip
        for name, scale in scales.items():
            found[name] = Pointer(scale.reshape(-1))
            found[f"{name}_stride"], found[f"{name}_colstride"] = (scale.shape[1], 1) if blocks else (1, 0)
        if row.constants.get("x_scale", 0) is None:
            found["x_scale"] = None
        return found

    _, _, mapped, plain = both_ways(row, made, given, m, n, k, E4M3, 3)
    assert not counters.any()
    assert mapped.tobytes() == plain.tobytes()
    assert mapped.any()
    assert np.isfinite(mapped.astype(np.float32)).all()


# ---- what the assembler makes


def compiled(row: CudaPrimitive) -> tuple[dict[str, Any], worker.Compiled]:
    """The manifest entry and what the assembler said."""
    module, _, function = row.kernel.partition(":")
    entry = {
        "tier": "primitive", "mode": row.mode, "grid": list(row.grid), "when": row.when,
        "priority": row.priority, "scratch": [s.json() for s in row.scratch], "budget": worker.BUDGET,
    }  # fmt: skip
    source = worker.Source(
        module, function, "", tuple(row.json_params()), row.constants, row.compile_options(), entry=entry
    )
    made = compile_maps.assemble(row, source, TARGETS[TARGET])
    job = Job(TARGET, row.op, row.variant, "0" * 64, "", {})
    source = replace(source, params=compile_maps.passed(row.params))
    return worker.manifest_entry(job, MATMUL_BT, source, made, "x.cubin"), made


SAMPLE = ("bf16_maps_m64_n64_s12_g16", "f16_f32_maps_m128_n64_s8_g16")


@pytest.mark.parametrize("variant", SAMPLE)
def test_compiles_without_a_map_of_its_own(variant: str) -> None:
    (row,) = (r for r in table.CANDIDATES if r.variant == variant)
    entry, made = compiled(row)
    used = entry["resources"]
    assert (used["spill_stores"], used["spill_loads"], used["stack"]) == (0, 0, 0)
    assert prove_launch(parse_kernel(entry), TARGET, made.cubin) == []
    # No memory for maps, nothing that makes or publishes one.
    assert [s["name"] for s in entry["scratch"]] == ["parts", "counters"]
    assert [p["kind"] for p in entry["params"] if p["name"] == "global_scratch"] == ["null"]
    ptx: str = made.asm["ptx"]
    assert "tensormap" not in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert sum(p["kind"] == "tensor_map" for p in entry["params"]) == 3


def test_scaled_products_compile_too() -> None:
    row = next(r for r in fp8_table.CANDIDATES if r.variant == "bf16_maps_m64_n128_s8")
    entry, made = compiled(row)
    assert (entry["resources"]["spill_stores"], entry["resources"]["stack"], entry["scratch"]) == (0, 0, [])
    assert prove_launch(parse_kernel(entry), TARGET, made.cubin) == []
    assert "tensormap" not in made.asm["ptx"]


def test_maps_that_were_compiled_for_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's box is what Triton's metadata says of it."""
    (row,) = (r for r in table.CANDIDATES if r.variant == SAMPLE[0])
    monkeypatch.setattr(TensorMap, "compiled", lambda self: {"block_size": list(self.box)})
    with pytest.raises(BuildError, match=r"takes the tensor maps .*, declared are"):
        compiled(row)


# ---- what they are for


def test_needs_imply_the_drivers_rules() -> None:
    """What a candidate's predicate admits, its maps can be made for."""
    rng, admitted = np.random.default_rng(3), 0
    for row in ROWS:
        sizes = {p.operand: p.dtype for p in row.params if isinstance(p, TensorMap)}
        params = [p for p in parse_kernel(manifest_of(row)).params if p.map is not None]
        assert [p.operand for p in params] == ["x", "weight", "out"]
        for _ in range(60):
            env = Env()
            env.dims = {name: int(rng.choice([1, 8, 24, 64, 100, 4096])) for name in ("M", "N", "K")}
            env.dims |= {"SM": 1, "SN": 1}
            env.dtypes = {**sizes, "x_scale": "f32", "weight_scale": "f32", "alpha": "f32"}
            env.pointers = dict.fromkeys(sizes, int(rng.choice([256, 264])))
            env.strides = {n: int(rng.choice([64, 4096, 100, 1 << 30])) for n in sizes}
            if why_not(parse_pred(row.when), env) is not None:
                continue
            admitted += 1
            for p in params:
                assert p.map is not None
                assert why_not_map(p, p.map, env) is None
                assert env.pointers[p.operand or ""] % 16 == 0
    assert admitted > 100


def manifest_of(row: CudaPrimitive) -> dict[str, Any]:
    """A KERNEL entry of a row that nobody compiled."""
    entry: dict[str, Any] = kernel(
        row.op, row.variant, list(compile_maps.passed(row.params)), b"none", isa=None
    )
    return entry


@pytest.mark.parametrize("target", [t.name for t in TARGETS.values() if t.kind == "cuda"])
def test_no_target_ships_one_that_nobody_measured(target: str) -> None:
    loaded = load((OWN,))
    ops = {name: loaded.ops[name] for name in sorted({row.op for row in ROWS})}
    assert tensor_map.RUNNER not in {job.runner for job in CudaBackend().plan(ops, (OWN,), target)}
    offered = {
        (op, j.variant): j.runner for op in ops for j in CudaBackend().candidate_jobs(op, (OWN,), target)
    }
    if target == TARGET:
        assert {key for key, runner in offered.items() if runner == tensor_map.RUNNER} == {
            (row.op, row.variant) for row in ROWS
        }
    else:
        assert tensor_map.RUNNER not in offered.values()


def test_a_measured_one_would_ship() -> None:
    """They are candidates as others are: with samples that are best, dispatch takes them."""
    own = own_candidates()["matmul_bt"]
    named = next(r for r in own.rows if r.variant == SAMPLE[0])
    only = replace(own, rows=(named,), defaults=(named.variant,), general=frozenset({named.variant}))
    known = Database("matmul_bt", TARGET)
    (shipped,) = tuned.shipped(only, load((OWN,)).ops["matmul_bt"], known)
    assert shipped.row is named


def test_what_writes_their_manifest_is_an_input_of_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> dict[str, str]:
        made = CudaBackend().candidate_jobs("matmul_bt", (OWN,), TARGET)
        return {job.variant: job.inputs_digest for job in made}

    before = digests()
    monkeypatch.setattr(tensor_map, "FILES", ("tensor_map.py",))
    after = digests()
    backend._own_files.cache_clear()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {row.variant for row in table.CANDIDATES}
