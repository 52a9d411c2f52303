"""Eight e2m1 codes a word: the emitter's helper against ml_dtypes, at every tie, beside it, and at NaN."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kiln.backends.cuda.prelude import BYTES_OF, PACK_E2M1
from kiln.tests.backends.cuda.interpreter import interpret

COLUMNS = 256
KERNEL = """

@triton.jit
def packed(x, words, bytes, P: tl.constexpr):
    row = tl.program_id(0) * P
    codes = pack_e2m1(tl.load(x + row + tl.arange(0, P)[None, :]), 1, P)
    tl.store(words + row // 8 + tl.arange(0, P // 8)[None, :], codes)
    tl.store(bytes + row // 2 + tl.arange(0, P // 2)[None, :], bytes_of(codes, 1, P // 8))
"""


def around_every_tie() -> np.ndarray:
    """Codes' values, what lies between them, the next f32 beside it; signs, infinities, random."""
    values = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    middles = np.concatenate(
        [values, (values[1:] + values[:-1]) / 2, [7.0, 8.0, 1e30, np.inf, 1e-40, 2**-149]]
    )
    middles = middles.astype(np.float32)
    near = np.concatenate(
        [middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(-9))]
    )
    random = np.random.default_rng(5).normal(0, 3, 3000).astype(np.float32)
    x = np.concatenate([near, -near, [-0.0], random]).astype(np.float32)
    return np.resize(x, -(-x.size // COLUMNS) * COLUMNS)


def run(
    x: np.ndarray, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, np.ndarray]:
    # The interpreting process keeps modules: each text needs a name of its own.
    module = f"packing_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    text = f"import triton\nimport triton.language as tl\n{source}{BYTES_OF}{KERNEL}"
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    words, pairs = np.zeros(x.size // 8, np.uint32), np.zeros(x.size // 2, np.uint8)
    _, words, pairs = interpret(f"{module}:packed", (x.size // COLUMNS, 1, 1), x, words, pairs, P=COLUMNS)
    return words, pairs


def wanted(x: np.ndarray) -> np.ndarray:
    codes = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    packed: np.ndarray = codes[0::2] | (codes[1::2] << 4)
    return packed


def test_words_and_bytes_hold_the_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = around_every_tie()
    words, pairs = run(x, PACK_E2M1, tmp_path, monkeypatch)
    assert (words.view(np.uint8) == wanted(x)).all()
    assert (pairs == wanted(x)).all()


def test_nan_is_seven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, _ = run(np.full(COLUMNS, np.nan, np.float32), PACK_E2M1, tmp_path, monkeypatch)
    assert {int(w) & 0x77777777 for w in words} == {0x77777777}


@pytest.mark.parametrize(
    ("right", "wrong"), [("-1.0)), 2.0", "-1.0)), 1.0"), ("a * 0.5", "a * 0.25"), ("<< 16)", "<< 20)")]
)
def test_a_wrong_helper_is_found(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = around_every_tie()
    assert right in PACK_E2M1
    words, _ = run(x, PACK_E2M1.replace(right, wrong), tmp_path, monkeypatch)
    assert (words.view(np.uint8) != wanted(x)).any()
