"""Drift: nothing is told of an agreeing tree, and every disagreement has its class."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler.compare import compare
from kiln.compiler.drift import Drift, check
from kiln.compiler.errors import BuildError, CheckError
from kiln.compiler.pipeline import Progress, build
from kiln.runtime.elf import read_elf
from kiln.runtime.manifest import canonical_json
from kiln.tests.compiler.fake_backend import CATALOG, FakeBackend
from kiln.tests.compiler.test_tree import snapshot
from kiln.tests.cubins import Compiled, compiled, shared_object
from kiln.tests.runtime.test_verify import seal
from kiln.tests.support.documents import manifest_document
from kiln.tests.trees import C_SOURCE, cuda_kernel

ALL = ("doubled", "scaled_sum", "spilling")


@pytest.fixture
def here() -> Any:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def tree(tmp_path: Path, here: Any) -> Path:
    build([CATALOG], None, tmp_path / "t", backends=[FakeBackend()], executor=here)
    return tmp_path / "t"


def told(drifts: list[Drift]) -> list[tuple[str, str, str]]:
    assert drifts == sorted(drifts)
    assert all(len(d.why) > 10 for d in drifts)
    return [(d.target, d.kernel, d.cls) for d in drifts]


def both(kernel: str, cls: str) -> list[tuple[str, str, str]]:
    return [(t, kernel, cls) for t in ("sm_80", "sm_90a")]


def test_an_agreeing_tree_has_no_drift_and_is_not_touched(tree: Path, here: Any) -> None:
    before = snapshot(tree)
    seen: list[Progress] = []
    assert check([CATALOG], tree, backends=[FakeBackend()]) == []
    assert (
        check([CATALOG], tree, rebuild=True, backends=[FakeBackend()], executor=here, progress=seen.append)
        == []
    )
    assert [(p.done, p.total, p.state) for p in seen] == [(n, 6, "built") for n in range(1, 7)]
    assert snapshot(tree) == before


def test_changed_inputs_are_stale(tree: Path) -> None:
    drifts = check([CATALOG], tree, backends=[FakeBackend(salt={"doubled": "new"})])
    assert told(drifts) == both("doubled.generic", "stale-inputs")


def test_changed_tools_are_told_for_the_target_and_its_kernels(tree: Path) -> None:
    drifts = check([CATALOG], tree, ["sm_80"], backends=[FakeBackend(tools={"triton": "3.10.0"})])
    names = ["MANIFEST.json", *(f"{op}.generic" for op in ALL)]
    assert told(drifts) == [("sm_80", name, "toolchain") for name in names]
    assert all("triton 3.9.0 -> 3.10.0" in d.why for d in drifts)


def test_missing_and_extra_kernels(tree: Path, here: Any) -> None:
    assert told(check([CATALOG], tree, backends=[FakeBackend(ops=("doubled", "scaled_sum"))])) == both(
        "spilling.generic", "extra"
    )
    build([CATALOG], None, tree, backends=[FakeBackend(ops=("scaled_sum",))], executor=here)
    drifts = told(check([CATALOG], tree, backends=[FakeBackend(ops=("scaled_sum", "spilling"))]))
    assert drifts == both("spilling.generic", "missing")


def use(variant: str, least: int = 0, tuned: str | None = None) -> dict[str, Any]:
    return {"variant": variant, "when": ["ge", ["dim", "M"], least], "priority": least, "tuned": tuned}


def test_where_a_kernel_is_used_is_made_and_compared_without_compiling(tmp_path: Path, here: Any) -> None:
    first = FakeBackend(("sm_80",), uses={"doubled": (use("generic"), use("generic.shapes", 7, "measured"))})
    report = build([CATALOG], None, tmp_path / "t", backends=[first], executor=here)
    assert [(k.variant, k.state) for k in report.kernels if k.op == "doubled"] == [
        ("generic", "built"), ("generic.shapes", "built"),
    ]  # fmt: skip
    kernels = manifest_document(tmp_path / "t/sm_80")["kernels"]
    mine = {k["variant"]: k for k in kernels if k["op"] == "doubled"}
    further = mine["generic.shapes"]
    assert (further["priority"], further["when"]) == (7, ["ge", ["dim", "M"], 7])
    assert further["specialization"]["tuned"] == "measured"
    assert "tuned" not in mine["generic"]["specialization"]
    assert len({(k["file"], k["sha256"], k["inputs_digest"]) for k in mine.values()}) == 1
    assert check([CATALOG], tmp_path / "t", backends=[first]) == []
    assert check([CATALOG], tmp_path / "t", rebuild=True, backends=[first], executor=here) == []
    moved = FakeBackend(("sm_80",), uses={"doubled": (use("generic", 1), use("generic.rows", 5, "model"))})
    drifts = check([CATALOG], tmp_path / "t", backends=[moved])
    assert told(drifts) == [
        ("sm_80", "doubled.generic", "contract"),
        ("sm_80", "doubled.generic.rows", "missing"),
        ("sm_80", "doubled.generic.shapes", "extra"),
    ]
    report = build([CATALOG], None, tmp_path / "t", backends=[moved], executor=here)
    assert [(k.variant, k.state) for k in report.kernels if k.op == "doubled"] == [
        ("generic", "reused"), ("generic.rows", "reused"),
    ]  # fmt: skip
    assert check([CATALOG], tmp_path / "t", backends=[moved]) == []


def test_what_a_choice_rests_on_is_compared_too(tmp_path: Path, here: Any) -> None:
    first = FakeBackend(("sm_80",), uses={"doubled": (use("generic", tuned="model"),)})
    build([CATALOG], None, tmp_path / "t", backends=[first], executor=here)
    other = FakeBackend(("sm_80",), uses={"doubled": (use("generic", tuned="measured"),)})
    found = told(check([CATALOG], tmp_path / "t", backends=[other]))
    assert found == [("sm_80", "doubled.generic", "contract")]


def test_samples_of_changed_kernels_are_told(tree: Path) -> None:
    stale = [("doubled.gone", "It is no candidate any more."), ("doubled.generic", "Measured of others.")]
    backend = FakeBackend(stale=stale)
    assert told(check([CATALOG], tree, ["sm_80"], backends=[backend])) == [
        ("sm_80", "doubled.generic", "stale-samples"),
        ("sm_80", "doubled.gone", "stale-samples"),
    ]
    # Of one kernel the first thing to repair is told.
    changed = FakeBackend(stale=stale, salt={"doubled": "new"})
    assert told(check([CATALOG], tree, ["sm_80"], backends=[changed])) == [
        ("sm_80", "doubled.generic", "stale-inputs"),
        ("sm_80", "doubled.gone", "stale-samples"),
    ]


def test_missing_and_extra_targets(tree: Path) -> None:
    assert told(check([CATALOG], tree, backends=[FakeBackend(targets=("sm_80", "sm_86"))])) == [
        ("sm_90a", "MANIFEST.json", "extra")
    ]
    drifts = check([CATALOG], tree, ["sm_86"], backends=[FakeBackend(targets=("sm_86",))])
    assert told(drifts) == [("sm_86", "MANIFEST.json", "missing")]


HARM: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "damaged": (lambda f: (f / "doubled.generic.cubin").write_bytes(b"x"), "doubled.generic", "code"),
    "gone": (lambda f: (f / "doubled.generic.cubin").unlink(), "doubled.generic", "missing"),
    "more": (lambda f: (f / "more.cubin").touch(), "more.cubin", "extra"),
    "manifest": (lambda f: (f / "MANIFEST.json").write_bytes(b"{}"), "MANIFEST.json", "code"),
    "no manifest": (lambda f: (f / "MANIFEST.json").unlink(), "MANIFEST.json", "missing"),
}


@pytest.mark.parametrize("name", HARM)
@pytest.mark.parametrize("rebuild", [False, True])
def test_harm_to_files_is_drift(tree: Path, here: Any, name: str, rebuild: bool) -> None:
    harm, kernel, cls = HARM[name]
    harm(tree / "sm_80")
    drifts = check([CATALOG], tree, rebuild=rebuild, backends=[FakeBackend()], executor=here)
    assert told(drifts) == [("sm_80", kernel, cls)]


def edit(tree: Path, change: Callable[[Any], Any]) -> None:
    path = tree / "sm_80" / "MANIFEST.json"
    document = manifest_document(path.parent)
    change(document)
    path.write_bytes(canonical_json(document))
    seal(tree)


EDITS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "signature": (lambda d: d["ops"]["doubled"].update(doc="other"), "doubled", "contract"),
    "plan": (lambda d: d["recipes"][0].update(priority=5), "doubled_sum.composite", "contract"),
    "no plan": (
        lambda d: (d["recipes"].clear(), d["ops"].pop("doubled_sum")),
        "doubled_sum.composite",
        "missing",
    ),
    "block": (lambda d: d["kernels"][0].update(block=[32, 1, 1]), "doubled.generic", "contract"),
    "registers": (lambda d: d["kernels"][0]["resources"].update(registers=1), "doubled.generic", "contract"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_manifests_are_drift_even_when_sealed_again(tree: Path, name: str) -> None:
    change, kernel, cls = EDITS[name]
    edit(tree, change)
    assert told(check([CATALOG], tree, backends=[FakeBackend()])) == [("sm_80", kernel, cls)]


def test_a_plan_that_is_no_longer_declared_is_extra(tree: Path) -> None:
    class NoRecipes(FakeBackend):
        def recipes(self, ops: Any, catalogs: Any) -> list[dict[str, Any]]:
            return []

    assert told(check([CATALOG], tree, backends=[NoRecipes()])) == both("doubled_sum.composite", "extra")


def test_a_selection_of_ops_looks_at_nothing_else(tree: Path, here: Any) -> None:
    changed = FakeBackend(salt=dict.fromkeys(ALL, "new"))
    (tree / "sm_80" / "doubled.generic.cubin").unlink()
    drifts = check([CATALOG], tree, ops=["spill*"], rebuild=True, backends=[changed], executor=here)
    assert told(drifts) == both("spilling.generic", "stale-inputs")


REBUILT = {
    "priority": ("contract", "priority: 0 -> 7"),
    "other": ("contract", "entry: 'scaled_sum' -> 'doubled'"),
}


@pytest.mark.parametrize("mode", REBUILT)
def test_what_comes_out_differently_is_classified(tree: Path, here: Any, mode: str) -> None:
    cls, words = REBUILT[mode]
    backend = FakeBackend(modes={"scaled_sum": mode})
    assert (
        check([CATALOG], tree, backends=[backend]) == []
    )  # the inputs' digests agree: only a rebuild shows it
    drifts = check([CATALOG], tree, rebuild=True, backends=[backend], executor=here)
    assert told(drifts) == both("scaled_sum.generic", cls)
    assert all(words in d.why for d in drifts)


def test_stale_inputs_with_the_same_result_stay_stale(tree: Path, here: Any) -> None:
    backend = FakeBackend(salt={"doubled": "new"})
    drifts = check([CATALOG], tree, rebuild=True, backends=[backend], executor=here)
    assert told(drifts) == both("doubled.generic", "stale-inputs")


def test_generated_sources_are_compared(tmp_path: Path, here: Any) -> None:
    backend = FakeBackend(targets=("cpu-x86_64",))
    build([CATALOG], None, tmp_path, backends=[backend], executor=here)
    assert check([CATALOG], tmp_path, rebuild=True, backends=[backend], executor=here) == []
    changed = FakeBackend(targets=("cpu-x86_64",), modes={"doubled": "code"})
    drifts = told(check([CATALOG], tmp_path, rebuild=True, backends=[changed], executor=here))
    assert ("cpu-x86_64", "doubled.c", "code") in drifts


def test_a_job_that_makes_fewer_kernels_is_drift(tree: Path, here: Any) -> None:
    def add(document: Any) -> None:
        twin = {**document["kernels"][0], "variant": "generic.twin"}
        document["kernels"].insert(1, twin)

    edit(tree, add)
    assert check([CATALOG], tree, backends=[FakeBackend()]) == []  # one job may make several kernels
    drifts = check([CATALOG], tree, rebuild=True, backends=[FakeBackend()], executor=here)
    assert told(drifts) == [("sm_80", "doubled.generic.twin", "extra")]


def test_a_sample_is_the_same_each_time(tree: Path, here: Any) -> None:
    chosen = []
    for targets in (("sm_80", "sm_90a"), ("sm_90a", "sm_80")):
        seen: list[Progress] = []
        backend = FakeBackend(targets=targets)
        check(
            [CATALOG], tree, rebuild=True, sample=2, backends=[backend], executor=here, progress=seen.append
        )
        chosen.append({f"{p.job.target}/{p.job.op}" for p in seen})
    assert len(chosen[0]) == 2
    assert chosen[0] == chosen[1]


def test_what_cannot_be_compiled_again_is_no_verdict(tree: Path, here: Any) -> None:
    backend = FakeBackend(modes={"doubled": "refuse"})
    with pytest.raises(CheckError, match=r"sm_80 doubled\.generic: the assembler does not like it"):
        check([CATALOG], tree, rebuild=True, backends=[backend], executor=here)


@pytest.mark.parametrize(
    "spoil", [lambda t: (t / "INDEX.json").unlink(), lambda t: (t / "INDEX.json").write_text("{")]
)
def test_without_a_tree_there_is_no_verdict(tree: Path, spoil: Callable[[Path], Any]) -> None:
    spoil(tree)
    for path in (tree, tree / "nowhere"):
        with pytest.raises(CheckError, match="no tree to compare"):
            check([CATALOG], path, backends=[FakeBackend()])


def test_unknown_targets_are_refused(tree: Path) -> None:
    with pytest.raises(BuildError, match="no target is named 'sm_81'"):
        check([CATALOG], tree, ["sm_81"], backends=[FakeBackend()])


LINES = """
import sys, triton, triton.language as tl
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cubin_kernels import KERNELS, ASTSource, GPUTarget
fn, types, constants, options = KERNELS[0]
for arch in (80, 90, 120):
    source = ASTSource(fn, {**types, "BLOCK": "constexpr"}, constants)
    made = triton.compile(source, GPUTarget("cuda", arch, 32), {**options, "enable_fp_fusion": False})
    Path(sys.argv[2], f"{arch}.cubin").write_bytes(made.asm["cubin"])
