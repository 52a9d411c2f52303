"""`kiln explain`: the runtime's choice for a call made of words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.tests.tools.conftest import Run, RunJson
from kiln.tests.tools.synthetic import kernel, manifest, plan, write_tree

CALL = ("M=16", "N=64")


@pytest.fixture
def variants(tmp_path: Path) -> Path:
    """An op with a kernel for multiples of 64, a generic one, and a fast one that has to be asked for."""
    kernels = [
        kernel("add", "any"),
        kernel("add", "by64", when=["divisible", ["dim", "N"], 64], priority=5),
        kernel("add", "quick", mode="fast", priority=9),
        kernel("mul"),
    ]
    return write_tree(tmp_path / "variants", manifest("sm_90a", kernels, [plan("add", "mul")]))


def test_the_candidates_in_order(kiln_json: RunJson, variants: Path) -> None:
    code, document = kiln_json("explain", "add", "--tree", variants, "--target", "sm_90a", *CALL)
    assert (code, document["chosen"]) == (0, "by64")
    assert document["call"] == "add(x: f32[16, 64], s=2)"
    assert document["device"] == "a pretended sm_90a"
    assert [c["variant"] for c in document["candidates"]] == ["quick", "by64", "any", "composite"]
    whys = {c["variant"]: c["why"] for c in document["candidates"]}
    assert "fast mode" in whys["quick"]
    assert (whys["by64"], whys["any"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (("M=16", "N=65"), "any"),
        ((*CALL, "--mode", "fast"), "quick"),
        ((*CALL, "--variant", "any"), "any"),
        ((*CALL, "--tier", "composite"), "composite"),
        ((*CALL, "x.stride=80"), "by64"),
    ],
)
def test_other_calls_choose_otherwise(
    kiln_json: RunJson, variants: Path, words: tuple[str, ...], chosen: str
) -> None:
    code, document = kiln_json("explain", "add", "--tree", variants, "--target", "sm_90a", *words)
    assert (code, document["chosen"]) == (0, chosen)


def test_text(kiln: Run, variants: Path) -> None:
    code, out, _ = kiln("explain", "add", "--tree", variants, "--target", "sm_90a", *CALL)
    assert code == 0
    assert out.startswith("add(x: f32[16, 64], s=2)\nadd on a pretended sm_90a:\n")
    assert "by64 (generated): runs" in out


def test_nothing_may_run(kiln_json: RunJson, variants: Path) -> None:
    words = (*CALL, "--variant", "none")
    code, document = kiln_json("explain", "add", "--tree", variants, "--target", "sm_90a", *words)
    assert (code, document["chosen"]) == (1, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ad", "--target", "sm_90a", *CALL), "no op 'ad'; did you mean add"),
        (("add", "--target", "sm_90a", "M=16"), "add needs N=… as well"),
        (("add", "--target", "sm_80", *CALL), "sm_80"),
        (("add", *CALL), "sm_90a"),
        (("add", "--target", "sm_90a", "--device", "cpu", *CALL), "not allowed with"),
    ],
)
def test_refusals(kiln: Run, variants: Path, words: tuple[str, ...], told: str) -> None:
    code, out, err = kiln("explain", *words, "--tree", variants)
    assert (code, out) == (2, "")
    assert told in err
    assert "internal error" not in err


PROVIDERS = """
import kiln.runtime as kiln

def decline(x, y, s):
    raise kiln.Decline

def register(library):
    library.register_provider("add", "hopper", decline, arrays="view", supports=lambda c: c.major >= 9)
    library.register_provider("add", "blackwell", decline, arrays="view", supports=lambda c: c.major >= 10)
    library.register_provider("add", "last", decline, arrays="view", priority=-1)

def broken(library):
    raise KeyError("x")

def twice(library):
    register(library)
    register(library)
"""


@pytest.fixture
def providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explained_providers.py").write_text(PROVIDERS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("providers")
def test_providers_are_among_the_candidates(kiln: Run, kiln_json: RunJson, variants: Path) -> None:
    words = ("explain", "add", "--tree", variants, "--target", "sm_90a", *CALL)
    mine = ("--providers", "explained_providers:register")
    code, document = kiln_json(*words, *mine)
    assert (code, document["chosen"]) == (0, "hopper")
    found = [(c["variant"], c["tier"], c["why"]) for c in document["candidates"]]
    assert found[:2] == [
        ("blackwell", "provider", "its predicate does not hold on this device"),
        ("hopper", "provider", None),
    ]
    assert [f[0] for f in found[2:]] == ["quick", "by64", "any", "composite", "last"]
    assert "hopper (provider): runs unless it declines" in kiln(*words, *mine)[1]
    assert kiln_json(*words)[1]["chosen"] == "by64"


@pytest.mark.usefixtures("providers")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("explained_providers", "expected MODULE:FUNCTION"),
        ("explained_providers:", "expected MODULE:FUNCTION"),
        ("explained_providers:none", "has no function none"),
        ("no_such_module:f", "no_such_module cannot be imported"),
        ("explained_providers:broken", "fails with KeyError: 'x'"),
        ("explained_providers:twice", "'hopper' is registered twice"),
    ],
)
def test_providers_that_cannot_be_registered(kiln: Run, variants: Path, name: str, told: str) -> None:
    words = ("explain", "add", "--tree", variants, "--target", "sm_90a", *CALL, "--providers", name)
    code, out, err = kiln(*words)
    assert (code, out) == (2, "")
    assert told in err
    assert ("fails with" in err) == name.endswith("broken")


def test_several_trees(kiln: Run, kiln_json: RunJson, variants: Path, tmp_path: Path) -> None:
    pack = write_tree(tmp_path / "pack", manifest("sm_90a", [kernel("add", "other"), kernel("sub")]))
    words = ("--target", "sm_90a", *CALL, "--tree", variants, "--tree", pack)
    code, document = kiln_json("explain", "add", *words)
    assert (code, document["chosen"], document["notes"]) == (0, "by64", [f"shadowed: add of {pack}"])
    assert kiln_json("explain", "sub", *words)[1]["chosen"] == "generic"
    assert f"shadowed: add of {pack}" in kiln("explain", "add", *words)[1]
