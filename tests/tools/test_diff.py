"""`kiln diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.tools.synthetic import Json, digest, kernel, manifest, measured, plan, write_tree


def pair(tmp_path: Path, before: Json, after: Json, *timings: float) -> tuple[Path, Path]:
    roots = []
    for i, m in enumerate((before, after)):
        artifacts = {}
        if timings:
            artifacts = {digest("add.generic.cubin"): {"measured": [measured("add", median_us=timings[i])]}}
        roots.append(write_tree(tmp_path / str(i), m, evidence={m["target"]: artifacts}))
    return roots[0], roots[1]


def same() -> Json:
    return manifest("sm_90a", [kernel("add"), kernel("sub")], [plan("div", "add")])


def changed(**changes: Any) -> Json:
    return manifest("sm_90a", [kernel("add", **changes), kernel("sub")], [plan("div", "add")])


def test_equal_trees(kiln: Run, tmp_path: Path) -> None:
    assert kiln("diff", *pair(tmp_path, same(), same(), 2.5, 2.5)) == (0, "no difference\n", "")


@pytest.mark.parametrize(
    ("after", "kind", "kernel_name", "field"),
    [
        (changed(priority=7), "contract", "add.generic", "priority"),
        (changed(grid=[["dim", "N"], 1, 1]), "contract", "add.generic", "grid"),
        (changed(sha256="0" * 64), "bytes", "add.generic", "sha256"),
        (
            changed(resources={**kernel("add")["resources"], "registers": 24}),
            "resources",
            "add.generic",
            "registers",
        ),
        (
            manifest("sm_90a", [kernel("add"), kernel("sub")], [plan("div", "sub")]),
            "contract",
            "div.composite",
            "steps",
        ),
        (manifest("sm_90a", [kernel("add"), kernel("sub")]), "removed", "div.composite", ""),
    ],
)
def test_one_difference(
    kiln_json: RunJson, tmp_path: Path, after: Json, kind: str, kernel_name: str, field: str
) -> None:
    code, document = kiln_json("diff", *pair(tmp_path, same(), after))
    assert code == 1
    (found,) = document["differences"]
    assert (found["target"], found["kind"], found["kernel"], found["field"]) == (
        "sm_90a",
        kind,
        kernel_name,
        field,
    )


def test_a_signature_that_differs(kiln_json: RunJson, tmp_path: Path) -> None:
    after = same()
    after["ops"]["add"]["operands"][2]["default"] = 3.0
    (found,) = kiln_json("diff", *pair(tmp_path, same(), after))[1]["differences"]
    assert (found["kind"], found["kernel"], found["field"]) == ("contract", "add", "operands")


@pytest.mark.parametrize(("after", "count"), [(2.52, 0), (3.0, 1)])
def test_speed(kiln_json: RunJson, tmp_path: Path, after: float, count: int) -> None:
    code, document = kiln_json("diff", *pair(tmp_path, same(), same(), 2.5, after))
    assert (code, len(document["differences"])) == (count, count)


def test_a_target_more(kiln: Run, tmp_path: Path) -> None:
    one = write_tree(tmp_path / "one", same())
    two = write_tree(tmp_path / "two", same(), manifest("sm_80", [kernel("add")]))
    code, out, _ = kiln("diff", one, two)
    assert code == 1
    assert "sm_80   -       added" in out
    assert kiln("diff", one, two, "--target", "sm_90a")[0] == 0
    code, _, err = kiln("diff", one, two, "--target", "sm_91")
    assert code == 2
    assert "no target 'sm_91'" in err


def test_selected_ops(kiln: Run, tmp_path: Path) -> None:
    trees = pair(tmp_path, same(), changed(priority=7))
    assert kiln("diff", *trees, "--op", "sub")[0] == 0
    assert kiln("diff", *trees, "--op", "a*")[0] == 1


def test_no_tree(kiln: Run, tmp_path: Path, tree: Path) -> None:
    assert kiln("diff", tree, tmp_path / "none")[0] == 2
