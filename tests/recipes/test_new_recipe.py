"""Adding a recipe: this file is all there is of it. It is built for a CPU and a GPU, verified and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.backends.cuda.backend import CudaBackend
from kiln.compiler.backend import Job
from kiln.compiler.catalog import Catalog
from kiln.compiler.pipeline import build
from kiln.ir.dtypes import BF16, F32, U8
from kiln.ir.interpret import run
from kiln.ir.language import Value, call
from kiln.ir.spec import Op, Ship, Tensor
from kiln.recipes import activation, quant
from kiln.recipes.activation import T
from kiln.runtime.errors import ContractError, SelectionError
from kiln.runtime.load import load
from kiln.runtime.targets import cpu_target
from kiln.runtime.verify import verify_tree
from kiln.tests.support.documents import manifest_document
from kiln.tests.support.numbers import BF16 as bf16_type
from kiln.tests.support.numbers import codes


def _mul_quant(a: Value, b: Value, upper_bound: Value) -> tuple[Value, Value]:
    codes_, scales = call(quant.QUANT_FP8_TOKEN, call(activation.MUL, a, b)[0], upper_bound=upper_bound)
    return codes_, scales


MUL_QUANT = Op(
    "mul_quant_fp8_per_token",
    "MY-FUSIONS",
    (
        Tensor("a", T, ("M", "N")), Tensor("b", T, ("M", "N")), quant.UPPER_BOUND,
        Tensor("out", U8, ("M", "N"), "out"), Tensor("scales", F32, ("M",), "out", "dense"),
    ),
    body=_mul_quant,
    ship=(Ship({"T": BF16}, widths=(256,)),),
    is_recipe=True,
    doc="fp8 per token of the bf16 product",
)  # fmt: skip


def catalog() -> Catalog:
    """The recipe, and the ops that its composite runs."""
    return Catalog((MUL_QUANT, activation.MUL, quant.QUANT_FP8_TOKEN))


CPU = cpu_target()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's tree; its composite's ops come along."""
    out = tmp_path_factory.mktemp("new") / "tree"
    backends = (CudaBackend(), CpuBackend())
    build([__name__], ["sm_90a", CPU], out, backends=backends, ops=[MUL_QUANT.name], jobs=2)
    return out


def _manifest(tree: Path, target: str) -> Any:
    return manifest_document(tree / target)


def test_the_tree_is_sound(tree: Path) -> None:
    assert verify_tree(tree) == []


@pytest.mark.parametrize("target", ["sm_90a", CPU])
def test_both_targets_have_a_fused_kernel_and_a_composite(tree: Path, target: str) -> None:
    manifest = _manifest(tree, target)
    assert {k["tier"] for k in manifest["kernels"] if k["op"] == MUL_QUANT.name} == {"fused"}
    assert [[s["op"] for s in p["steps"]] for p in manifest["recipes"]] == [["mul", "quant_fp8_per_token"]]


@pytest.mark.parametrize("tier", ["fused", "composite"])
@pytest.mark.parametrize("width", [1, 33, 256, 1000])
def test_it_runs_and_gives_the_oracles_bits(tree: Path, tier: str, width: int) -> None:
    rng = np.random.default_rng(width)
    arrays: dict[str, Any] = {n: rng.standard_normal((5, width)).astype(bf16_type) for n in ("a", "b")}
    with load(tree, "cpu") as library:
        got = library.op(MUL_QUANT.name)(**arrays, tier=tier)
    want = run(MUL_QUANT, arrays)
    assert [codes(np.asarray(r)) for r in got] == [codes(r) for r in want]


class Poorer(CpuBackend):
    """A backend without realizations of one op, and without fused kernels."""

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        """The jobs that are left."""
        return [j for j in super().plan(ops, catalogs, target) if j.op == "quant_fp8_per_token"]


def test_a_composite_that_lacks_an_op_is_told_with_op_and_target(tmp_path: Path) -> None:
    report = build([__name__], [CPU], tmp_path, backends=[Poorer()], jobs=1)
    assert report.unserved == (
        f"mul_quant_fp8_per_token.composite.bf16 can't run on {CPU}: mul has no realization there",
    )
    with (
        load(tmp_path, "cpu") as library,
        pytest.raises(ContractError, match="no op 'mul_quant_fp8_per_token'"),
    ):
        library.op(MUL_QUANT.name)


def test_a_composite_whose_op_is_disabled_names_op_and_device(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_DISABLE", "mul")
    x = np.ones((2, 16), bf16_type)
    with (
        load(tree, "cpu") as library,
        pytest.raises(SelectionError, match=r"mul: none of .* may run .* on this CPU"),
    ):
        library.op(MUL_QUANT.name)(x, x, tier="composite")


def test_every_op_is_served_where_nothing_is_missing(tmp_path: Path) -> None:
    report = build([__name__], [CPU], tmp_path, backends=[CpuBackend()], ops=["mul"], jobs=1)
    assert report.unserved == ()
