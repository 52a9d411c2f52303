"""README's Python quick starts run as they stand and print what README says they do. The C, C++ and CMake
ones: see tests/runtime/engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.runtime.targets import cpu_target
from kiln.tests.support.readme import ROOT, block, blocks, prints, session
from kiln.tools.cli import main

FIRST = "rms_norm_quant_fp8_per_token"
LAYERS = ("lib.linear(", 'mode="fast"', "gated_delta_rule_packed_decode(")
EXPLAINED = ("explain linear", "explain matmul_bt")
ENGINE = "lib.prepare()"
PROVIDER = "register_provider"
TORCH = "import torch"
RECIPE = "def body(x, residual, bias)"
SHOWN = "kiln show rms_norm"
BUILT = "kiln build --catalog kiln.recipes --catalog my_recipes"


def ran(*parts: str) -> str:
    """What the code prints, as a program of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    command = [sys.executable, "-c", "\n".join(parts)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown_after(code: str) -> str:
    """The block that follows a Python block in README."""
    text = (ROOT / "README.md").read_text("utf-8")
    rest = text[text.index(code) + len(code) :].removeprefix("```\n")
    assert rest.startswith("```\n"), "README shows no output right below this block"
    return rest.removeprefix("```\n").partition("```")[0]


def test_numbers_of_a_first_call() -> None:
    code = block("python", FIRST)
    assert prints(shown_after(code), ran(code))


def test_layers_go_on_from_the_first_call() -> None:
    codes = [block("python", mark) for mark in (FIRST, *LAYERS)]
    assert prints("".join(map(shown_after, codes)), ran(*codes))


@pytest.mark.parametrize("mark", [*EXPLAINED, SHOWN])
def test_explained_calls(
    mark: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for command, shown in session(mark):
        assert main(command.split()[1:]) == 0
        assert prints(shown, capsys.readouterr().out)


def test_a_recipe_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu_target() != "cpu-x86_64":
        pytest.skip(f"README's tree is for x86-64, this is {cpu_target()}")
    (tmp_path / "my_recipes.py").write_text(block("python", RECIPE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for command, shown in session(BUILT):
        assert main(command.split()[1:]) == 0
        assert prints(shown, capsys.readouterr().out), command


def test_an_engine_and_a_provider() -> None:
    engine, provider = block("python", ENGINE), block("python", PROVIDER)
    assert prints(shown_after(engine), ran(engine))
    assert prints(shown_after(engine) + shown_after(provider), ran(engine, provider))


def test_pytorch() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed; kernel-kiln[torch] brings it")
    code = block("python", TORCH)
    assert prints(shown_after(code), ran(code))


def test_a_block_that_prints_something_else_is_found() -> None:
    code = block("python", ENGINE)
    assert not prints(shown_after(code), ran(code.replace("y[0, 0]", "y[0, 0] + 1")))


def test_every_block_has_a_test() -> None:
    declarations = ("LEAKY_RELU = triton_op",)
    run = (FIRST, *LAYERS, ENGINE, PROVIDER, TORCH, RECIPE)
    assert all(any(mark in body for mark in (*declarations, *run)) for body in blocks("python"))
