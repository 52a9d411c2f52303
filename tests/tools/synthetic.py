"""Small trees whose artifacts are placeholders: enough for commands that read manifests and evidence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiln.runtime.manifest import canonical_json
from kiln.tests.trees import params, signature

Json = dict[str, Any]
EXACT = {"kind": "exact", "rel_l2": 0.0, "max_eps": 0.0}


def digest(name: str) -> str:
    """sha256 of a placeholder artifact."""
    return hashlib.sha256(name.encode()).hexdigest()


def kernel(op: str, variant: str = "generic", **changes: Any) -> Json:
    """A CUDA KERNEL entry of `op`; its artifact's bytes are its file name."""
    file = f"{op}.{variant}.cubin"
    return {
        "op": op,
        "variant": variant,
        "tier": "generated",
        "mode": "exact",
        "entry": op,
        "file": file,
        "bytes": len(file),
        "sha256": digest(file),
        "inputs_digest": digest(f"{op}.{variant}"),
        "toolchain": {},
        "params": params("doubled"),
        "grid": [["dim", "M"], 1, 1],
        "block": [128, 1, 1],
        "cluster": [1, 1, 1],
        "shared_bytes": 0,
        "launch": {},
        "scratch": [],
        "when": True,
        "priority": 0,
        "isa": None,
        "resources": {
            "registers": 16,
            "spill_stores": 0,
            "spill_loads": 0,
            "stack": 0,
            "static_shared": 0,
            "code_bytes": 512,
        },
        "budget": {
            "registers": 32,
            "spill_stores": 0,
            "spill_loads": 0,
            "stack": 0,
            "static_shared": 0,
            "code_bytes": 1024,
        },
        "numerics": {"contract": EXACT, "selftest": {"seed": 1, "shape": {"M": 2, "N": 64}}},
        "specialization": {},
        **changes,
    }


def plan(op: str, *steps: str) -> Json:
    """A plan of `op` that calls `steps` one after another."""
    bind = {"x": "x", "y": "y"}
    return {
        "op": op,
        "variant": "composite",
        "tier": "composite",
        "mode": "exact",
        "when": True,
        "priority": 0,
        "temps": [],
        "steps": [{"op": s, "bind": bind, "args": {"s": ["arg", "s"]}, "attrs": {}} for s in steps],
    }


def manifest(target: str, kernels: Sequence[Json], plans: Sequence[Json] = ()) -> Json:
    """MANIFEST.json as a value."""
    return {
        "schema": 1,
        "abi": 1,
        "target": target,
        "toolchain": {"triton": "3.9.0"},
        "ops": {e["op"]: signature() for e in [*kernels, *plans]},
        "kernels": list(kernels),
        "recipes": list(plans),
        "sources": {},
    }


def write_tree(root: Path, *manifests: Json, evidence: Mapping[str, Json] | None = None) -> Path:
    """A tree of these manifests; `evidence` maps targets to the `artifacts` of their EVIDENCE.json."""
    targets = {}
    for m in manifests:
        folder = root / m["target"]
        folder.mkdir(parents=True)
        data = canonical_json(m)
        (folder / "MANIFEST.json").write_bytes(data)
        for k in m["kernels"]:
            (folder / k["file"]).write_text(k["file"])
        targets[m["target"]] = {
            "manifest": f"{m['target']}/MANIFEST.json",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    for target, artifacts in (evidence or {}).items():
        value = {"schema": 1, "target": target, "artifacts": artifacts}
        (root / target / "EVIDENCE.json").write_text(json.dumps(value))
    (root / "INDEX.json").write_bytes(canonical_json({"schema": 1, "generation": 1, "targets": targets}))
    return root


def ran(**changes: Any) -> Json:
    """A `ran` entry."""
    return {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "date": "2026-01-31",
        "cases": 3,
        "max_error": 0,
        "contract_met": True,
        **changes,
    }


def interpreted(**changes: Any) -> Json:
    """An `interpreted` entry."""
    return {
        "triton": "3.9.0",
        "date": "2026-01-31",
        "cases": 3,
        "max_error": 0,
        "contract_met": True,
        **changes,
    }


def measured(op: str, variant: str = "generic", **changes: Any) -> Json:
    """A `measured` entry of kernel op.variant."""
    return {
        "op": op,
        "variant": variant,
        "digest": digest(f"{op}.{variant}.cubin"),
        "device": "NVIDIA H200",
        "driver": "580.1",
        "date": "2026-01-31",
        "shape": {"M": 16, "N": 5120},
        "median_us": 2.5,
        "spread_us": 0.1,
        "bytes": 1000,
        "flops": 0,
        "limit_us": 2.0,
        "limit_from": "copy of the same bytes",
        "ratio_to_limit": 0.8,
        "peers": {"torch": {"version": "2.9", "median_us": 5.0}},
        **changes,
    }
