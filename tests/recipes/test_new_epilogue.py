"""Adding what follows a matrix product: this file is all there is of it. Kernels of the product inline it, a
CPU runs it after the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.backends.cuda.backend import CudaBackend
from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import BF16, F32
from kiln.ir.interpret import run
from kiln.ir.language import Value, call, tanh
from kiln.ir.spec import Op, Scalar, Ship, Tensor
from kiln.recipes.gemm import ENVELOPE, MATMUL_BT, WEIGHT, X, matmul_bt_in_order
from kiln.runtime.load import load
from kiln.runtime.targets import cpu_target
from kiln.runtime.verify import verify_tree
from kiln.tests.support.committed import build_from
from kiln.tests.support.documents import manifest_document
from kiln.tests.support.numbers import BF16 as bf16_type
from kiln.tools.interpreted import Judged, interpret_op, pool

OWN = "kiln.recipes"
CPU = cpu_target()
X_SCALE = Tensor("x_scale", F32, ("M",), layout="dense")
WEIGHT_SCALE = Tensor("weight_scale", F32, ("N",))
CAP = Scalar("cap", F32, 30.0, minimum=0.0, positive=True)
OUT = Tensor("out", BF16, ("M", "N"), "out")


def _capped(total: Value, x_scale: Value, weight_scale: Value, cap: Value) -> Value:
    return cap * tanh(total * (x_scale * weight_scale) / cap)


CAPPED = Op(
    "scaled_cap",
    "MY-LAYERS",
    (Tensor("total", F32, ("M", "N")), X_SCALE, WEIGHT_SCALE, CAP, OUT),
    body=_capped,
    ship=(Ship(unaligned=True),),
    doc="soft cap of sums with a scale a row and a scale a column",
)


def _layer(x: Value, weight: Value, x_scale: Value, weight_scale: Value, cap: Value) -> Value:
    total = call(MATMUL_BT, x, weight, dtypes={"U": F32})[0]
    return call(CAPPED, total, x_scale, weight_scale, cap=cap)[0]


LAYER = Op(
    "scaled_cap_linear",
    "MY-LAYERS",
    (X, WEIGHT, X_SCALE, WEIGHT_SCALE, CAP, OUT),
    contract=ENVELOPE,
    body=_layer,
    is_recipe=True,
    ship=(Ship({"T": BF16, "W": BF16}),),
    doc="a scaled product, soft capped",
)


def catalog() -> Catalog:
    """The layer and its epilogue; the product and its kernels are Kiln's."""
    return Catalog((CAPPED, LAYER))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer's tree; the ops of its composite come along."""
    out = tmp_path_factory.mktemp("layer") / "tree"
    backends = (CudaBackend(), CpuBackend())
    build_from(out, ["sm_90a", CPU], [LAYER.name], backends, (OWN, __name__))
    return out


def _manifest(tree: Path, target: str) -> Any:
    return manifest_document(tree / target)


def _arrays(m: int, n: int, k: int) -> dict[str, Any]:
    rng = np.random.default_rng(m + n + k)
    return {
        "x": rng.standard_normal((m, k)).astype(bf16_type),
        "weight": rng.standard_normal((n, k)).astype(bf16_type),
        "x_scale": rng.random(m, np.float32),
        "weight_scale": rng.random(n, np.float32),
    }


def test_the_tree_is_sound(tree: Path) -> None:
    assert verify_tree(tree) == []


@pytest.mark.parametrize("target", ["sm_90a", CPU])
def test_both_targets_run_the_product_and_then_the_rest(tree: Path, target: str) -> None:
    (plan,) = _manifest(tree, target)["recipes"]
    assert [s["op"] for s in plan["steps"]] == ["matmul_bt", "scaled_cap"]
    assert [t["dtype"] for t in plan["temps"]] == ["f32"]


def test_kernels_of_the_product_inline_it(tree: Path) -> None:
    found = [k for k in _manifest(tree, "sm_90a")["kernels"] if k["op"] == LAYER.name]
    assert {k["variant"] for k in found} == {"bf16_bf16_f32_m16", "bf16_bf16_f32_m64"}
    assert {k["tier"] for k in found} == {"fused"}
    named = [p["name"] for p in found[0]["params"]]
    assert named[9:-2] == ["x_scale", "weight_scale", "x_scale_stride", "cap"]
    assert [k for k in _manifest(tree, CPU)["kernels"] if k["op"] == LAYER.name] == []


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 33, 70), (17, 48, 0)])
def test_a_cpu_gives_the_bits_of_sums_in_order_and_the_rest(tree: Path, m: int, n: int, k: int) -> None:
    arrays = _arrays(m, n, k)
    with load(tree, "cpu") as library:
        got = library.op(LAYER.name)(**arrays, cap=2.5, out=np.full((m, n), 9, bf16_type))
    total = matmul_bt_in_order(arrays.pop("x"), arrays.pop("weight"), np.float32)
    (want,) = run(CAPPED, {"total": total, "cap": 2.5, **arrays})
    assert want is not None
    assert got.tobytes() == want.tobytes()


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    """Every kernel with the epilogue in it, in Triton's interpreter."""
    with pool(1) as executor:
        return executor.submit(interpret_op, LAYER.name, (OWN, __name__), ("sm_90a",)).result()


def test_the_kernels_meet_the_contract(judged: list[Judged]) -> None:
    assert {j.variant for j in judged} == {"bf16_bf16_f32_m16", "bf16_bf16_f32_m64"}
    for j in judged:
        assert j.faults == ()
        assert j.cases >= 3
