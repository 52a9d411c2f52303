"""The two closed languages of a manifest: expressions (numbers over dims, strides and arguments) and
predicates.

Both are JSON lists with a known head. They are checked when the manifest is read, kept as nested tuples and
compiled to closures;
nothing is ever evaluated as code.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kiln.runtime.errors import ContractError
from kiln.runtime.fields import Mismatch, attr_value

Expr = Any
"""int | float | tuple with a string head, as INTERFACES lists them."""
Pred = Any
"""True | tuple with a string head."""

MAX_DEPTH = 32
MAX_NODES = 4096
ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Alignments that a kernel may ask for: what a call's cache key distinguishes."""

NAME_HEADS = ("dim", "stride", "colstride", "arg", "attr")
_COMPARE: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "eq": (operator.eq, "=="),
    "ne": (operator.ne, "!="),
    "lt": (operator.lt, "<"),
    "le": (operator.le, "<="),
    "gt": (operator.gt, ">"),
    "ge": (operator.ge, ">="),
}


class Env:
    """What an expression may see of one call.

    Attributes:
        dims: dimension name -> extent.
        strides: operand -> row stride in elements, leading dims collapsed.
        colstrides: operand -> element stride of the last dim.
        args: scalar operand -> value.
        attrs: attribute -> value.
        dtypes: operand -> element type; absent operands are not in it.
        pointers: operand -> address; absent operands are not in it.
    """

    __slots__ = ("args", "attrs", "colstrides", "dims", "dtypes", "pointers", "strides")

    def __init__(self) -> None:
        self.dims: dict[str, int] = {}
        self.strides: dict[str, int] = {}
        self.colstrides: dict[str, int] = {}
        self.args: dict[str, int | float] = {}
        self.attrs: dict[str, Any] = {}
        self.dtypes: dict[str, str] = {}
        self.pointers: dict[str, int] = {}


Value = Callable[[Env], Any]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _roundup(a: int, b: int) -> int:
    return -(-a // b) * b


def _next_pow2(a: int) -> int:
    if type(a) is float:
        raise OverflowError
    return 1 << max(0, a - 1).bit_length()


INT64 = 1 << 63
"""Integers of a call are at least minus this, and less."""


def whole(value: float) -> int:
    """A number without its fraction; -1, which is no extent, where 64 bits cannot hold it."""
    return int(value) if -INT64 <= value < INT64 else -1


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "cdiv": _cdiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
    "roundup": _roundup,
}


class _Budget:
    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes = 0

    def spend(self, depth: int, value: object) -> None:
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise Mismatch(f"an expression of at most {MAX_DEPTH} levels", value)
        if self.nodes > MAX_NODES:
            raise Mismatch(f"an expression of at most {MAX_NODES} nodes", value)


def parse_expr(value: Any) -> Expr:
    """A JSON value as a checked expression.

    Raises:
        Mismatch: an unknown head, wrong arity, or over the depth or node cap.
    """
    return _expr(value, 0, _Budget())


def parse_pred(value: Any) -> Pred:
    """A JSON value as a checked predicate.

    Raises:
        Mismatch: as for expressions.
    """
    return _pred(value, 0, _Budget())


def _expr(value: Any, depth: int, budget: _Budget) -> Expr:
    budget.spend(depth, value)
    if type(value) is int or type(value) is float:
        return value
    head, rest = _head(value, "a number or an expression list")
    if head in NAME_HEADS:
        return (head, _name(rest, value))
    if head in _BINARY:
        _arity(rest, 2, value)
        return (head, _expr(rest[0], depth + 1, budget), _expr(rest[1], depth + 1, budget))
    if head == "next_pow2":
        _arity(rest, 1, value)
        return (head, _expr(rest[0], depth + 1, budget))
    raise Mismatch("an expression head: " + ", ".join((*NAME_HEADS, *_BINARY, "next_pow2")), head)


