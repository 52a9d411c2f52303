"""Names that C11 and C++17 take: no keyword, no macro of a standard header, no name given twice."""

from __future__ import annotations

import re
from collections.abc import Iterable

_C = """auto break case char const continue default do double else enum extern float for goto if inline int
long register restrict return short signed sizeof static struct switch typedef union unsigned void volatile
while asm typeof bool true false nullptr constexpr thread_local alignas alignof static_assert typeof_unqual"""
_CXX = """and and_eq bitand bitor catch char8_t char16_t char32_t class co_await co_return co_yield compl
concept consteval constinit const_cast decltype delete dynamic_cast explicit export friend mutable namespace
new noexcept not not_eq operator or or_eq private protected public reinterpret_cast requires static_cast
template this throw try typeid typename using virtual wchar_t xor xor_eq"""
_MACROS = """linux unix i386 complex imaginary I NULL EOF NAN INFINITY errno stdin stdout stderr assert
signals slots emit"""
RESERVED = frozenset(f"{_C} {_CXX} {_MACROS}".split())
"""Keywords of both languages, and macros that a name would meet in programs of either."""


class Names:
    """The names of one scope."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*RESERVED, *taken}

    def claim(self, wanted: str) -> str:
        """`wanted`, with underscores behind it until it is legal and new in this scope.

        >>> names = Names(["error"])
        >>> names.claim("new"), names.claim("x"), names.claim("x"), names.claim("_0"), names.claim("error")
        ('new_', 'x', 'x_', 'arg_0', 'error_')
        """
        name = f"arg{wanted}" if wanted.startswith("_") else wanted
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def identifier(text: str) -> str:
    """Any text as letters, digits and single underscores.

    >>> identifier("silu"), identifier("a-b  c"), identifier("-")
    ('silu', 'a_b_c', 'empty')
    """
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_") or "empty"


def literal(text: str) -> str:
    r"""A text as a string literal; what is not plain ASCII in octal, question marks too (trigraphs).

    >>> print(literal('a"b\\ü?'))
    "a\"b\\\303\274\077"
    """
    plain = {'"': '\\"', "\\": "\\\\"}
    bytes_ = text.encode("utf-8", "surrogatepass")
    shown = (plain.get(chr(b), chr(b)) if 32 <= b < 127 and b != 63 else f"\\{b:03o}" for b in bytes_)
    return f'"{"".join(shown)}"'


def comment(text: str) -> str:
    """A text as the inside of a comment: one line, ending nothing.

    >>> comment("x */ y\\n  z /* w")
    'x * / y z / * w'
    """
    return " ".join(text.replace("*/", "* /").replace("/*", "/ *").split())
