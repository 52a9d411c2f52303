"""`kiln targets`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.compiler.target import TARGETS
from kiln.runtime.fastcall import Native
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tools import targets


def test_every_target_and_what_the_tree_has(kiln_json: RunJson, tree: Path) -> None:
    code, document = kiln_json("targets", "--tree", tree)
    assert code == 0
    found = {t["name"]: t for t in document["targets"]}
    assert list(found) == list(TARGETS)
    assert {key: found["sm_90a"][key] for key in ("kind", "ops", "kernels", "bytes")} == {
        "kind": "cuda",
        "ops": 4,
        "kernels": 3,
        "bytes": 51,
    }
    assert (found["sm_89"]["kernels"], found["sm_89"]["bytes"]) == (0, 0)
    assert found["cpu-x86_64"]["tiers"][0] == "x86-64"


def test_what_each_runs_on(kiln: Run, tree: Path) -> None:
    code, out, _ = kiln("targets", "--tree", tree)
    assert code == 0
    assert "compute capability 8.0 and later 8.x" in out
    assert "compute capability 9.0 only" in out
    assert "aarch64, Linux" in out


def test_without_a_tree_of_that_name(kiln: Run, tmp_path: Path) -> None:
    code, out, err = kiln("targets", "--tree", tmp_path)
    assert (code, out) == (2, "")
    assert "no artifact tree" in err


def test_who_answers_calls_here(
    kiln: Run, kiln_json: RunJson, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kiln_json("targets", "--tree", tree)[1]["calls"] == {"native": True, "why_not": None}
    assert "layouts that were met before are answered in C" in kiln("targets", "--tree", tree)[1]
    monkeypatch.setattr(targets, "native", lambda: Native(None, "there is no native-x.so"))
    assert kiln_json("targets", "--tree", tree)[1]["calls"] == {
        "native": False,
        "why_not": "there is no native-x.so",
    }
    assert "answered in Python, without the extension" in kiln("targets", "--tree", tree)[1]
