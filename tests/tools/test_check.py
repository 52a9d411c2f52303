"""`kiln check`: what it asks of the drift checker, and what it prints."""

from __future__ import annotations

from typing import Any

import pytest

from kiln.compiler.drift import Drift
from kiln.compiler.errors import CheckError
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tools import check

DRIFT = [
    Drift("sm_80", "MANIFEST.json", "toolchain", "Built by other tools."),
    Drift("sm_90a", "add.generic", "code", "Compiled again: the code differs."),
]


class Checker:
    """Stands where the drift checker is."""

    def __init__(self, result: list[Drift] | Exception) -> None:
        self.result = result
        self.asked: list[Any] = []

    def __call__(self, *given: Any, **options: Any) -> list[Drift]:
        self.asked = [*given, options["ops"], options["jobs"]]
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def install(monkeypatch: pytest.MonkeyPatch, result: list[Drift] | Exception) -> Checker:
    stand_in = Checker(result)
    monkeypatch.setattr(check, "check", stand_in)
    monkeypatch.setattr(check, "all_backends", lambda: ())
    return stand_in


def test_no_drift(kiln: Run, kiln_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [])
    assert kiln("check", "--tree", "t") == (0, "t: no drift\n", "")
    assert kiln_json("check") == (0, {"drift": []})


def test_drift(kiln: Run, kiln_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DRIFT)
    code, document = kiln_json("check")
    assert code == 1
    assert document["drift"][1] == {
        "target": "sm_90a",
        "kernel": "add.generic",
        "class": "code",
        "why": "Compiled again: the code differs.",
    }
    code, out, _ = kiln("check", "--tree", "t")
    assert code == 1
    assert out.splitlines()[1].split() == [
        "sm_80",
        "MANIFEST.json",
        "toolchain",
        "Built",
        "by",
        "other",
        "tools.",
    ]
    assert out.endswith("t: 2 drifts: 1 code, 1 toolchain\n")


def test_options_reach_the_checker(kiln: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, [])
    words = "--tree t --target sm_80 --op a* --rebuild --sample 5 --jobs 2 --catalog mine"
    assert kiln("check", *words.split())[0] == 0
    catalogs, root, *rest = stand_in.asked
    assert (catalogs, str(root), rest) == (("mine",), "t", [["sm_80"], True, 5, ["a*"], 2])


def test_could_not_check(kiln: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CheckError("there is no tree to compare"))
    code, out, err = kiln("check")
    assert (code, out, err) == (2, "", "kiln check: there is no tree to compare\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [("--sample 5", "add --rebuild"), ("--rebuild --sample 0", "expected a number from 1 up")],
)
def test_refusals(kiln: Run, words: str, told: str) -> None:
    code, _, err = kiln("check", *words.split())
    assert code == 2
    assert told in err
