"""Someone else's catalog: kernels and ops built, verified, explained and run with no line of Kiln changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cpu.backend import CpuBackend
from kiln.backends.cuda.backend import CudaBackend
from kiln.compiler.catalog import load
from kiln.ir.interpret import run
from kiln.runtime.load import load as load_tree
from kiln.runtime.targets import cpu_target
from kiln.tests.backends.cuda.interpreter import interpret
from kiln.tests.support.documents import manifest_document
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
CATALOGS = ROOT / "tests" / "catalogs"
CPU = cpu_target()
CUDA = "sm_90a"
STORE = ".to(out.dtype.element_ty), mask=live)"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    sys.path.append(str(CATALOGS))
    yield
    sys.path.remove(str(CATALOGS))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, _on_the_path: None) -> Path:
    """The catalog built by the command line, for a GPU and this CPU."""
    out = tmp_path_factory.mktemp("own") / "tree"
    targets = [word for t in (CUDA, CPU) for word in ("--target", t)]
    assert main(["build", "--catalog", "my_kernels", *targets, "--out", str(out), "--jobs", "2"]) == 0
    return out


def _manifest(tree: Path, target: str) -> Any:
    return manifest_document(tree / target)


def test_it_is_built_and_verified(kiln_json: RunJson, tree: Path) -> None:
    assert kiln_json("verify", tree)[1]["ok"]
    kernels = {(k["op"], k["tier"]) for k in _manifest(tree, CUDA)["kernels"]}
    assert kernels == {
        ("leaky_relu", "primitive"), ("add_scaled", "primitive"), ("clipped", "generated"),
        ("silu", "generated"),
        ("clipped_silu", "fused"),
    }  # fmt: skip
    assert {k["op"] for k in _manifest(tree, CPU)["kernels"]} == {"clipped", "silu", "clipped_silu"}
    assert [p["op"] for p in _manifest(tree, CPU)["recipes"]] == ["clipped_silu"]


def test_the_launch_contract_is_the_kernels(tree: Path) -> None:
    kernels = {
        k["variant"]: k for k in _manifest(tree, CUDA)["kernels"] if k["op"] in ("leaky_relu", "add_scaled")
    }
    hidden = ["global_scratch", "profile_scratch"]
    assert [p["name"] for p in kernels["bf16_block256"]["params"]] == [
        "x", "out", "stride_xm", "stride_om", "n_cols", "slope", *hidden,
    ]  # fmt: skip
    names = ["x", "acc", "acc_out", "scale", "x_stride", "acc_stride", "acc_out_stride", "M", "N"]
    assert [p["name"] for p in kernels["bf16_no_bias"]["params"]] == [*names, *hidden]
    assert [p["name"] for p in kernels["bf16"]["params"]] == [*names[:2], "bias", *names[2:], *hidden]


def test_a_call_is_explained(kiln: Run, tree: Path) -> None:
    arguments = ("explain", "leaky_relu", "--target", CUDA, "--tree", tree, "T=bf16", "M=4")
    _, aligned, _ = kiln(*arguments, "N=256")
    assert "bf16_block256 (primitive): runs" in aligned
    _, ragged, _ = kiln(*arguments, "N=100")
    assert "bf16_block256 (primitive): needs stride(x) divisible by 16, found 100" in ragged
    assert "bf16_block256_unaligned (primitive): runs" in ragged


def test_a_second_build_changes_nothing(kiln_json: RunJson, tree: Path) -> None:
    code, found = kiln_json("build", "--catalog", "my_kernels", "--target", CUDA, "--out", tree)
    assert code == 0
    assert {k["state"] for k in found["kernels"]} == {"reused"}
    assert found["changed"] == []


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_kernel_runs_in_the_interpreter(dtype: Any) -> None:
    op = load(("my_kernels",)).ops["leaky_relu"]
    x = np.random.default_rng(0).standard_normal((3, 300)).astype(dtype)
    out = np.full((3, 300), np.nan, dtype)
    arguments = (x, out, 300, 300, 300, 0.25)
    _, got = interpret("my_kernels.kernels:leaky_relu_kernel", (3, 2), *arguments, BLOCK=256)
    assert op.reference is not None
    (want,) = op.reference(x=x, slope=0.25)
    assert got.tobytes() == want.tobytes()


def test_the_command_line_interprets_ones_own_kernels(kiln: Run, kiln_json: RunJson, tree: Path) -> None:
    arguments = ("test", "--interpret", "--catalog", "my_kernels", "--tree", tree, "--target", CUDA)
    code, found = kiln_json(*arguments, "--op", "leaky_relu", "--op", "add_scaled")
    assert code == 0
    assert {r["op"] for r in found["results"]} == {"leaky_relu", "add_scaled"}
    assert all(r["passed"] and r["cases"] > 3 for r in found["results"])


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (STORE, STORE.replace(", mask=live", ""), "bytes outside the outputs were written"),
        ("x * slope", "x * slope * 1.01", "differ, the worst at"),
        ("_leak(value, slope)", "tl.no_such(value)", "Triton's interpreter cannot run it"),
    ],
)
def test_a_wrong_kernel_is_told(
    kiln: Run, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, said: str
) -> None:
    own = CATALOGS / "my_kernels"
    text = (own / "kernels.py").read_text()
    assert right in text
    (tmp_path / "wrong_kernels").mkdir()
    (tmp_path / "wrong_kernels" / "kernels.py").write_text(text.replace(right, wrong))
    declared_ = (own / "__init__.py").read_text().replace("my_kernels.", "wrong_kernels.")
    (tmp_path / "wrong_kernels" / "__init__.py").write_text(declared_)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ("--catalog", "wrong_kernels", "--tree", tree, "--target", CUDA, "--op", "leaky_relu")
    code, out, _ = kiln("test", "--interpret", *arguments)
    assert code == 1
    assert said in out


def test_nothing_to_interpret_is_no_pass(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("test", "--interpret", "--tree", tree, "--op", "top_k_pairs")
    assert code == 1
    assert "failed, nothing ran" in out


@pytest.mark.parametrize("tier", ["fused", "composite"])
def test_the_recipe_runs_on_this_cpu(tree: Path, tier: str) -> None:
    op = load(("my_kernels",)).ops["clipped_silu"]
    x = (np.random.default_rng(1).standard_normal((5, 77)) * 8).astype(ml_dtypes.bfloat16)
    with load_tree(tree, "cpu") as library:
        got = library.op("clipped_silu")(x, 2.0, tier=tier)
    (want,) = run(op, {"x": x, "limit": 2.0})
    assert want is not None
    assert np.asarray(got).tobytes() == want.tobytes()


def test_both_catalogs_together(kiln_json: RunJson) -> None:
    _, found = kiln_json("list", "--catalog", "kiln.recipes", "--catalog", "my_kernels")
    names = {o["name"] for o in found["ops"]}
    assert {"rms_norm", "silu", "leaky_relu", "clipped_silu"} <= names
    both = load(("kiln.recipes", "my_kernels"))
    planned = {j.op for j in CudaBackend().plan(both.ops, both.names, CUDA)}
    assert {"rms_norm", "leaky_relu", "clipped_silu"} <= planned


def _digests(*catalogs: str) -> dict[tuple[str, str], str]:
    loaded = load(catalogs)
    backends = ((CudaBackend(), CUDA), (CpuBackend(), CPU))
    jobs = [j for backend, target in backends for j in backend.plan(loaded.ops, loaded.names, target)]
    return {(j.target, f"{j.op}.{j.variant}"): j.inputs_digest for j in jobs}


def test_another_catalog_beside_it_makes_nothing_stale() -> None:
    alone, own, both = (
        _digests("my_kernels"),
        _digests("kiln.recipes"),
        _digests("kiln.recipes", "my_kernels"),
    )
    assert both == own | alone


def test_a_recipe_depends_on_the_ops_it_calls_in_other_packages() -> None:
    names = {"/".join(p.parts[-2:]) for p in load(("my_kernels",)).sources("clipped_silu")}
    assert names == {"my_kernels/__init__.py", "recipes/activation.py"}
    own = {p.name for p in load(("kiln.recipes", "my_kernels")).sources("rms_norm")}
    assert own == {"activation.py", "norm.py"}


def test_planning_imports_no_compiler() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from kiln.compiler.catalog import load\nfrom kiln.backends.cuda.backend import CudaBackend\n"
        "own = load(('kiln.recipes', 'my_kernels')); CudaBackend().plan(own.ops, own.names, 'sm_90a')\n"
        "print([m for m in ('triton', 'mlir', 'ziglang') if m in sys.modules])"
    )
    env = {"PYTHONPATH": f"{ROOT / '.typing'}:{CATALOGS}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_nothing_of_ours_names_it() -> None:
    folders = ("ir", "recipes", "compiler", "backends", "runtime", "tools")
    files = [p for f in folders for p in (ROOT / f).rglob("*.py")]
    named = re.compile(r"leaky_relu|add_scaled|clipped_silu")
    assert [p for p in files if named.search(p.read_text("utf-8"))] == []


def _package(folder: Path, text: str) -> str:
    name = f"own_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(text)
    return name


OPS = """
from kiln.compiler.catalog import Catalog
from kiln.ir.dtypes import F32
from kiln.ir.spec import Op, Ship, Tensor

