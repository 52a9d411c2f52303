"""What all commands share: help, exit codes, errors, interruption, closed pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from kiln.runtime.errors import KilnError
from kiln.tests.tools.conftest import Run, RunJson
from kiln.tools import cli, verify
from kiln.tools.cli import COMMANDS, Command

ROOT = Path(__file__).resolve().parents[2]
NAMES = [c.name for c in COMMANDS]


def kiln_process(
    *arguments: str, stdout: int | TextIO = subprocess.PIPE, **env: str
) -> subprocess.Popen[str]:
    """`kiln` as a process of its own."""
    command = [sys.executable, "-m", "kiln.tools.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), **env}
    return subprocess.Popen(command, env=environment, text=True, stdout=stdout, stderr=subprocess.PIPE)


def test_help_names_every_command(kiln: Run) -> None:
    code, out, err = kiln("--help")
    assert (code, err) == (0, "")
    for command in COMMANDS:
        assert f"  {command.name} " in out
        assert command.summary in out


def test_no_command_prints_help_and_fails(kiln: Run) -> None:
    code, out, err = kiln()
    assert (code, out) == (2, "")
    assert "commands:" in err


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_every_command_has_help_with_its_example(kiln: Run, command: Command) -> None:
    code, out, err = kiln(command.name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: kiln {command.name}")
    assert f"example:\n  {command.example}" in out
    assert "--json" in out


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_every_example_is_accepted_by_its_parser(command: Command) -> None:
    words = [w.strip("'") for w in command.example.split(" > ")[0].split()]
    assert words[:2] == ["kiln", command.name]
    cli.parser_of(command, cli.load(command)).parse_intermixed_args(words[2:])


def test_version(kiln: Run) -> None:
    code, out, _ = kiln("--version")
    assert code == 0
    assert out.startswith("kiln ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("verfy",), "no command 'verfy'; did you mean verify?"),
        (("zzz",), "no command 'zzz'; there are build,"),
        (("verify", "--jsn"), "unrecognized arguments: --jsn; did you mean --json?"),
        (("matrix", "--md", "--html"), "not allowed with"),
        (("diff", "only-one"), "arguments are required: B"),
        (("build", "--jobs", "many"), "--jobs"),
    ],
)
def test_a_wrong_command_line_is_told_what_was_meant(
    kiln: Run, arguments: tuple[str, ...], told: str
) -> None:
    code, out, err = kiln(*arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_an_abbreviation_is_no_option(kiln: Run) -> None:
    assert kiln("verify", "--js")[0] == 2


def test_json_has_a_document_for_errors_too(kiln: Run) -> None:
    code, out, err = kiln("verify", "/nowhere/at/all", "--json")
    assert code == 2
    assert json.loads(out)["error"]["class"] == "UnavailableError"
    assert err.startswith("kiln verify: /nowhere/at/all is not a folder")


def broken(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr(verify, "run", run)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KilnError("the tree is odd"), "kiln verify: the tree is odd\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "x.json: No such file or directory"),
        (OSError(28, "No space left on device"), "kiln verify: No space left on device"),
        (ModuleNotFoundError("no", name="triton"), "pip install 'kernel-kiln[compiler]'"),
        (ModuleNotFoundError("no", name="jinja2"), "not installed; try pip install jinja2"),
        (MemoryError(), "out of memory"),
        (ZeroDivisionError("oh"), "internal error, ZeroDivisionError at test_cli.py:"),
    ],
)
def test_no_error_is_a_traceback(
    kiln: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    broken(error, monkeypatch)
    code, out, err = kiln("verify")
    assert (code, out) == (2, "")
    assert told in err
    assert "Traceback" not in err


def test_traceback_is_there_for_whoever_asks(kiln: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(ZeroDivisionError("oh"), monkeypatch)
    assert "Traceback" in kiln("verify", "--traceback")[2]


def test_an_interrupt_is_130(kiln: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(KeyboardInterrupt(), monkeypatch)
    assert kiln("verify") == (130, "", "\nkiln: interrupted\n")


SLEEPER = """
import signal, sys, time
from kiln.tools import cli, verify
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
verify.run = lambda args: print("asleep", flush=True) or time.sleep(600)
sys.exit(cli.main(["verify"]))
"""


def test_a_real_interrupt() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\nkiln: interrupted\n")


def test_a_closed_pipe_is_silent(tree: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with kiln_process("targets", "--tree", str(tree), stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(tree: Path) -> None:
    with (
        Path("/dev/full").open("w") as full,
        kiln_process("targets", "--tree", str(tree), stdout=full) as process,
    ):
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, "kiln targets: No space left on device\n")


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x"])
def test_odd_terminal_widths(kiln: Run, monkeypatch: pytest.MonkeyPatch, tree: Path, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert kiln("targets", "--tree", tree)[0] == 0
    assert kiln("targets", "--help")[0] == 0


def test_text_survives_an_ascii_terminal(tree: Path) -> None:
    with kiln_process("matrix", "--md", "--tree", str(tree), PYTHONIOENCODING="ascii") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "KERNEL-CONV3D" in out


def test_json_is_one_document_on_stdout(kiln_json: RunJson, tree: Path) -> None:
    code, document = kiln_json("targets", "--tree", tree)
    assert code == 0
    assert {t["name"]: t["kernels"] for t in document["targets"]}["sm_90a"] == 3
