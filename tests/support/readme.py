"""What README.md shows, as tests run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Shown(NamedTuple):
    """A command and what it prints; "..." stands for any lines."""

    command: str
    output: str


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in order; "" for those without one."""
    text = (ROOT / "README.md").read_text("utf-8")
    return [body for found, body in _BLOCK.findall(text) if found == language]


def block(language: str, has: str) -> str:
    """The one code block that has this text in it."""
    (found,) = [body for body in blocks(language) if has in body]
    return found


def session(has: str) -> list[Shown]:
    """The commands of the one block without a language that has this text in it."""
    parts = re.split(r"^\$ ", block("", has), flags=re.MULTILINE)
    assert parts[0] == ""
    return [Shown(*part.split("\n", 1)) for part in parts[1:]]


def prints(shown: str, found: str) -> bool:
    r"""Whether a command printed what README shows.

    >>> prints("a\n...\n", "a\nb\nc\n"), prints("a\n", "a\nb\n")
    (True, False)
    """
    pattern = "".join("(?s:.*)" if line == "...\n" else re.escape(line) for line in shown.splitlines(True))
    return re.fullmatch(pattern, found) is not None
