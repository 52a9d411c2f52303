"""Manifest entries and backends for tests of everything that writes, verifies or compares artifact trees."""

from __future__ import annotations

import hashlib
from typing import Any

from kiln.runtime.proof import measured_resources, read_artifact
from kiln.tests.cubins import Compiled, compiled, shared_object

Json = dict[str, Any]

EXACT = {"kind": "exact", "rel_l2": 0.0, "max_eps": 0.0}

C_SOURCE = """
typedef long long i64;
i64 doubled(void *const *p, const i64 *i, const double *f, i64 begin, i64 end) {
  const float *x = p[0]; float *y = p[1];
  for (i64 k = begin * i[0]; k < end * i[0]; k++) y[k] = x[k] + x[k];
  return 0;
}
i64 scaled_sum(void *const *p, const i64 *i, const double *f, i64 begin, i64 end) {
  const float *x = p[0]; float *y = p[1];
  for (i64 k = begin * i[0]; k < end * i[0]; k++) y[k] = x[k] * (float)f[0];
  return 0;
}
"""


def signature() -> Json:
    """SIG of an op with an input row, an output row and a number."""
    tensor: Json = {
        "kind": "tensor",
        "shape": [["dim", "M"], ["dim", "N"]],
        "layout": "rows",
        "optional": False,
        "doc": "",
    }
    return {
        "family": "KERNEL-EW-NORM-ACT",
        "kind": "op",
        "rows": "M",
        "width": "N",
        "operands": [
            {**tensor, "name": "x", "role": "in", "dtype": "f32"},
            {**tensor, "name": "y", "role": "out", "dtype": "f32"},
            {
                "name": "s",
                "kind": "scalar",
                "dtype": "f32",
                "default": 2.0,
                "minimum": None,
                "positive": False,
                "doc": "",
            },
        ],
        "returns": ["y"],
        "attrs": [],
        "constraints": [],
        "contract": EXACT,
        "doc": "",
    }


def _pointer(name: str, dtype: str, access: str) -> Json:
    return {"name": name, "kind": "ptr", "dtype": dtype, "operand": name, "access": access, "align": 16}


def _scalar(name: str, dtype: str, value: object) -> Json:
    return {"name": name, "kind": "scalar", "dtype": dtype, "value": value, "divisible_by": 1}


_PARAMS: dict[str, list[Json]] = {
    "scaled_sum": [_scalar("n", "i32", ["dim", "N"]), _scalar("s", "f32", ["arg", "s"])],
    "spilling": [_scalar("k", "i32", 4)],
    "doubled": [_scalar("s", "f64", ["arg", "s"]), _scalar("n", "i64", ["dim", "N"])],
}


def params(name: str) -> list[Json]:
    """The parameters of a kernel of cubin_kernels.py, hidden ones included."""
    out = "bf16" if name == "scaled_sum" else "f32"
    hidden = [{"name": n, "kind": "null", "dtype": "ptr"} for n in ("global_scratch", "profile_scratch")]
    return [_pointer("x", "f32", "read"), _pointer("y", out, "write"), *_PARAMS[name], *hidden]


def _entry(op: str, variant: str, entry: str, file: str, data: bytes) -> Json:
    return {
        "op": op,
        "variant": variant,
        "tier": "generated",
        "mode": "exact",
        "entry": entry,
        "file": file,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "inputs_digest": hashlib.sha256(f"{op}.{variant}".encode()).hexdigest(),
        "toolchain": {},
        "grid": [["dim", "M"], 1, 1],
        "cluster": [1, 1, 1],
        "launch": {},
        "scratch": [],
        "when": True,
        "priority": 0,
        "numerics": {"contract": EXACT, "selftest": {"seed": 1, "shape": {"M": 2, "N": 64}}},
        "specialization": {},
    }


def cuda_kernel(made: Compiled, op: str | None = None, variant: str = "generic") -> Json:
    """KERNEL entry that truly describes a compiled cubin."""
    op = op or made.name
    spills = 64 if made.name == "spilling" else 0
    resources = measured_resources(read_artifact(made.target, made.data), made.name)
    resources |= {"spill_stores": spills, "spill_loads": spills}
    return {
        **_entry(op, variant, made.name, f"{op}.{variant}.cubin", made.data),
        "params": params(made.name),
        "block": [made.threads, 1, 1],
        "shared_bytes": made.shared,
        "isa": None,
        "resources": resources,
        "budget": {name: 2 * value for name, value in resources.items()},
    }


def cpu_kernel(
    entry: str, target: str = "cpu-x86_64", source: str = C_SOURCE, *options: str
) -> tuple[Json, bytes]:
    """KERNEL entry and shared object of a CPU kernel of `source`."""
    data = shared_object(source, f"{target.removeprefix('cpu-')}-linux-gnu.2.17", *options)
    code = measured_resources(read_artifact(target, data), entry)
    tier, features = ("x86-64", ["sse2"]) if target == "cpu-x86_64" else ("neon", ["asimd"])
    entries = {
        **_entry(entry, "generic", entry, "rows.so", data),
        "params": [p for p in params(entry) if p["kind"] != "null"],
        "block": [1, 1, 1],
        "shared_bytes": 0,
        "isa": {"tier": tier, "features": features},
        "resources": code,
        "budget": {"code_bytes": 65536},
    }
    return entries, data


def manifest(target: str, kernels: list[Json], sources: dict[str, bytes] | None = None) -> Json:
    """MANIFEST.json as a value."""
    return {
        "schema": 1,
        "abi": 1,
        "target": target,
        "toolchain": {"triton": "3.9.0"},
        "ops": {k["op"]: signature() for k in kernels},
        "kernels": sorted(kernels, key=lambda k: (k["op"], k["variant"])),
        "recipes": [],
        "sources": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in (sources or {}).items()
        },
    }


def cuda_tree(target: str, *names: str) -> tuple[Json, dict[str, bytes]]:
    """A manifest of real cubins, and its files."""
    made = [compiled()[name, target] for name in names or ("doubled", "scaled_sum")]
    kernels = [cuda_kernel(m) for m in made]
    return manifest(target, kernels), {k["file"]: m.data for k, m in zip(kernels, made, strict=True)}
