"""`kiln matrix`: the shape that scripts rely on, and its three renderings."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kiln.recipes.matrix import FAMILIES, LACKING
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.tools.synthetic import kernel, manifest, write_tree

CATALOG = "kiln.tests.tools.catalog"


def test_json_shape(kiln_json: RunJson, tree: Path) -> None:
    code, document = kiln_json("matrix", "--tree", tree, "--catalog", CATALOG)
    assert code == 0
    rows = {r["family"]: r for r in document["rows"]}
    assert list(rows)[:60] == list(FAMILIES)
    row = rows["KERNEL-EW-NORM-ACT"]
    assert row["ops"] == ["add", "div", "mul", "sub"]
    assert (row["state"], row["targets"]["sm_90a"], row["targets"]["sm_80"]) == (
        "INTERPRETED",
        "INTERPRETED",
        "DECLARED",
    )
    assert row["op_targets"]["sub"]["sm_90a"] == "RAN"
    assert (rows["KERNEL-SAMPLING"]["state"], rows["KERNEL-CONV3D"]["state"]) == ("DECLARED", "INVENTORIED")
    assert rows["MY-FUSIONS"]["ops"] == ["add_softcap"]
    assert len(row["targets"]) == 12


def test_text(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln(
        "matrix", "--tree", tree, "--catalog", CATALOG, "--target", "sm_80", "--target", "sm_90a"
    )
    assert code == 0
    assert re.search(r"^KERNEL-EW-NORM-ACT +INTERPRETED +D +I +4$", out, re.MULTILINE)
    assert re.search(r"^KERNEL-CONV3D +INVENTORIED +\. +\. +0$", out, re.MULTILINE)
    assert "61 families: 52 INVENTORIED, 6 DECLARED, 2 COMPILED, 1 INTERPRETED" in out


def test_markdown(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("matrix", "--md", "--tree", tree, "--catalog", CATALOG, "--target", "sm_90a")
    assert code == 0
    assert "| `KERNEL-EW-NORM-ACT` | INTERPRETED | interpreted | `add`, `div`, `mul`, `sub` |" in out
    assert "- `KERNEL-CONV3D`: General 3-D convolution\n" in out


def test_what_a_row_lacks_is_said_where_it_has_ops(
    tmp_path: Path, kiln: Run, kiln_json: RunJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LACKING, "KERNEL-EW-NORM-ACT", "casts & glue")
    monkeypatch.setitem(LACKING, "KERNEL-CONV3D", "everything")
    tree = write_tree(tmp_path / "t", manifest("sm_90a", [kernel("add")]))
    words = ("matrix", "--tree", tree, "--catalog", CATALOG)
    rows = {r["family"]: r["lacks"] for r in kiln_json(*words)[1]["rows"]}
    assert {f: said for f, said in rows.items() if said} == {"KERNEL-EW-NORM-ACT": "casts & glue"}
    assert kiln(*words)[1].endswith("\nKERNEL-EW-NORM-ACT lacks casts & glue\n")
    assert "\n\n`KERNEL-EW-NORM-ACT` lacks casts & glue.\n" in kiln(*words, "--md")[1]
    page = kiln(*words, "--html")[1]
    assert page.count("(lacks ") == page.count("(lacks casts &amp; glue)") == 1


class Cells(HTMLParser):
    """Counts rows and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("matrix", "--html", "--tree", tree, "--catalog", CATALOG)
    assert code == 0
    cells = Cells()
    cells.feed(out)
    assert (cells.rows, cells.open) == (1 + 61, [])
    assert 'title="add MEASURED, div INTERPRETED, mul INTERPRETED, sub RAN"' in out
    assert not re.search(r"(src|href)=", out)


def test_a_tree_that_is_not_there(kiln: Run, tmp_path: Path) -> None:
    code, out, err = kiln("matrix", "--tree", tmp_path, "--catalog", CATALOG)
    assert (code, out) == (2, "")
    assert "no artifact tree" in err


def test_an_unknown_column(kiln: Run, tree: Path) -> None:
    code, _, err = kiln("matrix", "--tree", tree, "--target", "sm_90")
    assert code == 2
    assert "no target 'sm_90'; did you mean sm_90a" in err
