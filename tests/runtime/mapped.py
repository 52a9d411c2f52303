"""A small tree for sm_90a whose kernel takes tensor maps: an op, a recipe of it, and a real cubin."""

from pathlib import Path
from typing import Any

from kiln.runtime.arrays import View, contiguous
from kiln.runtime.proof import measured_resources, read_artifact
from kiln.tests.cubins import assemble
from kiln.tests.runtime.trees import MN, dim, kernel, manifest, scalar, signature, tensor, value, write_tree

Json = Any
TARGET = "sm_90a"
PTX = """
.version 8.6
.target {arch}
.address_size 64
.visible .entry copied(.param .u32 m, .param .align 64 .b8 x[128], .param .align 64 .b8 out[128],
    .param .u64 profile) .reqntid 128, 1, 1 {{ ret; }}
"""
"""A kernel that takes maps, the first behind four bytes."""
X, EXTRA, OUT = 1 << 40, 2 << 40, 3 << 40
"""Addresses."""


def cubin(arch: str = TARGET, tool: str = "ptxas-blackwell") -> bytes:
    """The kernel, by one of the two assemblers."""
    return assemble(PTX.format(arch=arch), arch, tool)


def tensor_map(operand: str, access: str = "read", dtype: str = "bf16", **changed: Any) -> Json:
    """A tensor map of a matrix, in boxes of 64 rows of 128 bytes."""
    walked = {
        "shape": [["min", dim("M"), ["arg", "most"]], dim("N")], "strides": [["stride", operand]],
        "box": [64, 64], "swizzle": "128b", "interleave": "none", "l2": "128b", "fill": "zeros", **changed,
    }  # fmt: skip
    return {
        "kind": "tensor_map", "name": operand, "dtype": dtype, "operand": operand, "access": access,
        "map": walked,
    }  # fmt: skip


def params(**changed: Any) -> list[Json]:
    """Of the kernel; fields of x's map may differ."""
    profile = {"kind": "null", "name": "profile", "dtype": "ptr"}
    maps = [tensor_map("x", **changed), tensor_map("out", "write", shape=MN)]
    return [value("m", dim("M"), "i32"), *maps, profile]


def entry(data: bytes, variant: str = "mapped", passed: list[Json] | None = None, **more: Any) -> Json:
    """The KERNEL entry of the cubin."""
    spills = {"spill_stores": 0, "spill_loads": 0}
    resources = measured_resources(read_artifact(TARGET, data), "copied") | spills
    base = {"file": f"{variant}.cubin", "entry": "copied", "block": [128, 1, 1], "isa": None}
    given = params() if passed is None else passed
    return kernel("copied", variant, given, data, **{**base, "resources": resources, "budget": {}, **more})


OPERANDS = [
    tensor("x", "in", MN, "bf16"), tensor("extra", "in", MN, "bf16", optional=True),
    tensor("out", "out", MN, "bf16"), scalar("most", "i64", default=1 << 40),
]  # fmt: skip
TWICE = [
    tensor("x", "in", MN, "bf16"), tensor("out", "out", MN, "bf16"), scalar("most", "i64", default=4096),
]  # fmt: skip
OPS = {
    "copied": signature(OPERANDS, ["out"]),
    "copied_twice": signature(TWICE, ["out"], kind="recipe"),
}


def _step(x: str, out: str) -> Json:
    bound = {"x": x, "extra": None, "out": out}
    return {"op": "copied", "bind": bound, "args": {"most": ["arg", "most"]}, "attrs": {}}


PLAN = {
    "op": "copied_twice", "variant": "composite", "tier": "composite", "mode": "exact", "when": True,
    "priority": 0, "temps": [{"name": "between", "dtype": {"like": "x"}, "shape": MN}],
    "steps": [_step("x", "temp:between"), _step("temp:between", "out")],
}  # fmt: skip


def document(*entries: Json, target: str = TARGET) -> Json:
    """The manifest of these kernels, or of the one."""
    tools = {"ptxas": "12.9.86", "triton": "3.9.0"}
    made = entries or (entry(cubin()),)
    return manifest(made, target, ops=OPS, recipes=[PLAN], toolchain=tools)


def tree(root: Path, *entries: Json) -> Path:
    """The tree of these kernels, or of the one."""
    made = document(*entries)
    files = {k["file"]: cubin() for k in made["kernels"]}
    return write_tree(root / "tree", {TARGET: made}, files)


def matrix(at: int, rows: int = 200, columns: int = 72, stride: int | None = None) -> View:
    """A matrix of bf16 on the device."""
    strides = contiguous((rows, columns)) if stride is None else (stride, 1)
    return View(at, (rows, columns), strides, "bf16", 0, False, None)


def call(rows: int = 200, columns: int = 72, **more: Any) -> dict[str, Any]:
    """Operands of `copied`."""
    return {"x": matrix(X, rows, columns), "out": matrix(OUT, rows, columns), **more}


REFUSED: tuple[tuple[str, Json, str], ...] = (
    ("shape", [dim("M"), dim("N"), 1], "has 3 extents, 1 strides and a box of 2"),
    ("strides", [], "has 2 extents, 0 strides and a box of 2"),
    ("box", [64], "has 2 extents, 1 strides and a box of 1"),
    ("box", [64, 60], "copies rows of 120 bytes; expected a multiple of 16"),
    ("box", [64, 72], "copies rows of 144 bytes, which its swizzle does not hold; expected no more than 128"),
    ("swizzle", "64b", "copies rows of 128 bytes, which its swizzle does not hold; expected no more than 64"),
    ("swizzle", "32b", "expected no more than 32"),
    ("interleave", "16b", "is interleaved and has 2 dimensions; expected 3 and more"),
    ("shape", [dim("M"), ["arg", "least"]], "names 'least', which is no arg of the op"),
    ("strides", [["stride", "y"]], "names 'y', which is no operand of the op"),
)
"""A field of a map, a value, and what a manifest with it is told: each breaks a rule whatever the call."""
LEGAL: tuple[Json, ...] = (
    {"box": [256, 64], "l2": "none"}, {"box": [1, 8], "swizzle": "32b"}, {"box": [64, 32], "swizzle": "64b"},
    {"box": [64, 256], "swizzle": "none"}, {"fill": "nan", "l2": "256b"},
    {"shape": [1, *MN], "strides": [0, ["stride", "x"]], "box": [1, 8, 8], "interleave": "32b",
     "swizzle": "32b"},
    {"shape": [dim("N")], "strides": [], "box": [64]},
)  # fmt: skip
"""Maps that are fine."""
OUT_OF_RANGE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("a misaligned address", call(x=matrix(X + 8)), "needs x aligned to 16 bytes, found it 8 bytes off"),
    ("a misaligned output", call(out=matrix(OUT + 2)), "needs out aligned to 16 bytes, found it 2 bytes off"),
    ("rows apart by 6 bytes", call(columns=71),
     "maps x with a stride of 71, expected a multiple of 8 below 549755813888"),
    ("rows too far apart", call(x=matrix(X, stride=1 << 39)),
     "maps x with a stride of 549755813888, expected a multiple of 8 below 549755813888"),
    ("no row at all", call(most=0), "maps x with an extent of 0, expected 1 to 4294967296"),
)  # fmt: skip
"""Calls that break a rule of the driver, and why the kernel cannot run them."""
