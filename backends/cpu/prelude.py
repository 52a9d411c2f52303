"""What a C file takes of the vector headers: the definitions that it uses, and those that they use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HEADERS = Path(__file__).parent / "vec"
ORDER = ("kiln_vec.h.j2", "kiln_f16.h", "kiln_fma.h", "kiln_gather.h.j2", "kiln_nvfp4.h")
"""The headers, each after those that it uses."""

_DEFINED = re.compile(
    r"^KILN_[A-Z]+ [^(]*?(\w+)\(|^#define (\w+)|^typedef [\w ]+? (\w+) __attribute__", re.MULTILINE
)
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Paragraph:
    """A part of a header that is taken as a whole: lines without a blank one between them."""

    text: str
    defines: frozenset[str]
    """Functions, macros and types; a paragraph without any is in every file."""
    words: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Paragraph:
        """The paragraph of this text."""
        names = frozenset(name for found in _DEFINED.findall(text) for name in found if name)
        return cls(text, names, frozenset(_WORD.findall(text)))


@lru_cache(maxsize=1)
def paragraphs() -> tuple[Paragraph, ...]:
    """Every paragraph of the headers, in order."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(HEADERS), undefined=StrictUndefined, autoescape=False)
    texts = (environment.get_template(name).render() for name in ORDER)
    return tuple(
        Paragraph.of(part.strip("\n")) for text in texts for part in re.split(r"\n{2,}", text) if part.strip()
    )


def prelude(body: str) -> str:
    """The part of the headers that `body` needs to compile alone."""
    needed = set(_WORD.findall(body))
    taken: list[Paragraph] = []
    for part in reversed(paragraphs()):  # what a paragraph uses is defined before it
        if not part.defines or part.defines & needed:
            needed |= part.words
            taken.append(part)
    return _joined([part.text for part in reversed(taken)])


def _joined(texts: list[str]) -> str:
    """Single lines together, longer paragraphs apart."""
    lines = [t + "\n" if "\n" in t else t for t in texts]
    out = ""
    for before, text in zip(["\n", *lines], lines, strict=False):
        apart = "\n" in text and not before.endswith("\n")
        out += ("\n" if apart else "") + text + "\n"
    return out
