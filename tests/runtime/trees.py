"""Small synthetic trees: a handful of C kernels compiled in the session, and manifests around them as plain
dicts."""

import copy
import hashlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kiln.runtime.manifest import canonical_json
from kiln.runtime.proof import measured_resources, read_artifact

Json = Any

SOURCE = """
typedef long long i64;
typedef unsigned long long u64;

i64 kiln_scale_add(void *const *p, const i64 *n, const double *f, i64 begin, i64 end) {
  const float *x = p[0], *y = p[1];
  float *out = p[2];
  for (i64 r = begin; r < end; ++r)
    for (i64 c = 0; c < n[0]; ++c) out[r * n[3] + c] = x[r * n[1] + c] * (float)f[0] + y[r * n[2] + c];
  return 0;
}

i64 kiln_negate(void *const *p, const i64 *n, const double *f, i64 begin, i64 end) {
  const float *x = p[0];
  float *out = p[1];
  (void)f;
  for (i64 r = begin; r < end; ++r)
    for (i64 c = 0; c < n[0]; ++c) out[r * n[2] + c] = -x[r * n[1] + c];
  return 0;
}

i64 kiln_gather(void *const *p, const i64 *n, const double *f, i64 begin, i64 end) {
  const float *table = p[0];
  const int *index = p[1];
  float *out = p[2];
  (void)f;
  for (i64 r = begin; r < end; ++r) {
    if (index[r] < 0 || index[r] >= n[3]) return r + 1;
    for (i64 c = 0; c < n[0]; ++c) out[r * n[2] + c] = table[index[r] * n[1] + c];
  }
  return 0;
}

i64 kiln_accumulate(void *const *p, const i64 *n, const double *f, i64 begin, i64 end) {
  const float *x = p[0], *sum_in = p[1], *bias = p[2];
  float *sum_out = p[3];
  (void)f;
  for (i64 r = begin; r < end; ++r)
    for (i64 c = 0; c < n[0]; ++c)
      sum_out[r * n[2] + c] = sum_in[r * n[2] + c] + x[r * n[1] + c] + (bias ? bias[c] : 0);
  return 0;
}
"""
"""Four ops of the CPU ABI; no libc."""


def compile_c(folder: Path, source: str = SOURCE) -> bytes:
    """A shared object of the source for the x86-64 baseline."""
    (folder / "ops.c").write_text(source, encoding="ascii")
    options = (
        "-target x86_64-linux-gnu.2.17 -O2 -nostdlib -shared -fPIC -g0 -s -ffp-contract=off -o ops.so ops.c"
    )
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *options.split()], cwd=folder, check=True)
    return (folder / "ops.so").read_bytes()


def dim(name: str) -> Json:
    """["dim", name]"""
    return ["dim", name]


def tensor(name: str, role: str, shape: list[Json], dtype: Json = "f32", **more: Any) -> Json:
    """A tensor operand."""
    base = {"kind": "tensor", "name": name, "role": role, "dtype": dtype, "shape": shape, "layout": "rows"}
    return {**base, "optional": False, "doc": "", **more}


def scalar(name: str, dtype: str = "f32", **more: Any) -> Json:
    """A scalar operand."""
    base = {
        "kind": "scalar",
        "name": name,
        "dtype": dtype,
        "default": None,
        "minimum": None,
        "positive": False,
    }
    return {**base, "doc": "", **more}


EXACT = {"kind": "exact", "rel_l2": 0.0, "max_eps": 0.0}


def signature(operands: list[Json], returns: list[str], **more: Any) -> Json:
    """An op's signature with rows M and width N."""
    base = {"family": "KERNEL-EW-NORM-ACT", "kind": "op", "rows": "M", "width": "N", "operands": operands}
    return {**base, "returns": returns, "attrs": [], "constraints": [], "contract": EXACT, "doc": "", **more}


def pointer(
    operand: str, access: str = "read", dtype: str = "f32", align: int = 4, name: str | None = None
) -> Json:
    """A ptr parameter."""
    base = {"kind": "ptr", "name": name or f"{operand}_{access}", "dtype": dtype, "operand": operand}
    return {**base, "access": access, "align": align}


def value(name: str, expr: Json, dtype: str = "i64", divisible_by: int = 1) -> Json:
    """A scalar parameter."""
    return {"kind": "scalar", "name": name, "dtype": dtype, "value": expr, "divisible_by": divisible_by}


