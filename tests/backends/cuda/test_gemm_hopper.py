"""Hopper's matrix product: how work is shared out, and what the assembler makes of the kernel. Nothing but
the device runs it."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kiln.backends.cuda import compile as worker
from kiln.backends.cuda.kernels import gemm_hopper as kernel
from kiln.backends.cuda.primitive import CudaPrimitive
from kiln.backends.cuda.variants import gemm_hopper as table
from kiln.compiler.backend import Job
from kiln.compiler.target import TARGETS
from kiln.recipes.gemm import MATMUL_BT
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_launch

TARGET = "sm_90a"
DEPTH = 64
CALLS = (
    (1, 8, 1), (64, 576, 7168), (128, 2112, 7168), (512, 6144, 4096), (1000, 5120, 17408), (8192, 8192, 512),
    (300, 4104, 1032), (256, 512, 65536),
)  # fmt: skip
"""M, N, K."""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def scalars(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Makes the kernel's arithmetic Python's: Gluon's where the numbers are positive."""

    def where(test: bool, yes: int, no: int) -> int:
        return yes if test else no

    model = SimpleNamespace(
        cdiv=cdiv, minimum=min, maximum=max, where=where, num_programs=lambda axis: programs
    )
    monkeypatch.setattr(kernel, "gl", model)
    for name in ("MOST", "DEEP"):
        monkeypatch.setattr(kernel, name, getattr(kernel, name).value)


def units(call: tuple[int, int, int], block: table.Block, programs: int) -> Iterator[tuple[int, ...]]:
    """(program, tile, part, first step, end) of all that programs do, in their order."""
    m, n, k = call
    whole, rest, split = kernel._shares.fn(m, n, k, block.m, block.n)
    for program in range(programs):
        for unit in range(program, whole + rest * split, programs):
            yield program, *kernel._unit.fn(unit, whole, rest, cdiv(k, DEPTH), split)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("block", table.BLOCKS, ids=lambda block: block.name)
@pytest.mark.parametrize("programs", [table.MULTIPROCESSORS, 7])
def test_every_step_of_every_block_is_taken_once(
    monkeypatch: pytest.MonkeyPatch, call: tuple[int, int, int], block: table.Block, programs: int
) -> None:
    scalars(monkeypatch, programs)
    m, n, k = call
    whole, rest, split = kernel._shares.fn(m, n, k, block.m, block.n)
    steps: Counter[tuple[int, int]] = Counter()
    for _, tile, part, first, end in units(call, block, programs):
        assert first < end
        if tile >= whole:
            assert 0 <= part < split
        steps.update((tile, step) for step in range(first, end))
    tiles = cdiv(m, block.m) * cdiv(n, block.n)
    assert steps == Counter(product(range(tiles), range(cdiv(k, DEPTH))))
    places = {kernel._block.fn(t, m, n, block.m, block.n, block.group) for t in range(tiles)}
    assert places == set(product(range(cdiv(m, block.m)), range(cdiv(n, block.n))))
    assert split == 1 or rest * split <= programs


def test_blocks_are_shared_where_multiprocessors_would_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars(monkeypatch, table.MULTIPROCESSORS)

    def shares(m: int, n: int, k: int) -> tuple[int, int, int]:
        found: tuple[int, int, int] = kernel._shares.fn(m, n, k, 128, 128)
        return found

    assert shares(512, 5120, 17408) == (132, 28, 4)
    assert shares(1024, 576, 7168) == (0, 40, 3)
    assert shares(1024, 576, 1024) == (0, 40, 1)
    assert shares(256, 6144, 4096) == (0, 96, 1)
    assert shares(128, 128, 65536) == (0, 1, 8)


def compiled(row: CudaPrimitive) -> tuple[dict[str, Any], worker.Compiled]:
    """The manifest entry and what the assembler said."""
    module, _, function = row.kernel.partition(":")
    entry = {
        "tier": "primitive", "mode": row.mode, "grid": list(row.grid), "when": row.when,
        "priority": row.priority, "scratch": [s.json() for s in row.scratch], "budget": worker.BUDGET,
    }  # fmt: skip
    source = worker.Source(
        module,
        function,
        "",
        tuple(row.json_params()),
        dict(row.constants),
        row.compile_options(),
        entry=entry,
    )
    made = worker.assemble(source, TARGETS[TARGET])
    job = Job(TARGET, row.op, row.variant, "0" * 64, "", {})
    return worker.manifest_entry(job, MATMUL_BT, source, made, "x.cubin"), made


SAMPLE = ("bf16_ws_m128_n256_s4_g16", "bf16_ws_m64_n128_s8_g16", "f16_f32_ws_m128_n256_s4_g16")


@pytest.mark.parametrize("variant", SAMPLE)
def test_compiles_without_spills_and_launches(variant: str) -> None:
    (row,) = (r for r in table.CANDIDATES if r.variant == variant)
    entry, made = compiled(row)
    used = entry["resources"]
    assert (used["spill_stores"], used["spill_loads"], used["stack"]) == (0, 0, 0)
    assert made.shared <= table.SHARED
    assert entry["block"] == [384, 1, 1]
    assert prove_launch(parse_kernel(entry), TARGET, made.cubin) == []
    ptx: str = made.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    # Each of the four makes one map behind its own entry, none before all of them.
    maps = [at for at in range(len(ptx)) if ptx.startswith("tensormap.cp_fenceproxy", at)]
    assert len(maps) == 4
    assert ptx.index("setmaxnreg") < min(maps)
    # Parts go and come 16 bytes of a thread at a time.
    assert "st.global.v4.b32" in ptx
    assert "ld.global.cg.v4.b32" in ptx
    assert "ld.global.cg.b32" not in ptx
