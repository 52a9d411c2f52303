"""`kiln list`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kiln.tests.test_layers import BLOCKER
from kiln.tests.tools.conftest import Run, RunJson

CATALOG = "kiln.tests.tools.catalog"
ROOT = Path(__file__).resolve().parents[2]


def test_declared_and_compiled(kiln_json: RunJson, tree: Path) -> None:
    code, document = kiln_json("list", "--tree", tree, "--catalog", CATALOG)
    assert code == 0
    ops = {o["name"]: o for o in document["ops"]}
    assert list(ops) == ["add", "add_softcap", "div", "mul", "softcap", "sub"]
    assert ops["add"]["targets"] == {"sm_80": ["generic"], "sm_90a": ["generic"]}
    assert (ops["add"]["declared"], ops["sub"]["declared"]) == (True, False)
    assert (ops["add"]["call"], ops["sub"]["call"]) == ("add(x, s=) -> y", "sub(x, s=) -> y")
    assert (ops["add_softcap"]["kind"], ops["add_softcap"]["targets"]) == ("recipe", {})
    assert ops["div"]["targets"] == {"sm_90a": ["composite"]}


def test_selection(kiln_json: RunJson, tree: Path) -> None:
    def names(*arguments: str) -> list[str]:
        return [
            o["name"] for o in kiln_json("list", "--tree", tree, "--catalog", CATALOG, *arguments)[1]["ops"]
        ]

    assert names("--op", "s*") == ["softcap", "sub"]
    assert names("--op", "s*", "--op", "mul", "--target", "sm_90a") == ["mul", "sub"]


def test_an_op_that_is_not_there(kiln: Run, tree: Path) -> None:
    code, out, err = kiln("list", "--tree", tree, "--catalog", CATALOG, "--op", "softcup")
    assert (code, out) == (2, "")
    assert "no op 'softcup'; did you mean softcap" in err


def test_text(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("list", "--tree", tree, "--catalog", CATALOG)
    assert code == 0
    assert out.splitlines()[1].split() == ["add", "op", "2", "2", "add(x,", "s=)", "->", "y"]
    assert out.endswith("\n5 ops, 1 recipe\n")


def test_a_broken_tree_is_not_listed(kiln: Run, tree: Path) -> None:
    with (tree / "sm_80" / "MANIFEST.json").open("a") as file:
        file.write(" ")
    code, out, err = kiln("list", "--tree", tree, "--catalog", CATALOG)
    assert (code, out) == (2, "")
    assert "MANIFEST.json" in err


def test_runtime_alone_is_enough(tree: Path) -> None:
    """list, targets and matrix work without Triton, MLIR and the other packages of the compiler."""
    script = BLOCKER.replace('parts[0] == "kiln" and len(parts) > 1 and parts[1] != "runtime"', "False")
    for name in ("list", "targets", "matrix"):
        code = (
            f"{script}\nfrom kiln.tools.cli import main\nsys.exit(main([{name!r}, '--tree', {str(tree)!r}]))"
        )
        env = {"PYTHONPATH": str(ROOT / ".typing")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, ""), name