def _pred(value: Any, depth: int, budget: _Budget) -> Pred:
    budget.spend(depth, value)
    if value is True:
        return True
    head, rest = _head(value, "true or a predicate list")
    if head in ("and", "or"):
        return (head, *(_pred(p, depth + 1, budget) for p in rest))
    if head == "not":
        _arity(rest, 1, value)
        return (head, _pred(rest[0], depth + 1, budget))
    if head in _COMPARE:
        _arity(rest, 2, value)
        return (head, _expr(rest[0], depth + 1, budget), _expr(rest[1], depth + 1, budget))
    if head in ("absent", "present"):
        return (head, _name(rest, value))
    leaf = _LEAF_PARSERS.get(head)
    if leaf is None:
        raise Mismatch("a predicate head: " + ", ".join(PRED_HEADS), head)
    _arity(rest, 2, value)
    return leaf(head, rest, depth, budget)


def _divisible(head: str, rest: Any, depth: int, budget: _Budget) -> Pred:
    return (head, _expr(rest[0], depth + 1, budget), _positive(rest[1]))


def _aligned(head: str, rest: Any, depth: int, budget: _Budget) -> Pred:
    if rest[1] not in ALIGNMENTS or type(rest[1]) is not int:
        raise Mismatch(f"an alignment: a power of two up to {ALIGNMENTS[-1]}", rest[1])
    return (head, _name(rest[:1], rest), rest[1])


def _dtype(head: str, rest: Any, depth: int, budget: _Budget) -> Pred:
    return (head, _name(rest[:1], rest), _name(rest[1:], rest))


def _attr(head: str, rest: Any, depth: int, budget: _Budget) -> Pred:
    return (head, _name(rest[:1], rest), attr_value(rest[1]))


_LEAF_PARSERS: Mapping[str, Callable[[str, Any, int, _Budget], Pred]] = {
    "divisible": _divisible,
    "dtype": _dtype,
    "aligned": _aligned,
    "attr": _attr,
}
PRED_HEADS = ("and", "or", "not", *_COMPARE, *_LEAF_PARSERS, "absent", "present")


def _head(value: Any, expected: str) -> tuple[str, Any]:
    if type(value) not in (list, tuple) or not value or type(value[0]) is not str:
        raise Mismatch(expected, value)
    return value[0], value[1:]


def _arity(rest: Any, count: int, value: Any) -> None:
    if len(rest) != count:
        raise Mismatch(f"{count} operands after {value[0]!r}", value)


def _name(rest: Any, value: Any) -> str:
    if len(rest) != 1 or type(rest[0]) is not str or not rest[0] or "\0" in rest[0]:
        raise Mismatch("one name after the head", value)
    name: str = rest[0]
    return name


def _positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise Mismatch("a positive integer", value)
    return value


def names(tree: Expr | Pred) -> Iterator[tuple[str, str]]:
    """(head, name) of every name in an expression or predicate: ("dim", "N"), ("stride", "x"), ("dtype",
    "x") …"""
    pending = [tree]
    while pending:
        node = pending.pop()
        if type(node) is not tuple:
            continue
        if node[0] in NAME_HEADS or node[0] in ("dtype", "aligned", "absent", "present"):
            yield node[0], node[1]
        else:
            pending.extend(node[1:])


def compile_expr(expr: Expr) -> Value:
    """A closure that evaluates a checked expression in an Env.

    The closure raises ContractError for an unknown name, a division by zero or a value that 64 bits do not
    hold.
    """
    if type(expr) is not tuple:
        return lambda env: expr
    inner = _compile_value(expr)

    def value(env: Env) -> Any:
        try:
            found = inner(env)
            if type(found) is int and not -INT64 <= found < INT64:
                raise OverflowError
            return found
        except KeyError as e:
            raise ContractError(
                f"{render(expr)} needs {e.args[0]!r}, which this call does not determine; "
                "pass the operand that does."
            ) from None
        except ZeroDivisionError:
            raise ContractError(
                f"{render(expr)} divides by zero in this call; check its dimensions."
            ) from None
        except OverflowError:
            raise ContractError(
                f"{render(expr)} leaves the range of 64-bit integers in this call; check its dimensions."
            ) from None

    return value


