"""Compiles the cubins that tests read, in a process of its own: `python cubin_kernels.py DIR`."""

import json
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHES = (80, 86, 89, 90, 100, 120)


@triton.jit
def scaled_sum(x, y, n, s, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    v = tl.load(x + o, live, other=0.0)
    tl.store(y + o, v * s + tl.sum(v), live)


@triton.jit
def spilling(x, y, k, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    a = tl.load(x + o)
    b = tl.load(x + BLOCK * BLOCK + o)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for i in range(k):
        c = tl.load(x + i * 7 + o)
        total += a * c + b
        a = a + total * b
        b = b - c
    tl.store(y + o, total + a + b)


@triton.jit
def doubled(x, y, s, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, o < n, other=0.0) * s, o < n)


KERNELS = (
    (scaled_sum, {"x": "*fp32", "y": "*bf16", "n": "i32", "s": "fp32"}, {"BLOCK": 1024}, {"num_warps": 4}),
    (spilling, {"x": "*fp32", "y": "*fp32", "k": "i32"}, {"BLOCK": 32}, {"num_warps": 1, "maxnreg": 32}),
    (doubled, {"x": "*fp32", "y": "*fp32", "s": "fp64", "n": "i64"}, {"BLOCK": 512}, {"num_warps": 8}),
)


def main(folder: Path) -> None:
    """Write NAME.ARCH.cubin for each kernel and architecture, and facts.json with what Triton says of
    each."""
    facts = {}
    for fn, types, constants, options in KERNELS:
        for arch in ARCHES:
            source = ASTSource(fn, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
            target = GPUTarget("cuda", arch, 32)
            built = triton.compile(source, target=target, options={**options, "enable_fp_fusion": False})
            name = f"{fn.__name__}.{arch}"
            (folder / f"{name}.cubin").write_bytes(built.asm["cubin"])
            facts[name] = {"shared": built.metadata.shared, "threads": 32 * built.metadata.num_warps}
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
