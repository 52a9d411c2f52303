"""`kiln selftest`: exit codes, what it prints, and which ops it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.tests.runtime.trees import PARAMS, compile_c, cpu_manifest, kernel, write_tree
from kiln.tests.tools.conftest import Run, RunJson


@pytest.fixture
def ops(tmp_path: Path) -> Path:
    """The runtime tests' four ops, and a kernel of scale_negate that is wrong."""
    data = compile_c(tmp_path)
    document = cpu_manifest(data)
    wrong = kernel("scale_negate", "own", PARAMS["scale_add"], data, entry="kiln_scale_add", tier="fused")
    document["kernels"] = sorted([*document["kernels"], wrong], key=lambda k: (k["op"], k["variant"]))
    return write_tree(tmp_path / "ops", {"cpu-x86_64": document}, {"ops.so": data})


def test_ops_that_agree(kiln: Run, kiln_json: RunJson, ops: Path) -> None:
    code, out, err = kiln("selftest", "--tree", ops, "--op", "negate", "--op", "gather")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("passed: 2 of 2 on this CPU (cpu-x86_64)")
    code, document = kiln_json("selftest", "--tree", ops, "--op", "negate")
    assert (code, document["ok"], document["alone"]) == (0, True, ["negate.base"])
    (result,) = document["results"]
    assert (result["op"], result["variant"], result["calls"], result["faults"]) == ("negate", "base", 1, [])


def test_ops_that_do_not(kiln: Run, kiln_json: RunJson, ops: Path) -> None:
    code, out, _ = kiln("selftest", "--tree", ops)
    assert code == 1
    assert "scale_negate.own: out and that of composite: 15 of 15 elements differ" in out
    code, document = kiln_json("selftest", "--tree", ops)
    assert (code, document["ok"]) == (1, False)
    assert [r["variant"] for r in document["results"] if r["faults"]] == ["own"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--op", "negat"), "no op 'negat'; did you mean negate"),
        (("--device", "sm_90a"), "it holds cpu-x86_64"),
        (("--device", "tpu"), "expected cpu, cuda"),
    ],
)
def test_refusals(kiln: Run, ops: Path, words: tuple[str, ...], told: str) -> None:
    code, out, err = kiln("selftest", "--tree", ops, *words)
    assert (code, out) == (2, "")
    assert told in err