def kernel(op: str, variant: str, params: list[Json], data: bytes, **more: Any) -> Json:
    """A KERNEL entry for the x86-64 baseline whose bytes are `data`."""
    base = {
        "op": op,
        "variant": variant,
        "tier": "generated",
        "mode": "exact",
        "entry": f"kiln_{op}",
        "file": "ops.so",
        "inputs_digest": "0" * 64,
        "toolchain": {},
        "params": params,
        "grid": [dim("M"), 1, 1],
        "block": [1, 1, 1],
        "cluster": [1, 1, 1],
        "shared_bytes": 0,
        "launch": {},
        "scratch": [],
        "when": True,
        "priority": 0,
        "isa": {"tier": "x86-64", "features": ["sse2"]},
        "resources": {},
        "budget": {},
        "numerics": {"contract": EXACT, "selftest": {"seed": 1, "shape": {"M": 3, "N": 5}}},
        "specialization": {},
    }
    full = {**base, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **more}
    if "resources" not in more and data.startswith(b"\x7fELF"):
        full["resources"] = measured_resources(read_artifact("cpu-x86_64", data), full["entry"])
    return full


MN = [dim("M"), dim("N")]

OPS: Json = {
    "scale_add": signature(
        [
            tensor("x", "in", MN),
            tensor("y", "in", MN),
            tensor("out", "out", MN),
            scalar("alpha", default=2.0),
        ],
        ["out"],
    ),
    "negate": signature([tensor("x", "in", MN), tensor("out", "out", MN)], ["out"]),
    "gather": signature(
        [
            tensor("table", "in", [dim("V"), dim("N")]),
            tensor("index", "in", [dim("M")], "i32"),
            tensor("out", "out", MN),
        ],
        ["out"],
    ),
    "accumulate": signature(
        [
            tensor("x", "in", MN),
            tensor("sum", "inout", MN),
            tensor("bias", "in", [dim("N")], optional=True),
        ],
        ["sum"],
    ),
    "scale_negate": signature(
        [
            tensor("x", "in", MN),
            tensor("y", "in", MN),
            tensor("out", "out", MN),
            scalar("alpha", default=2.0),
        ],
        ["out"],
        kind="recipe",
    ),
}


def _n(name: str = "n") -> Json:
    return value(name, dim("N"))


def _stride(operand: str) -> Json:
    return value(f"{operand}_stride", ["stride", operand])


PARAMS: Json = {
    "scale_add": [
        pointer("x"),
        pointer("y"),
        pointer("out", "write"),
        _n(),
        _stride("x"),
        _stride("y"),
        _stride("out"),
        value("alpha", ["arg", "alpha"], "f32"),
    ],
    "negate": [pointer("x"), pointer("out", "write"), _n(), _stride("x"), _stride("out")],
    "gather": [
        pointer("table"),
        pointer("index", dtype="i32"),
        pointer("out", "write"),
        _n(),
        _stride("table"),
        _stride("out"),
        value("v", dim("V")),
    ],
    "accumulate": [
        pointer("x"),
        pointer("sum"),
        pointer("bias"),
        pointer("sum", "write"),
        _n(),
        _stride("x"),
        _stride("sum"),
    ],
}

PLAN: Json = {
    "op": "scale_negate",
    "variant": "composite",
    "tier": "composite",
    "mode": "exact",
    "when": True,
    "priority": 0,
    "temps": [{"name": "t0", "dtype": {"like": "x"}, "shape": MN}],
    "steps": [
        {
            "op": "scale_add",
            "bind": {"x": "x", "y": "y", "out": "temp:t0"},
            "args": {"alpha": ["arg", "alpha"]},
            "attrs": {},
        },
        {"op": "negate", "bind": {"x": "temp:t0", "out": "out"}, "args": {}, "attrs": {}},
    ],
}


def manifest(kernels: Iterable[Json], target: str = "cpu-x86_64", **more: Any) -> Json:
    """A manifest of the test ops around these kernels."""
    ordered = sorted(kernels, key=lambda k: (k["op"], k["variant"]))
    base = {"schema": 1, "abi": 1, "target": target, "toolchain": {"ziglang": "0.17.1"}, "ops": OPS}
    return copy.deepcopy({**base, "kernels": ordered, "recipes": [PLAN], "sources": {}, **more})


def cpu_manifest(data: bytes) -> Json:
    """The manifest of the four kernels and the plan."""
    return manifest(kernel(op, "base", params, data) for op, params in PARAMS.items())


def write_tree(root: Path, manifests: dict[str, Json], files: dict[str, bytes], generation: int = 1) -> Path:
    """Write a tree whose targets all hold `files`; manifests may be raw bytes."""
    root.mkdir(parents=True, exist_ok=True)
    targets = {}
    for target, m in manifests.items():
        data = m if isinstance(m, bytes) else canonical_json(m)
        folder = root / target
        folder.mkdir(exist_ok=True)
        (folder / "MANIFEST.json").write_bytes(data)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        targets[target] = {
            "manifest": f"{target}/MANIFEST.json",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    index = {"schema": 1, "generation": generation, "targets": targets}
    (root / "INDEX.json").write_bytes(canonical_json(index))
    return root