"""


def test_line_information_alone_is_debug_only() -> None:
    folder = str(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as out:
        env = dict(os.environ, TRITON_DISABLE_LINE_INFO="0", TRITON_CACHE_DIR=f"{out}/cache")
        subprocess.run([sys.executable, "-c", LINES, folder, out], env=env, check=True, timeout=120)
        for arch, target in ((80, "sm_80"), (90, "sm_90a"), (120, "sm_120a")):
            made = compiled()["scaled_sum", target]
            data = Path(out, f"{arch}.cubin").read_bytes()
            assert data != made.data
            new = cuda_kernel(Compiled(made.name, target, data, made.shared, made.threads))
            assert compare(target, cuda_kernel(made), new, made.data, data)[0] == "debug-only"


def altered(data: bytes, section: str) -> bytes:
    place = read_elf(data).find(section)
    assert place is not None
    at = place.offset + place.size // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("section", "cls"),
    [(".text.doubled", "code"), (".debug_frame", "debug-only"), (".nv.constant0.doubled", "code")],
)
def test_classes_of_changed_bytes(section: str, cls: str) -> None:
    made = compiled()["doubled", "sm_90a"]
    entry = cuda_kernel(made)
    assert compare("sm_90a", entry, entry, made.data, made.data) == ("identical", "")
    assert compare("sm_90a", entry, entry, made.data, altered(made.data, section))[0] == cls


def test_resources_and_tools_come_before_bytes() -> None:
    made = compiled()["doubled", "sm_90a"]
    old = cuda_kernel(made)
    fewer = {**old, "resources": {**old["resources"], "registers": 8}}
    changed = altered(made.data, ".text.doubled")
    assert compare("sm_90a", old, fewer, made.data, changed) == (
        "resources",
        f"registers {old['resources']['registers']} -> 8",
    )
    tools = {**fewer, "toolchain": {"ptxas": "13.4.59"}}
    assert compare("sm_90a", old, tools, made.data, changed) == (
        "toolchain",
        "built by ptxas absent -> 13.4.59; bytes: code",
    )


def test_shared_objects_differ_by_what_is_loaded() -> None:
    one = shared_object(C_SOURCE)
    entry: dict[str, Any] = {"toolchain": {}, "resources": {}}
    assert compare("cpu-x86_64", entry, entry, one, altered(one, ".comment"))[0] == "debug-only"
    assert compare("cpu-x86_64", entry, entry, one, altered(one, ".text"))[0] == "code"
