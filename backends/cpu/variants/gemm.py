"""CPU realizations of the matrix products: one entry an op, told the element types by number.

Every mix is a variant of its own in the manifest, over the same code. `fast` variants stand where exact
order costs speed: f32 activations (fused multiply-adds), few rows of x (dot products along k), and bf16 where
the CPU has a dot product for it that is worth having. `gemm_fma.py` and `gemm_amx.py` have more of them.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from kiln.backends.cpu.primitive import CpuNumber, CpuPointer, CpuPrimitive
from kiln.ir.dtypes import BF16, F16, F32, DType
from kiln.ir.spec import Contract
from kiln.recipes.gemm import ENVELOPE
from kiln.recipes.gemm_packed import LANES

Expr: TypeAlias = Any
Layout: TypeAlias = Literal["bt", "nn", "packed"]

ROWS, COLS, DEPTH = 192, 96, 128
"""A tile's rows and columns, both multiples of what any tier keeps in registers; steps of k that are widened
at once. 176 KiB of stack, of which the panel (48 KiB) and the rows of x (4 KiB) are used again at once."""
TYPE_CODES = {F32: 0, BF16: 1, F16: 2}
"""The template's TYPE_F32 …"""
MODE_CODES = {"exact": 0, "fast": 1}
FMA_TIERS = ("x86-64-v3", "x86-64-v4", "neon")
DOT_TIERS = ("x86-64-v4-bf16",)
ON_EVERY_TIER = Contract("exact_on_target", ENVELOPE.rel_l2, ENVELOPE.max_eps)
"""Tiers, layouts and blocks agree to the bit; how far that is from the real sum is the op's envelope."""
M: Expr = ["dim", "M"]
N: Expr = ["dim", "N"]
B: Expr = ["dim", "B"]


@dataclass(frozen=True)
class Mix:
    """Element types of x, weight and out."""

    x: DType
    weight: DType
    out: DType

    @property
    def name(self) -> str:
        """The variant: equal types are said once."""
        names = [self.x.name]
        names += [] if self.weight is self.x else [f"{self.weight.name}w"]
        names += [] if self.out is self.x else [self.out.name]
        return "_".join(names)


MIXES = (
    Mix(BF16, BF16, BF16),
    Mix(BF16, BF16, F32),
    Mix(F16, F16, F16),
    Mix(F16, F16, F32),
    Mix(F32, F32, F32),
    Mix(F32, BF16, F32),
    Mix(F32, F16, F32),
)
LAYOUTS: dict[str, Layout] = {"matmul_bt": "bt", "matmul": "nn", "matmul_packed": "packed"}


def fast_tiers(op: str, mix: Mix) -> tuple[str, ...]:
    """The ISA tiers on which any order is faster: elsewhere the fast mode runs the exact variant."""
    fused = LAYOUTS[op] == "bt" or mix.x is F32
    return (*(FMA_TIERS if fused else ()), *(DOT_TIERS if mix.x is mix.weight is BF16 else ()))


def product(op: str, mix: Mix, mode: Literal["exact", "fast"]) -> CpuPrimitive:
    """The entry that takes any number of rows."""
    types = {"x": mix.x, "weight": mix.weight, "out": mix.out}
    strides: dict[str, Expr] = {t: ["stride", t] for t in types}
    if LAYOUTS[op] == "packed":
        strides["weight"] = 0
    return CpuPrimitive(
        op=op,
        variant=mix.name if mode == "exact" else f"{mix.name}_fast",
        template="gemm.c.j2",
        entry=f"kiln_{op}",
        params=(
            *(CpuPointer(t, t, d.name, d.bytes, "write" if t == "out" else "read") for t, d in types.items()),
            CpuNumber("M", "i64", M),
            CpuNumber("N", "i64", N),
            CpuNumber("K", "i64", ["dim", "K"]),
            *(CpuNumber(f"{t}_stride", "i64", s) for t, s in strides.items()),
            *(CpuNumber(f"{t}_type", "i64", TYPE_CODES[d]) for t, d in types.items()),
            CpuNumber("mode", "i64", MODE_CODES[mode]),
        ),
        grid=["mul", ["cdiv", M, ROWS], ["cdiv", N, COLS]],
        when=["and", *(["dtype", t, d.name] for t, d in types.items())],
        constants={"layout": LAYOUTS[op], "rows": ROWS, "cols": COLS, "depth": DEPTH},
        mode=mode,
        contract=ENVELOPE if mode == "fast" else ON_EVERY_TIER,
        tiers=fast_tiers(op, mix) if mode == "fast" else (),
    )


def _batched(op: str, mix: Mix) -> CpuPrimitive:
    """One product after another: an entry of its own around that of one."""
    one = product("matmul_bt", mix, "exact")
    own: dict[str, Expr] = {
        t: ["mul", rows, ["stride", t]] for t, rows in (("x", M), ("weight", N), ("out", M))
    }
    strides: dict[str, Expr] = {}
    if op == "matmul_bt_heads":
        own |= {t: ["stride", t] for t in ("x", "out")}
        strides = {f"{t}_stride": ["mul", B, ["stride", t]] for t in ("x", "out")}
    numbers = (
        replace(p, value=strides.get(p.name, p.value)) if isinstance(p, CpuNumber) else p for p in one.params
    )
    return replace(
        one,
        op=op,
        template="gemm_batched.c.j2",
        entry=f"kiln_{op}",
        params=(*numbers, *(CpuNumber(f"{t}_batch", "i64", own[t]) for t in own)),
        grid=["mul", B, one.grid],
    )


def _pack(dtype: DType) -> CpuPrimitive:
    return CpuPrimitive(
        op="matmul_pack",
        variant=dtype.name,
        template="gemm_pack.c.j2",
        entry=f"kiln_matmul_pack_{dtype.name}",
        params=(
            CpuPointer("weight", "weight", dtype.name, dtype.bytes),
            CpuPointer("packed", "packed", dtype.name, dtype.bytes, "write"),
            CpuNumber("N", "i64", N),
            CpuNumber("K", "i64", ["dim", "K"]),
            CpuNumber("weight_stride", "i64", ["stride", "weight"]),
        ),
        grid=["cdiv", N, LANES],
        when=["dtype", "weight", dtype.name],
        constants={"bytes": dtype.bytes},
    )


def _primitives() -> tuple[CpuPrimitive, ...]:
    products = [product(op, mix, "exact") for op in LAYOUTS for mix in MIXES]
    fast = [product(op, mix, "fast") for op in LAYOUTS for mix in MIXES if fast_tiers(op, mix)]
    alike = [mix for mix in MIXES if mix.x is mix.weight is mix.out]
    batches = [_batched(op, mix) for op in ("matmul_bt_batched", "matmul_bt_heads") for mix in alike]
    return (*products, *fast, *batches, *(_pack(d) for d in TYPE_CODES))


PRIMITIVES: tuple[CpuPrimitive, ...] = _primitives()
