"""Triton kernels of one's own, declared in about ten lines: `triton_op` makes an op and its launches.

A kernel's parameters are matched by name: an operand's name is its pointer (`x`, and `x_out` for the written
side of an in/out operand), `x_stride` its row stride and `x_colstride` its column stride in elements, a
dimension's name its size, a scalar operand's name its value, an attribute's name its value as a constant.
What is named otherwise is mapped by `arguments`. The kernel's file is parsed, never imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kiln.backends.cuda.kernel_source import MISSING, KernelParameter, KernelSource, read_kernel
from kiln.backends.cuda.primitive import Constant, CudaPrimitive, Expr, Number, Pointer, Pred, Unit
from kiln.compiler.plan import type_predicates, variant_name
from kiln.ir import signature
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.spec import Attr, Contract, Op, Scalar, Ship, Tensor
from kiln.runtime.expr import names, parse_expr, parse_pred
from kiln.runtime.fields import Mismatch, shown

LEAVES = frozenset({"dim", "stride", "colstride", "arg", "attr", "dtype", "aligned", "absent", "present"})
"""Heads whose operands are names already."""
ENDINGS = ("", "_out", "_stride", "_colstride", "_out_stride", "_out_colstride")
"""What an operand's name is followed by in the names of its parameters."""
HINT: Unit = 16


@dataclass(frozen=True)
class Launch:
    """One way to compile and launch a kernel."""

    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Values of the kernel's constexprs. A parameter that is not annotated may be made a constant too; a
    size, a stride or a number made one is a condition of the launch."""
    warps: int = 4
    stages: int = 1
    when: Pred = True
    """What the launch needs beyond types, attributes and its hints."""
    priority: int = 0
    hints: tuple[bool, ...] = (True, False)
    """Kernels to build: True promises Triton addresses, row strides and widths in multiples of 16, and runs
    only where they are; False assumes nothing."""
    options: Mapping[str, Constant] = field(default_factory=dict)
    min_sm: int = 80
    max_sm: int = 999
    """The range of compute capabilities, as 10 * major + minor."""
    mode: Literal["exact", "fast"] = "exact"
    budget: Mapping[str, int] = field(default_factory=dict)
    """Resources that the kernel may take: see CudaPrimitive."""
    name: str = ""
    """Part of the variant's name; default: the constants."""

    @property
    def label(self) -> str:
        """Part of the variant's name."""
        return self.name or "_".join(f"{k}{v}".lower() for k, v in self.constants.items())


@dataclass(frozen=True)
class TritonOp:
    """What a catalog lists: the op, and the launches that realize it."""

    op: Op
    realizations: tuple[CudaPrimitive, ...]


def triton_op(
    name: str,
    kernel: str,
    operands: tuple[Tensor | Scalar, ...],
    *,
    family: str,
    reference: Callable[..., Any],
    grid: Sequence[Any],
    launches: Sequence[Launch] = (Launch(),),
    ship: tuple[Ship, ...] = (Ship(),),
    arguments: Mapping[str, Any] | None = None,
    attrs: tuple[Attr, ...] = (),
    constraints: tuple[tuple[list[Any], str], ...] = (),
    contract: Contract = Contract(),  # noqa: B008  frozen
    returns: tuple[str, ...] = (),
    rows: str = "M",
    width: str = "N",
    doc: str = "",
) -> TritonOp:
    """An op whose CUDA realization is the `@triton.jit` kernel `module:function`.

    Args:
        name: snake_case, unique over all catalogs of a build.
        kernel: `module:function`; the module is parsed now and imported when a worker compiles it.
        operands: tensors and scalars in the order of a call.
        family: the row of the kernel matrix, or a heading of your own.
        reference: NumPy; takes operands by name and returns the written ones: what conformance compares with.
        grid: up to three expressions. In them a dimension or a constant may be named by a string:
            `("M", ["cdiv", "N", "BLOCK"])`.
        launches: tiles, warps, conditions. Each becomes one kernel for each entry of `ship` and of its hints.
        ship: element types (and attributes, absent operands) to compile for.
        arguments: kernel parameter -> operand name, dimension, `x_stride`, or an expression, for
        parameters that
            are named otherwise.

    Raises:
        DeclarationError: at file:line of the kernel, naming the parameter that matches nothing, the
        operand that
            no parameter takes, or the constant that is missing.
    """
    op = Op(
        name, family, operands, returns, attrs, rows, width, constraints, contract, ship, doc,
        reference=reference
    )  # fmt: skip
    return TritonOp(op, triton_kernels(op, kernel, grid=grid, launches=launches, arguments=arguments))


