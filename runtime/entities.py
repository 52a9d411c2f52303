"""What a tree's documents say, as frozen dataclasses: the vocabulary that loader and compiler share.

`kiln.runtime.manifest` reads and writes them; import them from there.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from kiln.runtime.expr import Expr, Pred
from kiln.runtime.expr import names as names_in
from kiln.runtime.record import record

Json = Any


@record
class DTypeVar:
    """An element type chosen per call; operands that name the same `var` share it."""

    var: str
    choices: tuple[str, ...]


@record
class Tensor:
    """A tensor operand."""

    kind: Literal["tensor"]
    name: str
    role: Literal["in", "inout", "out"]
    dtype: str | DTypeVar
    shape: tuple[Expr, ...]
    layout: Literal["rows", "dense", "strided", "nvfp4_128x4"]
    optional: bool
    doc: str


@record
class Scalar:
    """A number given at each call; an integer scalar `k` also binds the dimension `K` where the shapes name
    it."""

    kind: Literal["scalar"]
    name: str
    dtype: str
    default: float | None
    minimum: float | None
    positive: bool
    doc: str


Operand = Tensor | Scalar


@record
class Attr:
    """A compile-time constant of a call."""

    name: str
    choices: tuple[bool | int | str, ...]
    default: bool | int | str
    doc: str


@record
class Contract:
    """The numerics promise."""

    kind: Literal["exact", "exact_on_target", "envelope"]
    rel_l2: float
    max_eps: float


@record
class Signature:
    """What callers of an op see."""

    family: str
    kind: Literal["op", "recipe"]
    rows: str
    width: str
    operands: tuple[Operand, ...]
    returns: tuple[str, ...]
    attrs: tuple[Attr, ...]
    constraints: tuple[tuple[Pred, str], ...]
    contract: Contract
    doc: str

    @cached_property
    def names(self) -> Mapping[str, frozenset[str]]:
        """What expressions of its kernels and plans may name: dim, arg, attr and operand."""
        shapes = (e for t in self.tensors for e in t.shape)
        dims = {name for e in shapes for head, name in names_in(e) if head == "dim"}
        return {
            "dim": frozenset(dims | {self.rows, self.width}),
            "arg": frozenset(o.name for o in self.scalars),
            "attr": frozenset(a.name for a in self.attrs),
            "operand": frozenset(t.name for t in self.tensors),
        }

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensor operands in declared order."""
        return tuple(o for o in self.operands if isinstance(o, Tensor))

    @cached_property
    def scalars(self) -> tuple[Scalar, ...]:
        """Scalar operands in declared order."""
        return tuple(o for o in self.operands if isinstance(o, Scalar))


@record
class TensorMap:
    """How the copy engine (TMA) walks an operand; outermost dimension first.

    Attributes:
        shape: elements.
        strides: elements, of all dimensions but the innermost, whose stride is 1.
        box: elements that one copy takes.
        swizzle, interleave: how they lie in shared memory.
        l2: bytes that L2 loads at once.
        fill: what copies hold beyond the shape.
    """

    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]
    swizzle: Literal["none", "32b", "64b", "128b"]
    interleave: Literal["none", "16b", "32b"]
    l2: Literal["none", "64b", "128b", "256b"]
    fill: Literal["zeros", "nan"]


@record
class Param:
    """One parameter of an entry, in order. Which fields are set depends on `kind`:

    ptr: operand, access, align. scalar: value, divisible_by. null: none (passed as 0). dropped: value,
        equals (not passed). tensor_map: operand, access, map (passed by value).
    """

    kind: Literal["ptr", "scalar", "null", "dropped", "tensor_map"]
    name: str
    dtype: str
    operand: str | None = None
    access: Literal["read", "write"] | None = None
    align: int | None = None
    value: Expr = None
    divisible_by: int | None = None
    equals: int | None = None
    map: TensorMap | None = None


@record
class Scratch:
    """Device memory that a launch needs and nobody sees afterwards.

    Attributes:
        zeroed: all zeros when a launch starts, and left so by the kernel; in documents `true` or not there.
            Else its bytes are arbitrary.
    """

    name: str
    bytes: Expr
    align: int
    zeroed: bool = False


@record
class Isa:
    """The CPU tier a kernel was compiled for and every feature it needs, as /proc/cpuinfo spells them."""

    tier: str
    features: tuple[str, ...]


@record
class Selftest:
    """Seeded inputs on which the kernel must meet its contract."""

    seed: int
    shape: Mapping[str, int]


@record
class Numerics:
    """A kernel's own contract and self-test."""

    contract: Contract
    selftest: Selftest


@record
class Kernel:
    """One launchable entry of an artifact: identity, launch contract, selection, resources, numerics."""

    op: str
    variant: str
    tier: Literal["fused", "fast", "generated", "primitive"]
    mode: Literal["exact", "fast"]
    entry: str
    file: str
    bytes: int
    sha256: str
    inputs_digest: str
    toolchain: Mapping[str, str]
    params: tuple[Param, ...]
    grid: tuple[Expr, Expr, Expr]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    launch: Mapping[str, bool]
    scratch: tuple[Scratch, ...]
    when: Pred
    priority: int
    isa: Isa | None
    resources: Mapping[str, int]
    budget: Mapping[str, int]
    numerics: Numerics
    specialization: Mapping[str, Json]


@record
class Like:
    """The element type of an operand."""

    like: str


@record
class Temp:
    """An intermediate tensor of a plan."""

    name: str
    dtype: str | Like
    shape: tuple[Expr, ...]


@record
class Step:
    """One call of a plan: operands of `op` bound to operands of the plan, temps, or nothing."""

    op: str
    bind: Mapping[str, str | None]
    args: Mapping[str, Expr]
    attrs: Mapping[str, bool | int | str]


@record
class Plan:
    """A way to run an op as several calls of others."""

    op: str
    variant: str
    tier: Literal["composite", "primitive"]
    mode: Literal["exact", "fast"]
    when: Pred
    priority: int
    temps: tuple[Temp, ...]
    steps: tuple[Step, ...]


@record
class Source:
    """A file that ships beside the artifacts and is never loaded."""

    bytes: int
    sha256: str


@record
class Manifest:
    """Everything needed to verify and launch every artifact of a target."""

    schema: int
    abi: int
    target: str
    toolchain: Mapping[str, str]
    ops: Mapping[str, Signature]
    kernels: tuple[Kernel, ...]
    recipes: tuple[Plan, ...]
    sources: Mapping[str, Source]

    def files(self) -> dict[str, Source]:
        """Every file of the target's folder that the manifest accounts for, with its size and digest."""
        return {**{k.file: Source(k.bytes, k.sha256) for k in self.kernels}, **self.sources}


@record
class IndexEntry:
    """Where a target's manifest is, and what it must be."""

    manifest: str
    bytes: int
    sha256: str


@record
class Index:
    """The root of trust of a tree."""

    schema: int
    generation: int
    targets: Mapping[str, IndexEntry]
