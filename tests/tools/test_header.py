"""kiln header, and kiln build --c-header."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kiln.tests.tools.conftest import Run, RunJson


def test_it_prints_the_header_of_a_tree(kiln: Run, tree: Path) -> None:
    code, out, err = kiln("header", tree)
    assert (code, err) == (0, "")
    digest = hashlib.sha256((tree / "INDEX.json").read_bytes()).hexdigest()
    assert f'#define KILN_OPS_TREE "sha256:{digest}"' in out
    assert "  KILN_OP_ADD = 0,\n  KILN_OP_DIV = 1,\n" in out
    assert out.endswith("#endif\n")


def test_it_writes_a_file_once(kiln: Run, kiln_json: RunJson, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "ops.h"
    code, told, _ = kiln("header", tree, "--out", out, "--prefix", "acme")
    assert (code, told) == (0, f"{out}: 4 ops, written\n")
    assert "acme_run_add(" in out.read_text()
    before = out.stat().st_mtime_ns
    code, document = kiln_json("header", tree, "--out", out, "--prefix", "acme")
    assert (code, document["changed"], document["ops"]) == (0, False, 4)
    assert out.stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir() if p != tree] == ["ops.h"]


@pytest.mark.parametrize("prefix", ["Kiln", "2x", "a-b", "int", ""])
def test_a_prefix_that_no_name_can_begin_with_is_refused(kiln: Run, tree: Path, prefix: str) -> None:
    code, out, err = kiln("header", tree, f"--prefix={prefix}")
    assert (code, out) == (2, "")
    assert "expected lower-case letters" in err


def test_a_folder_that_is_missing_leaves_nothing(kiln: Run, tree: Path, tmp_path: Path) -> None:
    code, _, err = kiln("header", tree, "--out", tmp_path / "none" / "ops.h")
    assert code == 2
    assert "No such file or directory" in err
    assert not (tmp_path / "none").exists()