def triton_kernels(
    op: Op,
    kernel: str,
    *,
    grid: Sequence[Any],
    launches: Sequence[Launch] = (Launch(),),
    arguments: Mapping[str, Any] | None = None,
) -> tuple[CudaPrimitive, ...]:
    """Realizations of an op that is declared already, by a Triton kernel: see `triton_op`."""
    source = read_kernel(kernel)
    made = []
    for ship in op.ship:
        for launch in launches:
            binding = _Binding(op, kernel, source, ship, launch, arguments or {})
            made += [binding.primitive(grid, hinted) for hinted in launch.hints]
    variants = [p.variant for p in made]
    twice = next((v for v in variants if variants.count(v) > 1), None)
    if twice is not None:
        raise DeclarationError(
            f"op {op.name}: two launches make the variant {twice}; give each Launch a name"
        )
    return tuple(made)


def expand(tree: Any, words: Mapping[str, Any]) -> Any:
    """`tree` with the strings of `words` replaced, below heads that take expressions."""
    if isinstance(tree, str):
        return words.get(tree, tree)
    if not isinstance(tree, list | tuple) or not tree or tree[0] in LEAVES:
        return list(tree) if isinstance(tree, tuple) else tree
    return [tree[0], *(expand(t, words) for t in tree[1:])]


