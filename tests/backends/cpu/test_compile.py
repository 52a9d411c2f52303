"""Jobs and what they build: manifest entries that hold, the same bytes from anywhere, and refusals that say
why."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kiln.backends.cpu.backend import CpuBackend, specializations
from kiln.backends.cpu.compile import run
from kiln.backends.cpu.toolchain import run_compiler, shared_object
from kiln.compiler.errors import BuildError
from kiln.compiler.target import TARGETS
from kiln.ir.dtypes import BF16, F32
from kiln.ir.spec import Attr, Op, Ship
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_kernel, read_artifact
from kiln.tests.backends.cpu.entries import CATALOGS, built, ops
from kiln.tests.support.cost import check_cost

NAMES = ("fused_add_rms_norm", "scaled_fp4_quant_swizzled", "top_k_pairs")
DIGESTS = """
import hashlib, sys
from kiln.backends.cpu.backend import CpuBackend
from kiln.backends.cpu.compile import run
from kiln.compiler.catalog import load_catalogs
ops = load_catalogs(["kiln.recipes"])
(job,) = CpuBackend().plan({"l2_norm": ops["l2_norm"]}, ["kiln.recipes"], "cpu-x86_64")
built = run(job)
data = [d for _, d in sorted({**built.files, **built.sources}.items())]
print(job.inputs_digest, *(hashlib.sha256(d).hexdigest() for d in data))
"""


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_legal_and_proved(name: str) -> None:
    made = built(name)
    artifacts = {file: read_artifact("cpu-x86_64", data) for file, data in made.files.items()}
    tiers = TARGETS["cpu-x86_64"].tiers
    assert len(made.kernels) % len(tiers) == 0
    for entry in made.kernels:
        assert prove_kernel(parse_kernel(entry), "cpu-x86_64", artifacts[entry["file"]]) == []
    assert list(made.sources) == [f"{name}.c"]
    assert len({(k["op"], k["variant"]) for k in made.kernels}) == len(made.kernels)


def test_extra_tiers_are_for_what_names_them() -> None:
    target = TARGETS["cpu-x86_64"]
    extra = {t.name for t in target.extra_tiers}
    made = built("matmul")
    of_extra = [k for k in made.kernels if k["isa"]["tier"] in extra]
    assert {k["mode"] for k in of_extra} == {"fast"}
    assert {k["isa"]["tier"] for k in of_extra} == extra
    exact = [k["isa"]["tier"] for k in made.kernels if k["mode"] == "exact"]
    assert set(exact) == {t.name for t in target.tiers}
    assert not any(t in file for file in built(NAMES[0]).files for t in extra)


def test_a_part_of_an_op_is_a_file_and_objects_of_its_own() -> None:
    made = built("matmul")
    assert list(made.sources) == ["matmul.c", "matmul.amx.c"]
    of_part = {k["entry"]: k["file"] for k in made.kernels if k["entry"] != "kiln_matmul"}
    assert of_part == {"kiln_matmul_amx": "matmul.amx.x86-64-v4-amx.so"}
    assert b"kiln_matmul_amx(" not in made.sources["matmul.c"]
    assert set(made.files) == {k["file"] for k in made.kernels}


def test_exact_products_promise_the_same_bits_and_fast_ones_an_envelope() -> None:
    kinds = {(k["mode"], k["numerics"]["contract"]["kind"]) for k in built("matmul").kernels}
    assert kinds == {("exact", "exact_on_target"), ("fast", "envelope")}


def test_a_wrong_size_is_not_proved() -> None:
    entry = built(NAMES[0]).kernels[0]
    artifact = read_artifact("cpu-x86_64", built(NAMES[0]).files[entry["file"]])
    wrong = parse_kernel({**entry, "resources": {"code_bytes": 1}})
    assert any("code_bytes" in fault for fault in prove_kernel(wrong, "cpu-x86_64", artifact))


def test_swizzled_scales_cover_padded_rows() -> None:
    assert built(NAMES[1]).kernels[0]["grid"] == [["roundup", ["dim", "M"], 128], 1, 1]
    assert built(NAMES[0]).kernels[0]["grid"] == [["dim", "M"], 1, 1]


def test_both_sides_of_an_operand_in_place() -> None:
    params = [
        (p["name"], p["operand"], p["access"])
        for p in built(NAMES[0]).kernels[0]["params"]
        if p["kind"] == "ptr"
    ]
    assert ("residual", "residual", "read") in params
    assert ("residual_out", "residual", "write") in params


def test_the_same_bytes_from_another_process_and_folder(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    answers = set()
    for seed, home in ((1, tmp_path), (77, root)):
        environment = {
            "PYTHONPATH": str(root / ".typing"),
            "PYTHONHASHSEED": str(seed),
            "HOME": str(home),
            "CFLAGS": "-O0",
            "CC": "false",
        }
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    assert len(answers) == 1


def test_sources_need_nothing_else() -> None:
    for name in NAMES:
        lines = built(name).sources[f"{name}.c"].decode().splitlines()
        assert {line for line in lines if line.startswith("#include")} == {"#include <stdint.h>"}


def test_a_source_that_is_wrong_is_told() -> None:
    tier = TARGETS["cpu-x86_64"].tiers[0]
    with pytest.raises(BuildError, match=r"op_x for .* does not compile: .*missing"):
        shared_object("int f(void) { return missing; }\n", TARGETS["cpu-x86_64"], tier, "op_x")
    with pytest.raises(BuildError, match="unused"):
        shared_object("static int f(void) { return 1; }\n", TARGETS["cpu-x86_64"], tier, "op_x")
    assert (
        shared_object("int f(void);\nint f(void) { return 1; }\n", TARGETS["cpu-x86_64"], tier, "op_x")[:4]
        == b"\x7fELF"
    )


def test_the_compiler_sees_a_private_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPATH", "/nowhere")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", "/nowhere")
    assert (
        run_compiler("int f(void);\nint f(void) { return 1; }\n", "x86_64-linux-gnu.2.17", "x86_64", "-c")[:4]
        == b"\x7fELF"
    )


def test_a_plan_is_cheap_and_imports_no_compiler() -> None:
    code = (
        "import sys\nfrom kiln.backends.cpu.backend import CpuBackend\n"
        "from kiln.compiler.catalog import load_catalogs\n"
        "jobs = CpuBackend().plan(load_catalogs(['kiln.recipes']), ['kiln.recipes'], 'cpu-x86_64')\n"
        "heavy = ('mlir', 'ziglang', 'triton', 'jinja2')\n"
        "print(len(jobs), sorted(m for m in sys.modules if m.split('.')[0] in heavy))"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / ".typing")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    count, _, modules = done.stdout.strip().partition(" ")
    assert int(count) >= 40
    assert modules == "[]"
    check_cost(lambda: CpuBackend().plan(ops(), CATALOGS, "cpu-aarch64"), 20)  # 1 where nothing else runs


def test_digests_follow_what_is_declared() -> None:
    op = ops()["l2_norm"]

    def digest(declared: Op, target: str = "cpu-x86_64") -> str:
        (job,) = CpuBackend().plan({op.name: declared}, CATALOGS, target)
        return job.inputs_digest

    assert digest(op) == digest(op)
    assert digest(op) == digest(replace(op, doc="another text"))
    assert digest(op) != digest(replace(op, ship=op.ship[:1]))
    assert digest(op) != digest(op, "cpu-aarch64")


def test_specializations_are_listed_once_whatever_their_widths() -> None:
    ships = (
        Ship({"T": BF16}, widths=(128,)), Ship({"T": BF16}, widths=(256,)), Ship({"T": BF16},
        {"gemma": False}), Ship({"T": F32}),
        Ship({"T": BF16}, {"gemma": True}),
    )  # fmt: skip
    op = replace(ops()["l2_norm"], attrs=(Attr("gemma", (False, True), False),), ship=ships)
    assert [(s["types"]["T"], s["attrs"]) for s in specializations(op)] == [
        ("bf16", {}),
        ("f32", {}),
        ("bf16", {"gemma": True}),
    ]


def test_an_op_without_realization_has_no_job() -> None:
    op = replace(ops()["l2_norm"], ship=())
    assert CpuBackend().plan({op.name: op}, CATALOGS, "cpu-x86_64") == []


def test_a_job_runs_from_plain_data() -> None:
    (job,) = CpuBackend().plan({"copy": ops()["copy"]}, CATALOGS, "cpu-x86_64")
    assert {k["variant"].split(".")[0] for k in run(job).kernels} == {job.variant}
