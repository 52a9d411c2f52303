"""How the parameters of a launch are filled: what is constant for a call's shape, and what is patched in per
call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.runtime import tensor_map
from kiln.runtime.bind import Bound, refuse_unwritten
from kiln.runtime.dtypes import CODES
from kiln.runtime.entities import Kernel, Param, Signature
from kiln.runtime.errors import ContractError
from kiln.runtime.expr import Env, compile_expr, names
from kiln.runtime.record import record
from kiln.runtime.scratch import laid_out
from kiln.runtime.tensor_map import Tiled

_RANGES = {"i32": (-(1 << 31), (1 << 31) - 1), "i64": (-(1 << 63), (1 << 63) - 1)}
_BYTE_TYPES = CODES | {"u8", "i8", "bool"}


@record
class Room:
    """What a launch needs of one kind of scratch.

    Attributes:
        size: bytes of the block; 0 for none.
        places: (parameter, offset in the block).
    """

    size: int
    places: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Recipe:
    """The parameters a kernel is launched with, in order, dropped ones left out.

    Attributes:
        dtypes: "ptr", "i32", "i64", "f32" or "f64" per parameter.
        template: values; those that change per call hold 0.
        pointers: (parameter, index into the call's pointers).
        args: (parameter, scalar position) of scalars passed as they are.
        computed: (parameter, function of the scalars) of everything else that depends on them.
        scratch: scratch memory of arbitrary content.
        zeroed: scratch memory that is all zeros before and after each launch.
        maps: (parameter, index into the call's pointers, how it is walked) of tensor maps.
        grid: program counts.
        work: bytes that the operands cover, to judge whether threads pay.
    """

    dtypes: list[str]
    template: list[Any]
    pointers: list[tuple[int, int]]
    args: list[tuple[int, int]]
    computed: list[tuple[int, Callable[[tuple[int | float, ...]], Any]]]
    scratch: Room
    zeroed: Room
    maps: list[tuple[int, int, Tiled]]
    grid: tuple[int, int, int]
    work: int

    def fill(
        self, pointers: Sequence[int], args: tuple[int | float, ...], scratch: int = 0, zeroed: int = 0
    ) -> list[Any]:
        """The values of one launch, given the addresses of its blocks."""
        values = self.constants(pointers, args)
        for room, block in ((self.scratch, scratch), (self.zeroed, zeroed)):
            for at, offset in room.places:
                values[at] = block + offset
        return values

    def constants(self, pointers: Sequence[int] | None, args: tuple[int | float, ...] | None) -> list[Any]:
        """The values of launches with these addresses and scalars; 0 for what each brings itself."""
        values = self.template.copy()
        if pointers is not None:
            for at, i in self.pointers:
                values[at] = pointers[i]
        if args is not None:
            for at, i in self.args:
                values[at] = args[i]
            for at, value in self.computed:
                values[at] = value(args)
        return values


def shape_args(sig: Signature, kernel: Kernel) -> set[str]:
    """Scalar operands on whose values the choice or the shape of a launch depends, not only a parameter's
    value."""
    trees = [kernel.when, *kernel.grid, *(s.bytes for s in kernel.scratch)]
    trees += [p.value for p in kernel.params if p.kind == "dropped" or (p.divisible_by or 1) > 1]
    trees += [e for p in kernel.params if p.map is not None for e in (*p.map.shape, *p.map.strides)]
    return {name for tree in trees for head, name in names(tree) if head == "arg"}


def why_not_params(kernel: Kernel, bound: Bound) -> str | None:
    """Which promise of a kernel's parameters this call would break: types, alignment, divisibility, range."""
    env = bound.env
    for p in kernel.params:
        why = _why_not_scalar(p, env) if p.operand is None else _why_not_pointer(p, env)
        if why is None and p.map is not None:
            why = tensor_map.why_not(p, p.map, env)
        if why is not None:
            return why
    return None


def _why_not_pointer(p: Param, env: Env) -> str | None:
    name = p.operand or ""
    found = env.dtypes.get(name)
    if found is not None and found != p.dtype and not {found, p.dtype} <= _BYTE_TYPES:
        return f"reads {name} as {p.dtype}, found {found}"
    align = p.align or 1 if p.map is None else tensor_map.alignment(p.map)
    off = env.pointers.get(name, 0) % align
    return f"needs {name} aligned to {align} bytes, found it {off} bytes off" if off else None


def _why_not_scalar(p: Param, env: Env) -> str | None:
    if p.value is None:
        return None
    value = compile_expr(p.value)(env)
    if p.kind == "dropped":
        return None if value == p.equals else f"was compiled for {p.name} = {p.equals}, found {value}"
    if p.divisible_by is not None and p.divisible_by > 1 and value % p.divisible_by:
        return f"needs {p.name} divisible by {p.divisible_by}, found {value}"
    if p.dtype in _RANGES:
        low, high = _RANGES[p.dtype]
        if type(value) is not int or not low <= value <= high:
            return f"passes {p.name} as {p.dtype}, but it is {value}"
    return None


def make_recipe(kernel: Kernel, bound: Bound, sig: Signature) -> Recipe:
    """The recipe of a kernel for a checked call whose parameters it can take.

    Raises:
        ContractError: a grid or scratch size that cannot be computed or is out of range, or a grid without
            programs although there is an output to write.
    """
    tensors = {t.name: i for i, t in enumerate(sig.tensors)}
    scalars = {o.name: i for i, o in enumerate(sig.scalars)}
    grid = tuple(_extent(kernel, compile_expr(e)(bound.env)) for e in kernel.grid)
    if 0 in grid:
        none = sig.rows if bound.env.dims.get(sig.rows) == 0 else f"the grid of {kernel.variant}"
        refuse_unwritten(kernel.op, sig, bound.geometry, none)
    scratch, zeroed = _room(kernel, bound, False), _room(kernel, bound, True)
    r = Recipe([], [], [], [], [], scratch, zeroed, [], (grid[0], grid[1], grid[2]), _work(bound))
    for p in kernel.params:
        if p.kind == "dropped":
            continue
        at = len(r.template)
        r.dtypes.append(p.dtype if p.kind == "scalar" else "ptr")
        r.template.append(0)
        if p.operand in tensors:
            side = tensors[p.operand] + (len(tensors) if p.access == "write" else 0)
            if p.map is None:
                r.pointers.append((at, side))
            else:
                r.maps.append((at, side, tensor_map.tiled(p, p.map, bound.env)))
        elif p.kind == "scalar":
            _scalar(r, at, p, bound.env, scalars)
    return r


def _room(kernel: Kernel, bound: Bound, zeroed: bool) -> Room:
    sizes = {
        f"scratch:{s.name}": _size(kernel, compile_expr(s.bytes)(bound.env))
        for s in kernel.scratch
        if s.zeroed is zeroed
    }
    offsets, end = laid_out(list(sizes.values()))
    at = dict(zip(sizes, offsets, strict=True))
    passed = (p for p in kernel.params if p.kind != "dropped")
    return Room(end, tuple((i, at[p.operand]) for i, p in enumerate(passed) if p.operand in at))


def _scalar(r: Recipe, at: int, p: Param, env: Env, scalars: dict[str, int]) -> None:
    if type(p.value) is tuple and p.value[0] == "arg":
        r.args.append((at, scalars[p.value[1]]))
        return
    value = compile_expr(p.value)
    if all(head != "arg" for head, _ in names(p.value)):
        r.template[at] = value(env)
        return
    order = list(scalars)
    r.computed.append((at, lambda args: value(with_args(env, order, args))))


def with_args(env: Env, order: list[str], args: tuple[int | float, ...]) -> Env:
    """The same call with other scalar values."""
    other = Env()
    other.dims, other.strides, other.colstrides = env.dims, env.strides, env.colstrides
    other.attrs, other.dtypes, other.pointers = env.attrs, env.dtypes, env.pointers
    other.args = dict(zip(order, args, strict=True))
    return other


def _work(bound: Bound) -> int:
    return sum(g.rows * g.width * g.itemsize for g in bound.geometry if g is not None)


def _size(kernel: Kernel, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ContractError(f"{kernel.op}.{kernel.variant}: scratch of {value} bytes; expected 0 to 2^48.")
    return value


def _extent(kernel: Kernel, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ContractError(
            f"{kernel.op}.{kernel.variant}: a grid extent of {value}; expected an integer of 0 or more."
        )
    return value