class _Binding:
    """One kernel for one specialization and launch: what each of its parameters is."""

    def __init__(
        self,
        op: Op,
        kernel: str,
        source: KernelSource,
        ship: Ship,
        launch: Launch,
        arguments: Mapping[str, Any],
    ) -> None:
        self.op, self.kernel, self.source, self.ship, self.launch = op, kernel, source, ship, launch
        self.attrs = {a.name: ship.attrs.get(a.name, a.default) for a in op.attrs}
        self.sizes = _sizes(op)
        self.values = self._values()
        self.arguments = arguments
        self._check_names()
        self.constants = {p.name: self._constant(p) for p in source.parameters if self._is_constant(p)}
        self.words: dict[str, Any] = {d: ["dim", d] for d in self.sizes}
        self.words |= {k: v for k, v in self.constants.items() if isinstance(v, int)}

    def _values(self) -> dict[str, Any]:
        """Every name that a parameter may have, and what it then is; a pointer is `(operand, access)`."""
        found: dict[str, Any] = {}
        for t in self.op.tensors:
            found |= {f"{t.name}_stride": ["stride", t.name], f"{t.name}_colstride": ["colstride", t.name]}
            found[t.name] = (t.name, "write" if t.role == "out" else "read")
            if t.role == "inout":
                found[f"{t.name}_out"] = (t.name, "write")
                found |= {f"{t.name}_out_{kind}": [kind, t.name] for kind in ("stride", "colstride")}
        found |= {d: ["dim", d] for d in self.sizes}
        return found | {s.name: ["arg", s.name] for s in self.op.scalars}

    def _check_names(self) -> None:
        known = {p.name for p in self.source.parameters}
        for name in (*self.launch.constants, *self.arguments):
            if name not in known:
                raise self._error(
                    f"{name!r} is no parameter of the kernel; it has {', '.join(sorted(known))}"
                )
        taken = [p for p in self.source.parameters if not self._is_constant(p)]
        pointed = {value for p in taken if isinstance(value := self._value(p), tuple)}
        for t in self.op.tensors:
            sides = {"in": ("read",), "out": ("write",), "inout": ("read", "write")}[t.role]
            for access in sides:
                if (t.name, access) not in pointed and t.name not in self.ship.absent:
                    name = f"{t.name}_out" if (t.role, access) == ("inout", "write") else t.name
                    verb = "read" if access == "read" else "written"
                    raise self._error(
                        f"operand {t.name} is {verb} by no parameter; name one {name}, or map one"
                    )

    def _is_absent(self, name: str) -> bool:
        """Whether the parameter belongs to an operand that this specialization leaves out."""
        sides = [f"{t}{end}" for t in self.ship.absent for end in ENDINGS]
        return name in sides or self.arguments.get(name) in sides

    def _is_constant(self, p: KernelParameter) -> bool:
        return (
            p.is_constexpr
            or p.name in self.launch.constants
            or p.name in self.attrs
            or self._is_absent(p.name)
        )

    def _constant(self, p: KernelParameter) -> Any:
        if p.name in self.launch.constants:
            return self.launch.constants[p.name]
        if self._is_absent(p.name):
            return None
        match self.arguments.get(p.name, ["attr", p.name]):
            case ["attr", str(name)] if name in self.attrs:
                return self.attrs[name]
            case ["present" | "absent" as head, str(name)] if name in {t.name for t in self.op.tensors}:
                return (name in self.ship.absent) == (head == "absent")
        if p.default is MISSING:
            raise self._error(f"constant {p.name} has no value; give Launch(constants={{{p.name!r}: …}})", p)
        return p.default

    def _fixed(self) -> Iterator[Pred]:
        """What must hold for a size, a stride or a number that was made a constant."""
        for name, value in self.launch.constants.items():
            expr = self.values.get(str(self.arguments.get(name, name)))
            if isinstance(expr, list):
                yield ["eq", expr, value]

    def _value(self, p: KernelParameter) -> Any:
        """What a runtime parameter is: `(operand, access)`, or an expression."""
        given = self.arguments.get(p.name, p.name)
        if not isinstance(given, str):
            return expand(given, {d: ["dim", d] for d in self.sizes})
        if given in self.values:
            return self.values[given]
        near = difflib.get_close_matches(given, self.values, 3) or list(self.values)
        raise self._error(
            f"parameter {given!r} is no operand, size, stride, scalar or constant of the op; did you mean "
            f"{', '.join(near)}? Otherwise map it: arguments={{{p.name!r}: …}}",
            p,
        )

    def _error(self, message: str, p: KernelParameter | None = None) -> DeclarationError:
        where = self.source.location if p is None else self.source.at(p)
        return DeclarationError(f"op {self.op.name}: {message}", where)

    def primitive(self, grid: Sequence[Any], hinted: bool) -> CudaPrimitive:
        """The table row."""
        params = tuple(self._param(p, hinted) for p in self.source.parameters if p.name not in self.constants)
        parts = [variant_name(self.ship), self.launch.label, "" if hinted else "unaligned"]
        launch = self.launch
        return CudaPrimitive(
            op=self.op.name,
            variant="_".join(p for p in parts if p),
            kernel=self.kernel,
            params=params,
            constants=self.constants,
            grid=self._grid(grid),
            when=self._when(params, hinted),
            priority=2 * launch.priority + hinted,
            num_warps=launch.warps,
            num_stages=launch.stages,
            options=launch.options,
            min_sm=launch.min_sm,
            max_sm=launch.max_sm,
            mode=launch.mode,
            budget=launch.budget,
        )

    def _param(self, p: KernelParameter, hinted: bool) -> Pointer | Number:
        value = self._value(p)
        if isinstance(value, tuple):
            operand, access = value
            return self._pointer(p, operand, access, hinted)
        head = value[0] if isinstance(value, list) else ""
        unit: Unit = HINT if hinted and self._is_multiple(head, value) else 1
        if head == "arg":
            scalar = next((s for s in self.op.scalars if s.name == value[1]), None)
            if scalar is None:
                raise self._error(
                    f"parameter {p.name} is mapped to {value[1]!r}, which is no scalar operand", p
                )
            return Number(p.name, scalar.dtype.name, value)  # type: ignore[arg-type]  # checked when compiled
        # A size fits 32 bits; strides and what is computed may not.
        return Number(
            p.name, "i32" if head == "dim" else "i64", self._checked(parse_expr, value, p.name), unit
        )

    def _pointer(self, p: KernelParameter, operand: str, access: Any, hinted: bool) -> Pointer:
        tensor = next(t for t in self.op.tensors if t.name == operand)
        dtype = signature.resolve(self.op, tensor, self.ship.dtypes)
        return Pointer(p.name, operand, dtype.name, access, HINT if hinted else dtype.bytes)

    def _is_multiple(self, head: str, value: Any) -> bool:
        """Sizes along rows, and strides of rows that are as wide: what real tensors have in multiples of
        16.
        """
        if head == "dim":
            return any(t.dims[-1] == value for t in self.op.tensors) and value[1] != self.op.rows
        if head != "stride":
            return False
        tensor = next((t for t in self.op.tensors if t.name == value[1]), None)
        return tensor is not None and len(tensor.dims) > 1 and _is_width(tensor.dims[-1])

    def _when(self, params: Sequence[Pointer | Number], hinted: bool) -> Pred:
        tests: list[Any] = ["and", *type_predicates(self.op, self.ship), *self._fixed()]
        if self.launch.when is not True:
            tests.append(self._checked(parse_pred, expand(self.launch.when, self.words), "when"))
        for p in params if hinted else ():
            if isinstance(p, Number):
                test = ["divisible", p.value, HINT] if p.divisible_by == HINT else None
            else:
                test = ["aligned", p.operand, HINT]
            if test is not None and test not in tests:
                tests.append(test)
        return tests

    def _grid(self, grid: Sequence[Any]) -> tuple[Expr, Expr, Expr]:
        if not 1 <= len(grid) <= 3:
            raise self._error(f"the grid has {len(grid)} expressions, expected one to three")
        sizes = [self._checked(parse_expr, expand(g, self.words), "grid") for g in grid]
        x, y, z = (*sizes, 1, 1)[:3]
        return x, y, z

    def _checked(self, parse: Callable[[Any], Any], tree: Any, where: str) -> Any:
        """The tree, if it is an expression or predicate over what the op has."""
        try:
            parsed = parse(tree)
        except Mismatch as wrong:
            legal = ", ".join(self.words)
            raise self._error(
                f"{where} has {shown(wrong.found)}, expected {wrong.expected}; names here are {legal}"
            ) from None
        known = {"dim": list(self.sizes), "arg": [s.name for s in self.op.scalars], "attr": list(self.attrs)}
        for head, name in names(parsed):
            legal_names = known.get(head, [t.name for t in self.op.tensors])
            if name not in legal_names:
                raise self._error(f"{where} has [{head!r}, {name!r}]; legal are {', '.join(legal_names)}")
        return tree


def _sizes(op: Op) -> dict[str, None]:
    """The op's dimensions, in the order its shapes name them."""
    found: dict[str, None] = {}

    def visit(expr: Any) -> Iterator[str]:
        if isinstance(expr, list | tuple):
            yield from (str(expr[1]),) if expr[0] == "dim" else (n for e in expr[1:] for n in visit(e))

    for t in op.tensors:
        found |= dict.fromkeys(n for d in t.dims for n in visit(d))
    return found


def _is_width(expr: Any) -> bool:
    """A dimension, or a multiple of one: not a fraction, as rows of scales have."""
    return isinstance(expr, list) and (
        expr[0] == "dim" or (expr[0] == "mul" and any(map(_is_width, expr[1:])))
    )
