"""Hand-scheduled CUDA realizations as data: one Triton launch (`CudaPrimitive`), or several through internal
ops (`PrimitivePlan`).

A family's `variants/<family>.py` fills these in; nothing here imports Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kiln.ir.dtypes import DTYPES
from kiln.ir.spec import Contract

Expr: TypeAlias = Any
"""A closed expression of the manifest, as JSON."""
Pred: TypeAlias = Any
"""A closed predicate of the manifest, as JSON."""
Constant: TypeAlias = bool | int | float | str
Unit: TypeAlias = Literal[1, 16]
"""What a value is known to be a multiple of."""


@dataclass(frozen=True)
class Pointer:
    """A pointer parameter: the memory of an operand, or of scratch (`scratch:NAME`)."""

    name: str
    operand: str
    dtype: str
    access: Literal["read", "write"] = "read"
    align: int = 1
    """Bytes that the kernel may assume; at least the element size is implied. 16 becomes Triton's
    divisibility hint."""

    @property
    def triton(self) -> str:
        """Its type in a Triton signature."""
        return f"*{DTYPES[self.dtype].triton}"

    @property
    def hinted(self) -> bool:
        """Whether Triton is told that the address is a multiple of 16."""
        return self.align % 16 == 0

    def json(self) -> dict[str, Any]:
        """The manifest's PARAM entry."""
        align = max(self.align, DTYPES[self.dtype].bytes)
        return {
            "name": self.name,
            "kind": "ptr",
            "dtype": self.dtype,
            "operand": self.operand,
            "access": self.access,
            "align": align,
        }


@dataclass(frozen=True)
class Number:
    """A scalar parameter computed from the call."""

    name: str
    dtype: Literal["i32", "i64", "f32", "f64"]
    value: Expr
    divisible_by: Unit = 1

    @property
    def triton(self) -> str:
        """Its type in a Triton signature."""
        return DTYPES[self.dtype].triton

    @property
    def hinted(self) -> bool:
        """Whether Triton is told that the value is a multiple of 16."""
        return self.divisible_by == 16

    def json(self) -> dict[str, Any]:
        """The manifest's PARAM entry."""
        return {
            "name": self.name,
            "kind": "scalar",
            "dtype": self.dtype,
            "value": self.value,
            "divisible_by": self.divisible_by,
        }


@dataclass(frozen=True)
class Scratch:
    """Device memory that lives for one launch."""

    name: str
    bytes: Expr
    align: int = 16
    zeroed: bool = False
    """All zeros when the launch starts; the kernel leaves it so, whatever its operands hold. Launches of one
    stream share it, so that one with `launch_pdl` touches it only behind `gdc_wait`. Else the content is
    arbitrary at the start, and nobody reads it afterwards."""

    def json(self) -> dict[str, Any]:
        """The manifest's scratch entry."""
        entry = {"name": self.name, "bytes": self.bytes, "align": self.align}
        return {**entry, "zeroed": True} if self.zeroed else entry


@dataclass(frozen=True)
class CudaPrimitive:
    """One launch of a Triton kernel: everything that compiling it and writing its manifest entry needs.

    `params` and then `constants` are the kernel's parameters in order. `when` must imply every hint of
    `params`.
    """

    op: str
    variant: str
    kernel: str
    """`module:function` of the `@triton.jit` or `@gluon.jit` kernel."""
    params: tuple[Pointer | Number, ...]
    constants: Mapping[str, Any]
    """Values of the kernel's constexprs; None for the pointer of an absent operand."""
    grid: tuple[Expr, Expr, Expr]
    """Programs; with `num_ctas` among the options each is a cluster."""
    when: Pred
    priority: int = 0
    num_warps: int = 4
    num_stages: int = 1
    options: Mapping[str, Constant] = field(default_factory=dict)
    """Further Triton options, beyond warps, stages and `enable_fp_fusion=False`."""
    scratch: tuple[Scratch, ...] = ()
    min_sm: int = 80
    """The least compute capability, as 10 * major + minor."""
    max_sm: int = 999
    """The greatest compute capability that this row is for."""
    mode: Literal["exact", "fast"] = "exact"
    hosts: Literal["none", "short", "any"] = "none"
    """Which epilogues of recipes are inlined into it; `short` ones have no exponential. Its kernel ends with
    `gemm_finish.finish`, and has the parameter `extra` after those of `params`."""
    contract: Contract | None = None
    """The kernel's own numerics contract, where the op's is not the one that it can keep."""
    budget: Mapping[str, int] = field(default_factory=dict)
    """Upper bounds on resources (registers, spill_stores, spill_loads, stack, static_shared, code_bytes) that
    differ from the backend's, which allow no spill and no stack."""

    def signature(self) -> dict[str, str]:
        """The `signature` of `triton.compiler.ASTSource`: types by parameter, "constexpr" for constants."""
        return {p.name: p.triton for p in self.params} | dict.fromkeys(self.constants, "constexpr")

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """The `attrs` of `triton.compiler.ASTSource`: divisibility hints by parameter position."""
        return {(i,): [["tt.divisibility", 16]] for i, p in enumerate(self.params) if p.hinted}

    def compile_options(self) -> dict[str, Constant]:
        """The `options` of `triton.compile`."""
        fixed: dict[str, Constant] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return fixed | {"enable_fp_fusion": False} | dict(self.options)

    def json_params(self) -> list[dict[str, Any]]:
        """The manifest's params, without Triton's hidden trailing pointers."""
        return [p.json() for p in self.params]


@dataclass(frozen=True)
class Temp:
    """An intermediate tensor of a plan."""

    name: str
    dtype: str
    shape: tuple[Expr, ...]

    def json(self) -> dict[str, Any]:
        """The manifest's temp entry."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True)
class Step:
    """One op call of a plan; operands are bound to operands of the plan's op, to `temp:NAME`, or to None."""

    op: str
    bind: Mapping[str, str | None]
    args: Mapping[str, Expr] = field(default_factory=dict)
    attrs: Mapping[str, Constant] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """The manifest's step entry."""
        return {"op": self.op, "bind": dict(self.bind), "args": dict(self.args), "attrs": dict(self.attrs)}


@dataclass(frozen=True)
class PrimitivePlan:
    """An op realized by several launches, each an internal op of its family."""

    op: str
    variant: str
    when: Pred
    temps: tuple[Temp, ...]
    steps: tuple[Step, ...]
    priority: int = 0
    mode: Literal["exact", "fast"] = "exact"

    def json(self) -> dict[str, Any]:
        """The manifest's PLAN entry."""
        return {
            "op": self.op,
            "variant": self.variant,
            "tier": "primitive",
            "mode": self.mode,
            "when": self.when,
            "priority": self.priority,
            "temps": [t.json() for t in self.temps],
            "steps": [s.json() for s in self.steps],
        }