def _compile_value(expr: Expr) -> Value:
    if type(expr) is not tuple:
        return lambda env: expr
    head, a = expr[0], expr[1]
    if head in NAME_HEADS:
        return _LOOKUPS[head](a)
    x = _compile_value(a)
    if head == "next_pow2":
        return lambda env: _next_pow2(x(env))
    f, y = _BINARY[head], _compile_value(expr[2])

    def within(env: Env) -> Any:
        found = f(x(env), y(env))
        if type(found) is int and not -INT64 <= found < INT64:
            raise OverflowError  # on the way, too: libkiln has no wider numbers
        return found

    return within


def _attr_number(attrs: Mapping[str, Any], name: str) -> int:
    value: int | str = attrs[name]
    if isinstance(value, str):
        raise KeyError(name)
    return value


_LOOKUPS: Mapping[str, Callable[[str], Value]] = {
    "dim": lambda name: lambda env: env.dims[name],
    "stride": lambda name: lambda env: env.strides[name],
    "colstride": lambda name: lambda env: env.colstrides[name],
    "arg": lambda name: lambda env: env.args[name],
    "attr": lambda name: lambda env: _attr_number(env.attrs, name),
}


def why_not(pred: Pred, env: Env) -> str | None:
    """None if the predicate holds, else a sentence part that names the first thing that does not."""
    if pred is True:
        return None
    head = pred[0]
    if head == "and":
        return next((w for p in pred[1:] if (w := why_not(p, env)) is not None), None)
    if head == "or":
        whys = [why_not(p, env) for p in pred[1:]]
        return None if None in whys else "none of: " + "; ".join(w for w in whys if w is not None)
    if head == "not":
        return None if why_not(pred[1], env) is not None else f"{render(pred[1])} holds"
    return _why_not_leaf(head, pred, env)


def _why_not_leaf(head: str, pred: Pred, env: Env) -> str | None:
    if head in _COMPARE:
        test, sign = _COMPARE[head]
        a, b = compile_expr(pred[1])(env), compile_expr(pred[2])(env)
        return None if test(a, b) else f"needs {render(pred[1])} {sign} {render(pred[2])}, found {a} and {b}"
    if head == "divisible":
        a = compile_expr(pred[1])(env)
        return None if a % pred[2] == 0 else f"needs {render(pred[1])} divisible by {pred[2]}, found {a}"
    name = pred[1]
    if head == "attr":
        found = env.attrs.get(name)
        same = type(found) is type(pred[2]) and found == pred[2]
        return None if same else f"needs {name}={pred[2]!r}, found {found!r}"
    if head == "dtype":
        found = env.dtypes.get(name)
        return None if found == pred[2] else f"needs {name} of {pred[2]}, found {found or 'none'}"
    if head == "aligned":
        rest = env.pointers.get(name, 0) % pred[2]
        return None if rest == 0 else f"needs {name} aligned to {pred[2]} bytes, found it {rest} bytes off"
    absent = name not in env.dtypes
    return None if absent == (head == "absent") else f"needs {name} {head}"


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}


def render(tree: Expr | Pred) -> str:
    """An expression or predicate as people write it: ("mul", 2, ("dim", "N")) is 2 * N."""
    if type(tree) is not tuple:
        return str(tree).lower() if tree is True else str(tree)
    head, rest = tree[0], tree[1:]
    if head == "dim" or head == "arg":
        return str(rest[0])
    if head in _SIGNS:
        return f"({render(rest[0])} {_SIGNS[head]} {render(rest[1])})"
    if head in _COMPARE:
        return f"{render(rest[0])} {_COMPARE[head][1]} {render(rest[1])}"
    return f"{head}({', '.join(render(r) if type(r) is tuple else str(r) for r in rest)})"
