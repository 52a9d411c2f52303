"""Hopper's matrix product: its own Python functions over a model of Gluon, and what the assembler makes of
it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda import compile as worker
from kiln.backends.cuda.kernels import gemm_hopper, hopper_share, hopper_store
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.variants import gemm_hopper as table
from kiln.compiler.backend import Job
from kiln.compiler.target import TARGETS
from kiln.recipes.gemm import MATMUL_BT
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_launch
from kiln.tests.backends.cuda import gluon_model
from kiln.tests.backends.cuda.gluon_model import Int, Pointer, functions, launch

Array: TypeAlias = np.ndarray[Any, Any]

TARGET = "sm_90a"
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
PLAIN: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 128, "SHARED_BY": "M", "ctas": 1, "split": False}
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"BLOCK_M": 256, "ctas": 2},
    {"BLOCK_M": 512, "BLOCK_N": 64, "ctas": 4},
    {"BLOCK_N": 192},
    {"BLOCK_M": 256, "BLOCK_N": 192, "ctas": 2},
    {"SHARED_BY": "turns"},
    {"BLOCK_M": 256, "SHARED_BY": "turns", "ctas": 2},
    {"split": True},
    {"BLOCK_M": 64, "SHARED_BY": "N"},
    {"BLOCK_M": 64, "BLOCK_N": 256, "SHARED_BY": "N", "split": True},
)
"""Every way in which CTAs, warpgroups and programs share the output."""


def product(
    x: Array,
    weight: Array,
    how: Mapping[str, Any],
    *,
    programs: int = 3,
    order: Sequence[int] | None = None,
    kernels: Mapping[str, Any] | None = None,
    after: Sequence[Array | None] = (None, None, None),
) -> Array:
    """Run into a column slice of a poisoned buffer; `after` is x_scale, weight_scale and bias."""
    how = {**PLAIN, **how}
    (m, k), n = x.shape, weight.shape[0]
    block_k = 128 // x.dtype.itemsize
    tiles = -(-m // how["BLOCK_M"]) * -(-n // how["BLOCK_N"])
    programs = min(programs, tiles * -(-k // block_k) if how["split"] else tiles)
    buffer = np.full((m + 1, n + 16), 99, BF16)
    parts = np.full(2 * programs * how["BLOCK_M"] * how["BLOCK_N"], np.nan, np.float32)
    counters = np.zeros(4 * programs, np.int32)
    shared = {"parts": Pointer(parts), "counters": Pointer(counters)}
    x_scale, weight_scale, bias = (None if a is None else Pointer(a) for a in after)
    given = {
        "x": Pointer(x.reshape(-1)), "weight": Pointer(weight.reshape(-1)),
        "out": Pointer(buffer.reshape(-1), 8),
        "x_scale": x_scale, "weight_scale": weight_scale, "bias": bias,
        **(shared if how["split"] else dict.fromkeys(shared)),
        "M": Int(m), "N": Int(n), "K": Int(k), "x_stride": k, "weight_stride": k, "out_stride": n + 16,
        "x_scale_step": 0 if after[0] is None else min(after[0].size - 1, 1),
        "weight_scale_step": 0 if after[1] is None else min(after[1].size - 1, 1),
        "extra": None, "BLOCK_M": how["BLOCK_M"], "BLOCK_N": how["BLOCK_N"], "BLOCK_K": block_k, "STAGES": 3,
        "GROUP": 2, "SHARED_BY": how["SHARED_BY"], "BUFFERS": 2, "EPILOGUE": None,
    }  # fmt: skip
    kernels = kernels or functions(gemm_hopper, hopper_share, hopper_store)
    with np.errstate(invalid="ignore"):
        launch(kernels["matmul_bt"], order or range(programs), programs, how["ctas"], given)
    assert not counters.any()
    outside = np.ones(buffer.shape, bool)
    outside[:m, 8 : 8 + n] = False
    assert (buffer[outside] == 99).all()
    return buffer[:m, 8 : 8 + n].copy()


def operands(m: int, n: int, k: int, dtype: Any = BF16) -> tuple[Array, Array]:
    rng = np.random.default_rng(m + n + k)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)


def error(got: Array, want: Array) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def exact(x: Array, weight: Array) -> Array:
    return x.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (300, 520, 200), (130, 264, 520)])
def test_meets_the_contract(how: dict[str, Any], m: int, n: int, k: int) -> None:
    x, weight = operands(m, n, k)
    assert error(product(x, weight, how), exact(x, weight)) <= MATMUL_BT.contract.rel_l2


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_nan_stays_in_its_row(how: dict[str, Any]) -> None:
    x, weight = operands(140, 136, 72)
    clean = product(x, weight, how)
    x[129, 70] = np.nan
    got = product(x, weight, how)
    assert np.isnan(got[129].astype(np.float32)).all()
    rest = np.arange(140) != 129
    assert np.array_equal(got[rest], clean[rest])


def test_shared_blocks_have_the_same_bits_in_any_order() -> None:
    """Two programs, three and more to a block; whoever is last adds."""
    x, weight = operands(100, 264, 1032)
    for programs in (4, 7, 23):
        first = product(x, weight, {"split": True}, programs=programs)
        order = np.random.default_rng(programs).permutation(programs)
        again = product(x, weight, {"split": True}, programs=programs, order=[int(p) for p in order])
        assert np.array_equal(first.view(np.uint16), again.view(np.uint16))
        assert error(first, exact(x, weight)) <= MATMUL_BT.contract.rel_l2


@pytest.mark.parametrize("how", HOW[:8], ids=str)
def test_scales_and_bias(how: dict[str, Any]) -> None:
    x, weight = operands(300, 264, 272, E4M3)
    rng = np.random.default_rng(1)
    scales = rng.random(300).astype(np.float32), rng.random(264).astype(np.float32)
    bias = rng.standard_normal(264).astype(BF16)
    want = scales[0][:, None] * (scales[1] * exact(x, weight)) + bias.astype(np.float64)
    assert error(product(x, weight, how, after=(*scales, bias)), want) <= 2**-8
    one = scales[0][:1], scales[1][:1]
    want = one[0] * one[1] * exact(x, weight)
    assert error(product(x, weight, how, after=(*one, None)), want) <= 2**-8


@pytest.mark.parametrize("how", [{}, {"BLOCK_M": 256, "ctas": 2}], ids=str)
def test_a_ring_whose_phase_never_turns_is_noticed(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that nobody ends, or one that nobody has to: both are faults of the protocol."""
    monkeypatch.setattr(gluon_model, "PATIENCE", 0.5)
    kernels = functions(gemm_hopper, hopper_share, hopper_store)
    kernels["_next"] = lambda stage, phase, stages: (Int((stage + 1) % stages), phase)
    x, weight = operands(130, 136, 520)
    with pytest.raises(AssertionError, match=r"nobody ends|more arrivals"):
        product(x, weight, how, kernels=kernels)


