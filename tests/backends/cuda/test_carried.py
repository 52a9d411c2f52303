"""A trap of Triton's loops, which no type shows: a name that starts as a copy of another, and becomes a copy
of it again in every turn, is not carried from turn to turn.

The compiler walks a loop's body once with the values from before it, and carries the names whose value has
changed: `before = stage` changes nothing then, whatever happens to `stage` afterwards. On a device, a
consumer of a ring that is written like this gives back the first stage for ever, and the producer waits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kiln.backends.cuda.kernels as kernels

SOURCES = sorted(Path(next(iter(kernels.__path__))).glob("*.py"))


def _copies(body: list[ast.stmt]) -> Iterator[tuple[str, str, int]]:
    """(name, whose copy it becomes, line) of plain assignments, wherever they are in it."""
    for node in (n for statement in body for n in ast.walk(statement)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value.id, node.lineno


def _assigned(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def not_carried(source: str) -> list[str]:
    """`LINE: NAME` of every name that a loop does not carry."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, part, None) for part in ("body", "orelse")):
            copies: dict[str, str] = {}
            for statement in body if isinstance(body, list) else ():
                if isinstance(statement, ast.For | ast.While):
                    inside = _copies(statement.body)
                    found += [f"{line}: {a}" for a, b, line in inside if copies.get(a) == b]
                changed = _assigned(statement)
                copies = {a: b for a, b in copies.items() if not {a, b} & changed}
                copies |= {a: b for a, b, _ in _copies([statement]) if isinstance(statement, ast.Assign)}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_loops_carry_what_changes(path: Path) -> None:
    assert not_carried(path.read_text()) == []


BODY = """
def consume(steps):
    stage = 0
    before = {start}
    for step in range(steps):
        give_back(before)
        before = stage
        stage = following(stage)
"""


@pytest.mark.parametrize(("start", "found"), [("stage", ["7: before"]), ("0", [])])
def test_a_name_that_starts_as_a_copy_is_found(start: str, found: list[str]) -> None:
    assert not_carried(BODY.format(start=start)) == found


def test_kernels_are_read() -> None:
    assert "gemm_hopper.py" in {path.name for path in SOURCES}
