"""Kernels broken on purpose: the conformance run must fail for every one of them.

A mutation is a change to the generated C or Triton of one op, small enough that a careless comparison would
let it pass. Where its pattern is not in the text any more, that is an error: the table is to be updated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from kiln.compiler.catalog import OWN, Loaded, load
from kiln.ir.spec import Op
from kiln.runtime.cpu import CpuDevice
from kiln.tools.campaign import Campaign, Result
from kiln.tools.interpreted import campaign, origins
from kiln.tools.memory import HostRig
from kiln.tools.shelf import Shelf

CATALOGS = (OWN,)
T = TypeVar("T")


@dataclass(frozen=True)
class Mutation:
    """A change to the first place of an op's kernel that matches."""

    name: str
    language: Literal["c", "triton"]
    op: str
    pattern: str
    replacement: str
    variant: str = ""
    """What the kernel's name starts with, where it is not the op's first."""

    def apply(self, text: str) -> str:
        """The changed text.

        Raises:
            LookupError: the pattern is nowhere, or the replacement changes nothing.
        """
        changed = re.sub(self.pattern, self.replacement, text, count=1)
        if changed == text:
            raise LookupError(
                f"mutation {self.name} of {self.op}: nothing in its {self.language} matches {self.pattern!r}"
            )
        return changed


ARGUMENT = r"((?:[^(),]|\([^()]*\))+)"
ARGUMENTS, TWO = f"{ARGUMENT}, {ARGUMENT}, {ARGUMENT}", r"\1(\2 * \3 + \4)"
SUBTRACTION = (r"(?s)(.*= )(v\d+) - (v\d+)\b", r"\1\3 - \2")
MUTATIONS = (
    Mutation("c: > becomes >=", "c", "relu", r"> 0\.0f", ">= 0.0f"),
    Mutation("c: a rounding is dropped", "c", "rms_norm", r"\w+_round_bf16\w*\((v\d+)\)", r"\1"),
    Mutation(
        "c: the reciprocal is an ulp off", "c", "rms_norm", r"1\.0f / (v\d+)", r"0.99999994f / \1", "f32"
    ),
    Mutation("c: the mean is over n + 1", "c", "rms_norm", r"\(float\)(v\d+)", r"(float)(\1 + 1)"),
    Mutation("c: operands of - are swapped", "c", "layer_norm", *SUBTRACTION),
    Mutation("c: codes saturate at 430", "c", "quant_fp8_static", r"448\.0f", "430.0f"),
    Mutation("c: ties round up", "c", "quant_fp8_static", r"\b524287\b", "524288"),
    Mutation("c: the last column is left out", "c", "add", r"if \(i < n\)", "if (i + 1 < n)"),
    Mutation("c: rows are taken to be dense", "c", "add", r"m \* a_stride", "(m * n + 0 * a_stride)"),
    Mutation(
        "c: a fused multiply-add is two roundings",
        "c",
        "softmax",
        rf"(?s)(.*)\b\w+_fma\({ARGUMENTS}\)",
        TWO,
        "f32",
    ),
    Mutation("c: padding is not cleared", "c", "scaled_fp4_quant_swizzled", r"nvfp4_clear\([^;]*\); ", ""),
    Mutation("triton: > becomes >=", "triton", "relu", r"> 0\.0", ">= 0.0"),
    Mutation("triton: one column too many", "triton", "rms_norm", r"cols < N", "cols <= N"),
    Mutation("triton: the mean is over n + 1", "triton", "rms_norm", r"\(N \* 1\.0\)", "(N * 1.0 + 1.0)"),
    Mutation(
        "triton: sums in another order",
        "triton",
        "rms_norm",
        r"pair_sum\((v\d+), R, P, LEVELS\)",
        r"tl.sum(\1, axis=1, keep_dims=True)",
        "f32",
    ),
    Mutation(
        "triton: a rounding is dropped", "triton", "silu_mul_quant_fp8", r"(v\d+)\.to\(tl\.bfloat16\)", r"\1"
    ),
    Mutation("triton: operands of - are swapped", "triton", "layer_norm", *SUBTRACTION),
    Mutation("triton: ties round up", "triton", "quant_fp8_per_group", r"\b524287\b", "524288"),
    Mutation("triton: NaN is lost", "triton", "softmax", r", propagate_nan=tl\.PropagateNan\.ALL", ""),
    Mutation(
        "triton: a fused multiply-add is two roundings",
        "triton",
        "softmax",
        rf"(?s)(.*)tl\.fma\({ARGUMENTS}\)",
        TWO,
        "f32",
    ),
    Mutation("triton: rows are taken to be dense", "triton", "add", r"rows \* a_stride", "rows * N"),
    Mutation(
        "triton: columns are taken to be adjacent",
        "triton",
        "quant_fp8_per_group",
        r" \* scales_colstride",
        "",
    ),
    Mutation("triton: blocks of 16 rows", "triton", "scaled_fp4_quant_swizzled", r"rows % 32", "rows % 16"),
)
"""Every mutation; the tests run them all."""


