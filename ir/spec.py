"""Declarations as data: what an op is, without how it is computed anywhere.

An `Op` has operands (tensors and scalars), compile-time attributes, a numerics contract and either a *body*
(an expressible op: written in `kiln.ir.language`, from which oracle, C and Triton come) or a *reference* (a
primitive op: NumPy, with hand-scheduled kernels elsewhere). A `Recipe` is an Op whose body calls other ops.
Importing this module needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kiln.ir.dtypes import DType

Expr = int | list["Expr | str"]
"""A closed integer expression, as JSON: 3, ["dim", "N"], ["mul", 2, ["dim", "N"]], ["cdiv", a, b],
["roundup", a, b] …
"""

ANY = 0
"""Among the widths of a Ship: every width that is not named."""
Role = Literal["in", "inout", "out"]
Layout = Literal["rows", "dense", "strided", "nvfp4_128x4"]
"""`rows`: inner stride 1, any row stride. `dense`: contiguous. `strided`: any row and column stride.
`nvfp4_128x4`: swizzled scale blocks.
"""


@dataclass(frozen=True)
class DTypeVar:
    """An element type chosen per call; operands that share the variable share the type."""

    name: str
    choices: tuple[DType, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor operand. `shape` holds dimension names or closed expressions over them."""

    name: str
    dtype: DType | DTypeVar
    shape: tuple[Expr | str, ...]
    role: Role = "in"
    layout: Layout = "rows"
    optional: bool = False
    """An absent (None) operand; the body sees None."""
    doc: str = ""

    @property
    def dims(self) -> tuple[Expr, ...]:
        """The shape as closed expressions."""
        return tuple(["dim", d] if isinstance(d, str) else d for d in self.shape)


@dataclass(frozen=True)
class Scalar:
    """A number given at each call."""

    name: str
    dtype: DType
    default: float | int | None = None
    minimum: float | None = None
    """Smallest legal value; `positive` excludes the bound itself."""
    positive: bool = False
    doc: str = ""


@dataclass(frozen=True)
class Attr:
    """A compile-time constant of a call: each value is a variant of its own."""

    name: str
    choices: tuple[bool | int | str, ...]
    default: bool | int | str
    doc: str = ""


@dataclass(frozen=True)
class Contract:
    """The numerics promise (DESIGN §9)."""

    kind: Literal["exact", "exact_on_target", "envelope"] = "exact"
    rel_l2: float = 0.0
    """Bound on the relative L2 distance to the float64 oracle (envelope only)."""
    max_eps: float = 0.0
    """Bound on the worst element, in epsilons of the output type (envelope only)."""


@dataclass(frozen=True)
class Ship:
    """One group of specializations worth shipping: element types, attribute values, row widths.

    Names no target: each backend decides what artifacts serve these.
    """

    dtypes: Mapping[str, DType] = field(default_factory=dict)
    attrs: Mapping[str, bool | int | str] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    absent: tuple[str, ...] = ()
    """Optional operands left out."""
    modes: tuple[Literal["exact", "fast"], ...] = ("exact",)
    """`fast` adds a kernel with native functions and free order, under an envelope, where it is measurably
    faster.
    """
    rare: bool = False
    """Kept out of backends where each kernel costs many kilobytes (a cubin: 15 KB for each of ten
    targets).
    """
    latency: bool = False
    """Whether calls of few rows are worth kernels of their own."""
    unaligned: bool = False
    """Whether operands that are not multiples of 16 bytes and elements are worth a kernel; else such a
    call is refused on CUDA.
    """


@dataclass(frozen=True)
class Step:
    """One call of a pipeline: operands of the step's op bound to operands of the pipeline, scalars to
    scalars.
    """

    op: Op
    bind: Mapping[str, str | None]
    scalars: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """A named operation. See the module docstring."""

    name: str
    family: str
    """The row of the kernel-family matrix it belongs to."""
    operands: tuple[Tensor | Scalar, ...]
    returns: tuple[str, ...] = ()
    """Names of the written operands in the order they are returned; default: declared order."""
    attrs: tuple[Attr, ...] = ()
    rows: str = "M"
    """The dimension whose rows are computed independently of each other."""
    width: str = "N"
    """The dimension along a row."""
    constraints: tuple[tuple[list[Any], str], ...] = ()
    """(predicate over dims, sentence) pairs that every call must satisfy."""
    contract: Contract = Contract()
    ship: tuple[Ship, ...] = ()
    doc: str = ""
    body: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    domain: Callable[..., Mapping[str, Any]] | None = None
    """From random inputs (and scalars) by name to those that calls have, where not every number makes sense:
    for tests of an envelope, which says nothing outside it."""
    is_recipe: bool = False
    steps: Callable[[Mapping[str, Any]], tuple[Step, ...]] | None = None
    """A pipeline, from attribute values: calls over different sets of rows, where one body over one row
    cannot say it.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensor operands in declared order."""
        return tuple(o for o in self.operands if isinstance(o, Tensor))

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """Scalar operands in declared order."""
        return tuple(o for o in self.operands if isinstance(o, Scalar))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that are read."""
        return tuple(t for t in self.tensors if t.role != "out")

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that are written, in return order."""
        written = {t.name: t for t in self.tensors if t.role != "in"}
        return tuple(written[n] for n in self.returns) if self.returns else tuple(written.values())
