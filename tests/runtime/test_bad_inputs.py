"""The table of bad inputs: it is whole, and every test that it names is there."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from kiln.tests.runtime.bad_inputs import REASONS, TABLE

TESTS = Path(__file__).parents[1]


@lru_cache(maxsize=64)
def names_in(file: Path) -> frozenset[str]:
    """The tests that pytest finds in a file, imported ones included."""
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(n for n in found if n.startswith("test_"))


def missing(ids: str) -> list[str]:
    """Those of the tests that are not there."""
    gone = []
    for name in ids.split():
        place, _, test = name.partition("::")
        folder, _, stem = place.rpartition("/")
        file = TESTS / folder / f"test_{stem}.py"
        if not file.is_file() or f"test_{test}" not in names_in(file):
            gone.append(name)
    return gone


def test_every_number_is_there() -> None:
    assert sorted(TABLE) == list(range(1, 113))
    assert len({b.what for b in TABLE.values()}) == 112


@pytest.mark.parametrize("number", TABLE)
def test_every_test_is_there(number: int) -> None:
    found = TABLE[number]
    assert found.what
    assert found.python
    assert missing(found.python) == []
    assert found.c in REASONS or (found.c and missing(found.c) == [])


def test_a_test_that_is_not_there_is_told() -> None:
    assert missing("runtime/load::pins runtime/load::pinz runtime/lode::pins") == [
        "runtime/load::pinz",
        "runtime/lode::pins",
    ]
    assert missing("not applicable") == ["not", "applicable"]


CLOCKS = re.compile(
    r"\btime\.time\(|\bdatetime\b|\blocaltime\b|\bgmtime\b|\bclock_gettime\(CLOCK_REALTIME|\btime\(NULL"
)


def test_no_clock_decides_anything() -> None:
    """Neither what is built nor what is loaded depends on the date."""
    root = TESTS.parent
    files = [p for f in ("runtime", "compiler", "backends", "ir", "recipes") for p in (root / f).rglob("*")]
    sources = [p for p in files if p.suffix in (".py", ".c", ".h", ".j2")]
    assert len(sources) > 100
    assert [str(p) for p in sources if CLOCKS.search(p.read_text("utf-8"))] == []
    assert CLOCKS.search("x = time.time()")