def trial(mutation: Mutation, broken: bool = True) -> Result:
    """The conformance result of the kernel that a mutation is of, mutated or as it is.

    Triton's must run in a process that interprets (`kiln.tools.interpreter.enter`).

    Raises:
        LookupError: the mutation does not apply.
    """
    loaded = load(CATALOGS)
    op = loaded.ops[mutation.op]
    run = _triton(op, mutation, broken) if mutation.language == "triton" else _c(op, loaded, mutation, broken)
    (result,) = run.run()
    return result


def survivors(mutations: Sequence[Mutation]) -> list[str]:
    """The names of those mutations that the conformance run lets pass."""
    return [m.name for m in mutations if trial(m).passed]


def _find(mutation: Mutation, kernels: Mapping[str, T]) -> T:
    found = next((k for name, k in kernels.items() if name.startswith(mutation.variant)), None)
    if found is None:
        listed = ", ".join(kernels)
        raise LookupError(
            f"mutation {mutation.name}: {mutation.op} has no kernel {mutation.variant!r}, only {listed}"
        )
    return found


def _triton(op: Op, mutation: Mutation, broken: bool) -> Campaign:
    first = _find(mutation, {o.entry["variant"]: o for o in origins(op, CATALOGS, ("sm_80",))})
    text = mutation.apply(first.text) if broken else first.text
    return campaign(op, [replace(first, text=text)])


def _c(op: Op, loaded: Loaded, mutation: Mutation, broken: bool) -> Campaign:
    from kiln.backends.cpu.backend import CpuBackend
    from kiln.backends.cpu.compile import source_text, variants
    from kiln.backends.cpu.toolchain import shared_object
    from kiln.compiler.signatures import signature_json
    from kiln.compiler.target import TARGETS

    device = CpuDevice()
    target = TARGETS[device.target]
    (job,) = CpuBackend().plan({op.name: op}, CATALOGS, target.name)
    first = _find(mutation, {v.name: v for v in variants(op, loaded, job.payload, target)})
    if broken:
        first = replace(first, text=mutation.apply(first.text))
    tier = target.tiers[0]
    data = shared_object(source_text(op, [first]), target, tier, op.name)
    digest = hashlib.sha256(data).hexdigest()
    entry = {
        "op": op.name,
        "variant": first.name,
        "entry": first.symbol,
        "file": f"{op.name}.so",
        "bytes": len(data),
        "sha256": digest,
        "inputs_digest": digest,
        "toolchain": {},
        "block": [1, 1, 1],
        "cluster": [1, 1, 1],
        "shared_bytes": 0,
        "launch": {},
        "scratch": [],
        "isa": {"tier": tier.name, "features": []},
        "resources": {"code_bytes": 1},
        "budget": {},
        "numerics": {"contract": signature_json(op)["contract"], "selftest": {"seed": 0, "shape": {}}},
        **first.fields,
    }
    held = Shelf(op, target.name, [entry], device, lambda kernel: device.load(kernel, data))
    return Campaign(held, target.name, {op.name: op}, HostRig(), lambda _: True, lambda _: None)
