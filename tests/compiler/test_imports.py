"""Import statements: of each file those that a parse of all of it finds, whatever stands around them."""

from __future__ import annotations

import ast

import pytest

from kiln.compiler.catalog import OWN
from kiln.compiler.imports import _head, import_statements
from kiln.compiler.pipeline import source_folders

FILES = sorted(path for folder in source_folders((OWN,)) for path in folder.rglob("*.py"))


def shown(nodes: list[ast.AST]) -> list[str]:
    return sorted(ast.unparse(node) for node in nodes)


def whole(source: bytes) -> list[str]:
    return shown([n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)])


def found(source: bytes) -> list[str]:
    return shown(list(import_statements(source, "there.py")))


def test_of_kilns_own_files() -> None:
    assert len(FILES) > 200
    for path in FILES:
        source = path.read_bytes()
        assert found(source) == whole(source), path


REST = b"\nx = 1\ndef g():\n    return (1,\n2)\n"
SOURCES = {
    "nothing": b"",
    "none": b"x = 1\n",
    "in a function": b"import a\ndef f():\n    from b import c\n    return 1",
    "at the end": b"x = 1\nimport a",
    "in brackets": b"from a import (\n    b,\n    c,\n)",
    "a line in brackets that looks like a statement": b"from a import (b,\nc,\nd)",
    "after a backslash": b"from a import b, \\\nc",
    "in a branch": b"try:\n    import a\nexcept ImportError:\n    a = None",
    "in a match": b"match 1:\n    case 1:\n        import a",
    "behind a semicolon": b"x = 1; import a",
    "the word in a string": b'import a\nx = """\nimport b\nthat = 1\n"""\nimport c',
    "the word in a comment": b"import a\n# import b",
    "the word within another": b"import a\nimportant = 1",
    "a decorator": b"import a\n@b\ndef f(): pass",
    "carriage returns": b"import a\r\nx = 1\r\nfrom b import c\r\n",
    "another coding": b"# coding: utf-7\nx = 1\n+AGkAbQBwAG8AcgB0- a\n",
    "a byte order mark": b"\xef\xbb\xbfimport a",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_of_odd_ones(source: bytes) -> None:
    for text in (source, source + REST):
        assert found(text) == whole(text)


def test_what_imports_nothing_is_not_parsed() -> None:
    assert _head(b"import a\nx = 1\n" + 1000 * b"y = 2\n") == b"import a\n"


def test_a_file_that_is_not_python_is_refused() -> None:
    with pytest.raises(SyntaxError, match=r"there\.py"):
        import_statements(b"import a\nfrom import\n", "there.py")
