"""libkiln and the Python runtime on the committed tree: the same explanations, and the same bytes."""

import ctypes
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16 as BFLOAT16

import kiln.runtime as kiln
from kiln.runtime.errors import KilnError, SelectionError
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.derived import cases
from kiln.tools.cases import Case, arguments, views
from kiln.tools.fill import inputs
from kiln.tools.memory import HostRig, staged

TREE = Path(__file__).parents[3] / "aot_artifacts"
CPU = kiln.load(TREE).targets[0]


def test_same_ops(c: ctypes.CDLL) -> None:
    for device in ("cpu", "sm_90a"):
        with kiln.load(TREE, device) as python, libkiln.Library(c, TREE, device) as library:
            assert library.ops == python.ops


@pytest.mark.parametrize("device", ["cpu", "sm_90a", "sm_80", "cpu-aarch64"])
def test_same_explanations(c: ctypes.CDLL, device: str) -> None:
    """Word for word: every candidate of every call, its order, and why it was passed over."""
    asked = 0
    with kiln.load(TREE, device) as python, libkiln.Library(c, TREE, device) as library:
        target = python.targets[0]
        for case in cases(python, target):
            sig = python.operation(target, case.op).sig
            named = arguments(sig, case, views(case, 1 << 30, python.device.ordinal))
            for wanted in ({}, {"variant": case.variant}, {"mode": "fast"}):
                call = {**{k: v for k, v in named.items() if k not in ("variant", "mode")}, **wanted}
                expected = str(python.explain(case.op, **call))
                assert library.op(case.op).explain(**call) == expected
                asked += 1
    assert asked > 300


def run(op: Any, sig: Any, case: Case, block: Any) -> bytes | str:
    rig = HostRig()
    operands = rig.put(case, block)
    try:
        op(**arguments(sig, case, operands))
    except KilnError as refused:
        return f"{type(refused).__name__}: {refused}"
    return rig.get(case.bytes).tobytes()


def test_same_bits(c: ctypes.CDLL) -> None:
    """Every kernel and plan that this CPU may run, by name: what it writes, and what it leaves alone, on one
    thread, two and four."""
    ran: Counter[str] = Counter()
    with ExitStack() as held:
        python = held.enter_context(kiln.load(TREE, threads=1))
        libraries = {n: held.enter_context(libkiln.Library(c, TREE, threads=n)) for n in (1, 2, 4)}
        for case in cases(python, CPU):
            sig = python.operation(CPU, case.op).sig
            with np.errstate(all="ignore"):
                block = staged(case, inputs(sig, case, finite=False), 0xFF)
            expected = run(python.op(case.op), sig, case, block)
            for threads, library in libraries.items():
                assert run(library.op(case.op), sig, case, block) == expected, f"{case}, {threads} threads"
            ran[case.op] += isinstance(expected, bytes)
        candidates = {v for name in python.ops for v in python.op(name).counts}
    assert len(ran) == len(python.ops)
    assert all(ran.values()), [op for op, n in ran.items() if not n]
    assert sum(ran.values()) > 2 * len(candidates)


@pytest.mark.parametrize("dtypes", ["f16 f32", "f32 bf16"])
def test_same_refusals(c: ctypes.CDLL, dtypes: str) -> None:
    """Where nothing runs: every different reason once, with how many more candidates have it."""
    types = {"f16": np.float16, "f32": np.float32, "bf16": BFLOAT16}
    x, out = (np.zeros((2, 4), types[d]) for d in dtypes.split())
    said = []
    with kiln.load(TREE) as python, libkiln.Library(c, TREE) as library:
        for one in (python, library):
            with pytest.raises(SelectionError) as refused:
                one.rms_norm(x, np.ones(4, x.dtype), out=out)
            said.append(str(refused.value))
    assert said[0] == said[1]
    assert "more); c." in said[0]
    assert said[0].count(f"needs out of {dtypes.split()[0]}, found {dtypes.split()[1]}") == 1
    assert said[0].endswith("kiln show rms_norm lists the calls that are served.")
