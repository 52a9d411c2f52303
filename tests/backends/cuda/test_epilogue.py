"""Epilogues in kernels of the matrix product: which kernels, and bits of the product and then the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda.backend import CudaBackend, hosted_pairs
from kiln.backends.cuda.epilogue import epilogue_source, extra_params
from kiln.backends.cuda.hosted import entry, params
from kiln.compiler.catalog import load
from kiln.ir.dtypes import BF16
from kiln.ir.interpret import run
from kiln.recipes.linear import LINEAR, LINEAR_EPILOGUE
from kiln.tests.backends.cuda.interpreter import interpret
from kiln.tools.interpreted import PLACE, interpret_first, origins, pool, shelf

Array: TypeAlias = np.ndarray[Any, Any]

OWN = ("kiln.recipes",)
LOADED = load(OWN)
PAIRS = {p.variant: p for p in hosted_pairs(LINEAR, LOADED, 90)}
SHIPS = [s for s in LINEAR.ship if not s.rare]
PRODUCT = "kiln.backends.cuda.kernels.gemm:matmul"


def test_which_kernels_host_which_epilogues() -> None:
    light, heavy = {"m16", "m64", "any"}, {"m16", "m64"}
    hosts: dict[str, set[str]] = {}
    for variant in PAIRS:
        name, _, schedule = variant.rpartition("_bf16_f32_")
        hosts.setdefault(name, set()).add(schedule)
    assert hosts == {
        "bf16_no_residual": light,
        "bf16_no_bias": light,
        "bf16_activationsilu_no_residual": heavy,
        "bf16_activationgelu_tanh_no_residual": heavy,
    }


def test_a_pair_has_the_recipes_types_and_the_hosts_limits() -> None:
    pair = PAIRS["bf16_no_bias_bf16_f32_m64"]
    when = entry(LINEAR, pair)["when"]
    assert ["absent", "bias"] in when
    assert ["present", "residual"] in when
    assert ["dtype", "out", "bf16"] in when
    assert ["dtype", "out", "f32"] not in when
    assert ["le", ["dim", "M"], 64] in when
    assert ["divisible", ["dim", "N"], 16] in when
    out = next(p for p in params(LINEAR, pair) if p["name"] == "out")
    assert (out["dtype"], out["align"], out["access"]) == ("bf16", 16, "write")


def test_what_an_epilogue_reads_follows_the_kernels_own_parameters() -> None:
    pair = PAIRS["bf16_no_bias_bf16_f32_m16"]
    made = epilogue_source(pair, LOADED.ops, frozenset())
    assert [p["name"] for p in extra_params(pair, made)] == ["residual", "residual_stride", "alpha"]
    assert [p.get("align", p.get("divisible_by")) for p in extra_params(pair, made)] == [16, 16, 1]
    assert "def epilogue(total, rows, cols, M, N, residual, residual_stride, alpha):" in made.source
    assert made.source.rstrip().splitlines()[-2].endswith(".to(tl.bfloat16)")


def test_every_target_plans_them_without_fusing_multiply_and_add() -> None:
    for target in CudaBackend().targets():
        jobs = [j for j in CudaBackend().plan({"linear": LINEAR}, OWN, target) if j.op == "linear"]
        assert {j.variant for j in jobs} == set(PAIRS)
    assert all(p.row.compile_options()["enable_fp_fusion"] is False for p in PAIRS.values())


@pytest.fixture(scope="module")
def worker() -> Iterator[Executor]:
    """A process whose Triton interprets."""
    with pool(1) as executor:
        yield executor


def call_fused(number: int, schedule: str, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> Array:
    """One call of a kernel with an epilogue; in a process whose Triton interprets."""
    op = replace(LINEAR, ship=(SHIPS[number],))
    made = [o for o in origins(op, OWN, ("sm_90a",)) if o.entry["variant"].endswith(schedule)]
    out = np.full((len(arrays["x"]), len(arrays["weight"])), 99, BF16.numpy)
    found = shelf(op, made).operation(PLACE, "linear")(**arrays, **attrs, out=out)
    return np.asarray(found)


def _arrays(number: int, m: int, n: int, k: int) -> dict[str, Any]:
    rng = np.random.default_rng([number, m])
    shapes = {"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, n)}
    made = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    return {name: array for name, array in made.items() if name not in SHIPS[number].absent}


def _product(x: Array, weight: Array, block: tuple[int, int, int]) -> Array:
    """The f32 sums of the same schedule."""
    (m, k), n = x.shape, len(weight)
    sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))
    grid = (-(-m // block[0]) * -(-n // block[1]),)
    constants = {"extra": None, "BT": True, "EPILOGUE": None, "GROUP": 8, **sizes}
    out = np.zeros((m, n), np.float32)
    return interpret(PRODUCT, grid, x, weight, out, m, n, k, k, k, n, **constants)[-1]


@pytest.mark.parametrize("schedule", ["m16", "m64"])
@pytest.mark.parametrize("number", range(len(SHIPS)))
def test_the_bits_are_those_of_the_product_and_then_the_rest(
    worker: Executor, number: int, schedule: str
) -> None:
    arrays = _arrays(number, 13, 80, 336)
    attrs = {"activation": SHIPS[number].attrs.get("activation", "none"), "alpha": 0.37}
    got = worker.submit(call_fused, number, schedule, arrays, attrs).result()
    block = {"m16": (16, 32, 128), "m64": (64, 64, 64)}[schedule]
    total = _product(arrays.pop("x"), arrays.pop("weight"), block)
    chosen = {"activation": attrs.pop("activation")}
    (want,) = run(LINEAR_EPILOGUE, {"total": total, **arrays, **attrs}, attrs=chosen, dtypes={"T": BF16})
    assert want is not None
    assert got.tobytes() == want.tobytes()
    rounded = {"total": total.astype(ml_dtypes.bfloat16).astype(np.float32), **arrays, **attrs}
    (early,) = run(LINEAR_EPILOGUE, rounded, attrs=chosen, dtypes={"T": BF16})
    assert early is not None
    assert got.tobytes() != early.tobytes()


def test_a_residual_may_be_the_output(worker: Executor) -> None:
    number = next(i for i, s in enumerate(SHIPS) if "bias" in s.absent)
    arrays = _arrays(number, 13, 80, 48)
    apart = worker.submit(call_fused, number, "m16", arrays, {}).result()
    assert worker.submit(call_in_place, number, arrays).result().tobytes() == apart.tobytes()


def call_in_place(number: int, arrays: dict[str, Any]) -> Array:
    """The residual's memory is written; in a process whose Triton interprets."""
    op = replace(LINEAR, ship=(SHIPS[number],))
    held = arrays["residual"].copy()
    operation = shelf(op, origins(op, OWN, ("sm_90a",))).operation(PLACE, "linear")
    return np.asarray(operation(**{**arrays, "residual": held}, out=held))


def test_the_contract_holds_for_calls_of_every_kind(worker: Executor) -> None:
    judged = worker.submit(interpret_first, "linear", OWN, ("sm_80", "sm_90a")).result()
    assert len(judged) == 3
    for j in judged:
        assert j.faults == ()
        assert j.cases >= 3
        assert {target for target, _, _ in j.artifacts} == {"sm_80", "sm_90a"}