def compiled(row: CudaPrimitive) -> tuple[dict[str, Any], worker.Compiled]:
    """The manifest entry and what the assembler said."""
    module, _, function = row.kernel.partition(":")
    entry = {
        "tier": "primitive", "mode": row.mode, "grid": list(row.grid), "when": row.when,
        "priority": row.priority, "scratch": [s.json() for s in row.scratch], "budget": worker.BUDGET,
    }  # fmt: skip
    source = worker.Source(
        module, function, "", tuple(row.json_params()), dict(row.constants), row.compile_options(), entry
    )
    made = worker.assemble(source, TARGETS[TARGET])
    job = Job(TARGET, row.op, row.variant, "0" * 64, "", {})
    return worker.manifest_entry(job, MATMUL_BT, source, made, "x.cubin"), made


SAMPLE = ("bf16_ws_m128_n256_s4_g16", "bf16_ws_m64_n128_s8_g16_split", "bf16_f32_ws_m128_n128_s6_g16")


@pytest.mark.parametrize("variant", SAMPLE)
def test_compiles_without_spills_and_launches(variant: str) -> None:
    (row,) = (r for r in table.CANDIDATES if r.variant == variant)
    entry, made = compiled(row)
    used = entry["resources"]
    assert (used["spill_stores"], used["spill_loads"], used["stack"]) == (0, 0, 0)
    assert made.shared <= table.SHARED
    assert entry["block"] == [384, 1, 1]
    assert entry["cluster"] == [row.options["num_ctas"], 1, 1]
    assert prove_launch(parse_kernel(entry), TARGET, made.cubin) == []
    ptx: str = made.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert ("multicast::cluster" in ptx) == (row.options["num_ctas"] != 1)
    assert _in_the_ring(ptx) == []


def _in_the_ring(ptx: str) -> list[str]:
    """Fences and exchanges between CTAs that the compiler put between the announcement of bytes and their
    copy."""
    lines = ptx.splitlines()
    starts = [i for i, line in enumerate(lines) if "arrive.expect_tx" in line]
    assert len(starts) == 1
    found = []
    for start in starts:
        for line in lines[start:]:
            if "fence.proxy" in line or "acquire.cluster" in line:
                found.append(line.strip())
            if line.strip().startswith("$L__"):
                break
    return found


def test_an_exchange_in_the_ring_is_found() -> None:
    ptx = "mbarrier.arrive.expect_tx a;\nfence.proxy.async.shared::cta;\n$L__1:\n"
    assert _in_the_ring(ptx) == ["fence.proxy.async.shared::cta;"]