X, OUT = Tensor("x", F32, ("M", "N")), Tensor("out", F32, ("M", "N"), "out")
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OPS = ()", "has no function catalog()"),
        ("def catalog():\n    return 3", ".catalog() returned int; expected kiln.compiler.catalog.Catalog"),
        ("def catalog():\n    return 1 / 0", "fails with ZeroDivisionError at "),
        ("import no_such_thing", "cannot be imported: No module named 'no_such_thing'; install it, or put"),
        (OPS + "def catalog():\n    return Catalog((Op('silu', 'F', (X, OUT), body=lambda x: x),))",
         "op silu is declared twice"),
        (OPS + "def catalog():\n    return Catalog((Op('Mine', 'F', (X, OUT), body=lambda x: x),))",
         "its name must be snake_case"),
    ],
)  # fmt: skip
def test_a_catalog_that_is_none(
    kiln: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = _package(tmp_path, text)
    code, _, err = kiln("list", "--catalog", "kiln.recipes", "--catalog", name)
    assert code == 2
    assert message in err


def test_a_catalog_in_the_current_folder(kiln: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _package(
        tmp_path, OPS + "def catalog():\n    return Catalog((Op('mine', 'F', (X, OUT), body=lambda x: x),))"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert kiln("list", "--catalog", name)[0] == 2
    monkeypatch.chdir(tmp_path)
    assert kiln("list", "--catalog", name)[0] == 0
