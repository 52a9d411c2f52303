"""Fixtures for the tests of commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.tests.tools.synthetic import digest, interpreted, kernel, manifest, measured, plan, ran, write_tree
from kiln.tools.cli import main

Run = Callable[..., tuple[int, str, str]]
RunJson = Callable[..., tuple[int, Any]]


@pytest.fixture
def kiln(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def kiln_json(kiln: Run) -> RunJson:
    """Run a command line with --json: (exit code, document)."""

    def run(*arguments: object) -> tuple[int, Any]:
        code, out, _ = kiln(*arguments, "--json")
        return code, json.loads(out)

    return run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two targets; on sm_90a add was measured, sub ran, mul was interpreted, div is a plan of add and mul."""
    ops = ["add", "mul", "sub"]
    evidence = {
        digest("add.generic.cubin"): {"ran": ran(), "measured": [measured("add")]},
        digest("mul.generic.cubin"): {"interpreted": interpreted()},
        digest("sub.generic.cubin"): {"ran": ran()},
        digest("gone.generic.cubin"): {"ran": ran()},
    }
    return write_tree(
        tmp_path / "tree",
        manifest("sm_80", [kernel("add")]),
        manifest("sm_90a", [kernel(op) for op in ops], [plan("div", "add", "mul")]),
        evidence={"sm_90a": evidence},
    )
