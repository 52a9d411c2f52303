"""Calls for the self-test, made from what a manifest says of a candidate: its predicate, its parameters, and
the seed and shape that it carries."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kiln.runtime.arrays import View, contiguous
from kiln.runtime.dtypes import DTYPES, numpy_dtype
from kiln.runtime.entities import DTypeVar, Kernel, Plan, Scalar, Signature, Tensor
from kiln.runtime.errors import ContractError
from kiln.runtime.expr import Env, compile_expr, names, why_not

ROWS, WIDTH = 3, 256
"""Extents where the manifest gives none."""
MOST_BYTES = 1 << 24
"""Of all operands of a call."""
TRIES = 512
"""Sizes that are tried for one candidate."""
ALIGN = 256
"""Of operands in a call's memory; at least so many bytes lie between them."""
_INTEGERS = ("i16", "i32", "u32", "i64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_CODES = 0xBB
"""Bits of random bytes that are kept: as an FP8 code, none is above 2, and sums of products fit in f16."""


@dataclass(frozen=True)
class Slot:
    """A tensor operand in the memory of a call."""

    tensor: Tensor
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPES[self.dtype]

    def view(self, base: int, device: int) -> View:
        """It in memory at an address; at 0, of no memory."""
        return View(
            base and base + self.offset, self.shape, contiguous(self.shape), self.dtype, device, False, None
        )

    def array(self, block: Any) -> Any:
        """It in a block of bytes."""
        return np.ndarray(self.shape, numpy_dtype(self.dtype), block.data, self.offset)


@dataclass(frozen=True)
class Case:
    """One call, all operands in one block of memory."""

    seed: int
    slots: tuple[Slot, ...]
    given: tuple[tuple[str, Any], ...]
    """Scalars and attributes by name."""
    tables: int
    """Rows that indices may select: see `_index_limit`."""

    @property
    def bytes(self) -> int:
        """Size of the block."""
        last = self.slots[-1]
        return last.offset + last.bytes + ALIGN

    def block(self, poison: int) -> Any:
        """The block before the call: seeded inputs, every other byte `poison`."""
        block = np.full(self.bytes, poison, np.uint8)
        for i, slot in enumerate(self.slots):
            if slot.tensor.role != "out":
                slot.array(block)[...] = _values(slot, np.random.default_rng([self.seed, i]), self.tables)
        return block

    def call(self, base: int, device: int) -> dict[str, Any]:
        """The call's arguments, on a block at an address."""
        operands: dict[str, Any] = {s.tensor.name: s.view(base, device) for s in self.slots}
        return {**operands, **dict(self.given)}


def _values(slot: Slot, rng: np.random.Generator, tables: int) -> Any:
    if slot.dtype in _INTEGERS:
        # They follow each other, from 1: rows that an op writes must not be shared.
        return (np.arange(prod(slot.shape)).reshape(slot.shape) + 1) % tables
    if slot.dtype in _FLOATS:
        return rng.standard_normal(slot.shape).astype(numpy_dtype(slot.dtype))
    if slot.dtype == "bool":
        return rng.integers(0, 2, slot.shape).astype(bool)
    if slot.dtype == "i8":
        return rng.integers(-8, 8, slot.shape, np.int8)
    return (rng.integers(0, 256, slot.shape) & _CODES).astype(np.uint8).view(numpy_dtype(slot.dtype))


def cases_of(candidate: Kernel | Plan, sig: Signature, mentioned: Iterable[int] = ()) -> Iterator[Case]:
    """Calls that the candidate's own predicate allows.

    Args:
        candidate: a kernel or plan of the op.
        sig: the op's signature.
        mentioned: extents that what a plan calls may ask for.
    """
    facts = _Facts(candidate, sig)
    shape = candidate.numerics.selftest.shape if isinstance(candidate, Kernel) else {}
    seed = candidate.numerics.selftest.seed if isinstance(candidate, Kernel) else 0
    for env in itertools.islice(_environments(candidate, sig, facts, shape, tuple(mentioned)), TRIES):
        slots = _slots(sig, facts, env)
        if slots is None:
            continue
        holds = all(why_not(p, env) is None for p in (candidate.when, *(p for p, _ in sig.constraints)))
        if holds:
            given = (*env.args.items(), *env.attrs.items())
            yield Case(seed, slots, given, _index_limit(sig, slots, env))


def _index_limit(sig: Signature, slots: tuple[Slot, ...], env: Env) -> int:
    """The fewest rows of a table, an operand of rows that are not the op's; without one, the least extent."""
    rows = ("dim", sig.rows)
    tables = [s.shape[0] for s in slots if len(s.shape) > 1 and s.tensor.shape[0] != rows]
    return max(min(tables or env.dims.values(), default=1), 1)


class _Facts:
    """What a predicate's conjunction says outright."""

    def __init__(self, candidate: Kernel | Plan, sig: Signature) -> None:
        self.dtypes: dict[str, str] = {}
        self.attrs: dict[str, Any] = {a.name: a.default for a in sig.attrs}
        self.sizes: dict[tuple[str, str], int] = {}
        """("dim" or "arg", name) -> what it must be."""
        present = set()
        if isinstance(candidate, Kernel):
            pointers = {p.operand: p.dtype for p in candidate.params if p.operand}
            self.dtypes.update({t.name: pointers[t.name] for t in sig.tensors if t.name in pointers})
            present = set(self.dtypes)
        absent = set()
        for head, *rest in _conjunction(candidate.when):
            if head == "dtype":
                self.dtypes[rest[0]] = rest[1]
            elif head == "attr":
                self.attrs[rest[0]] = rest[1]
            elif head == "present":
                present.add(rest[0])
            elif head == "absent":
                absent.add(rest[0])
            elif head == "eq" and type(rest[0]) is tuple and type(rest[1]) is int:
                self.sizes[rest[0][:2]] = rest[1]
        self.tensors = [
            t for t in sig.tensors if not t.optional or (t.name in present and t.name not in absent)
        ]
        variables = {
            t.dtype.var: self.dtypes[t.name]
            for t in sig.tensors
            if isinstance(t.dtype, DTypeVar) and t.name in self.dtypes
        }
        for t in self.tensors:
            if isinstance(t.dtype, DTypeVar):
                self.dtypes.setdefault(t.name, variables.get(t.dtype.var, t.dtype.choices[0]))
            else:
                # A parameter may read the same bytes under another name.
                self.dtypes[t.name] = t.dtype


def _conjunction(pred: Any) -> Iterator[tuple[Any, ...]]:
    if type(pred) is tuple and pred[0] == "and":
        for p in pred[1:]:
            yield from _conjunction(p)
    elif type(pred) is tuple:
        yield pred


def _environments(
    candidate: Kernel | Plan,
    sig: Signature,
    facts: _Facts,
    shape: Mapping[str, int],
    mentioned: tuple[int, ...],
) -> Iterator[Env]:
    trees = [e for t in sig.tensors for e in t.shape]
    dims = list(dict.fromkeys(n for e in trees for head, n in names(e) if head == "dim"))
    predicates = [candidate.when, *(p for p, _ in sig.constraints)]
    constants = sorted({*mentioned, *(n for p in predicates for n in constants_of(p))})
    counts = [o for o in sig.scalars if o.dtype in ("i32", "i64")]
    bound = {o.name.upper() for o in counts} & set(dims)
    # The width is what predicates ask for most: it varies first.
    free = sorted((d for d in dims if d not in bound), key=lambda d: d == sig.width)
    pools = [
        [pin] if (pin := facts.sizes.get(("arg", o.name))) is not None else [_plain(o), 1, 8, *constants]
        for o in counts
    ]
    pools += [_extents(d, facts, shape, sig, constants) for d in free]
    for values in itertools.product(*(list(dict.fromkeys(p)) for p in pools)):
        env = Env()
        env.dims = dict(zip(free, values[len(counts) :], strict=True))
        args = {o.name: v for o, v in zip(counts, values, strict=False)}
        env.args = {o.name: args.get(o.name, _plain(o)) for o in sig.scalars}
        env.dims.update({n.upper(): v for n, v in args.items() if n.upper() in bound})
        env.attrs = facts.attrs
        yield env


def _extents(
    dim: str, facts: _Facts, shape: Mapping[str, int], sig: Signature, constants: list[int]
) -> list[int]:
    if ("dim", dim) in facts.sizes:
        return [facts.sizes["dim", dim]]
    given = [shape[dim]] if dim in shape else []
    return [*given, *((WIDTH, ROWS) if dim == sig.width else (ROWS, WIDTH)), *constants]


def _plain(o: Scalar) -> Any:
    whole = o.dtype in ("i32", "i64", "bool")
    value = o.default if o.default is not None else (o.minimum or 0.0) + (1 if whole else 0.5)
    return bool(value) if o.dtype == "bool" else int(value) if whole else float(value)


def constants_of(tree: Any) -> Iterator[int]:
    """The numbers in an expression or predicate that may be extents."""
    if type(tree) is tuple:
        for part in tree:
            yield from constants_of(part)
    elif type(tree) is int and 0 < tree <= 1 << 16:
        yield tree


def _slots(sig: Signature, facts: _Facts, env: Env) -> tuple[Slot, ...] | None:
    """Where operands lie; also tells the environment of them. None where they would be too big."""
    slots, offset = [], ALIGN
    for t in facts.tensors:
        try:
            shape = tuple(int(compile_expr(e)(env)) for e in t.shape)
        except (ArithmeticError, ContractError):
            return None
        slot = Slot(t, facts.dtypes[t.name], shape, offset)
        offset += -(-slot.bytes // ALIGN) * ALIGN + ALIGN
        if 0 in shape or min(shape) < 0 or offset > MOST_BYTES:
            return None
        slots.append(slot)
        env.dtypes[t.name], env.pointers[t.name] = slot.dtype, 0
        env.strides[t.name], env.colstrides[t.name] = (shape[-1] if len(shape) > 1 else 1), 1
    return tuple(slots)
