"""What CUDA kernels of the delta rule refuse by name, and what lies between the launches of prefill."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from kiln.backends.cuda.variants.gdn_chunk import BETWEEN_THREE, BETWEEN_TWO
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.expr import Env, compile_expr, parse_expr
from kiln.tests.tools.conftest import Run
from kiln.tools.trees import shipped

SIZES = {"HV": 48, "HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "scale": 0.1}
CALLS: dict[str, dict[str, Any]] = {
    "gated_delta_rule_chunk": {"T": 64, "SEQS": 1, "X": "bf16", "O": "bf16"},
    "gated_delta_rule_packed_decode": {
        "B": 16, "SLOTS": 64, "T": "bf16", "S": "f32", "P": "f32", "O": "bf16", "I": "i32",
    },
}  # fmt: skip
CHUNK, STEP = CALLS
REFUSED: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("sm_90a", CHUNK, {"X": "f32", "O": "f32"}, "needs q of bf16, found f32"),
    ("sm_80", CHUNK, {"X": "f32", "O": "f32"}, "needs q of bf16, found f32"),
    ("sm_90a", CHUNK, {"KEY_DIM": 64}, "needs key_dim == 128, found 64"),
    ("sm_80", CHUNK, {"VALUE_DIM": 256}, "needs value_dim == 128, found 256"),
    ("sm_90a", CHUNK, {"SEQS": 257}, "needs seqs <= 256, found 257"),
    ("sm_90a", STEP, {"KEY_DIM": 64}, "needs key_dim == 128, found 64"),
    ("sm_121a", STEP, {"S": "f16"}, "needs state of bf16, found f16"),
    ("sm_121a", STEP, {"O": "f16"}, "needs out of bf16, found f16"),
)


def _explain(kiln: Run, op: str, target: str, **changed: Any) -> tuple[int, str]:
    given = [f"{n}={v}" for n, v in (SIZES | CALLS[op] | changed).items()]
    code, out, err = kiln("explain", op, "--target", target, *given, "--tree", str(shipped()))
    return code, out + err


@pytest.mark.parametrize(("target", "op", "changed", "why"), REFUSED)
def test_each_kernel_says_what_it_cannot_do(
    kiln: Run, target: str, op: str, changed: dict[str, Any], why: str
) -> None:
    code, text = _explain(kiln, op, target, **changed)
    assert code == 1
    assert why in text


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("output", ["bf16", "f32"])
def test_an_output_of_each_type_has_its_own_kernels(kiln: Run, target: str, output: str) -> None:
    """None writes the one type into the memory of the other."""
    for op in CALLS:
        code, text = _explain(kiln, op, target, O=output)
        assert code == 0
        (running,) = (line for line in text.splitlines() if line.endswith(": runs"))
        assert running.split()[0].split("_")[1 if op == CHUNK else 3] == output


def _bytes(temps: Any, tokens: int, seqs: int) -> dict[str, int]:
    env = Env()
    env.dims = {"T": tokens, "HV": 48, "SEQS": seqs}
    env.args = {"key_dim": 128, "value_dim": 128}
    shapes = {t.name: [int(compile_expr(parse_expr(e))(env)) for e in t.shape] for t in temps}
    return {t.name: DTYPES[t.dtype] * prod(shapes[t.name]) for t in temps}


def test_scratch_of_64_tokens_is_as_the_sheet_counts_it() -> None:
    """w, u, v_new and the states of one chunk, and of a second for what the sequences may leave over; the
    matrices A and T of the sheet never lie in memory."""
    assert _bytes(BETWEEN_THREE, 64, 1) == {
        "decay": 192 * 64, "w": 786432, "u": 786432, "v_new": 786432, "states": 2 * 1572864,
    }  # fmt: skip
    assert _bytes(BETWEEN_TWO, 64, 1) == {"blocks": 2 * 2 * 393216, "factors": 2 * 2 * 12288}
