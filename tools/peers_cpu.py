"""Peers on the CPU: NumPy as people write it, and PyTorch over the same memory, one thread each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kiln.tools.peers import Call, PeerLibrary, Run, torch_peer
from kiln.tools.peers_ggml import ggml_peers

Formula = Callable[..., np.ndarray]


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    return scaled


def _silu(x: np.ndarray) -> np.ndarray:
    value: np.ndarray = x / (1 + np.exp(-x))
    return value


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    value: np.ndarray = e / e.sum(axis=-1, keepdims=True)
    return value


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    value: np.ndarray = 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3)))
    return value


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


FORMULAS: Mapping[str, tuple[tuple[str, ...], Formula]] = {
    "rms_norm": (("x", "weight", "eps"), _norm),
    "fused_add_rms_norm_std": (
        ("x", "residual", "weight", "eps"),
        lambda x, residual, weight, eps: _norm(x + residual, weight, eps),
    ),
    "silu": (("x",), _silu),
    "silu_mul": (("gate", "up"), lambda gate, up: _silu(gate) * up),
    "silu_and_mul": (("x",), lambda x: _silu(_halves(x)[0]) * _halves(x)[1]),
    "gelu_tanh": (("x",), _gelu_tanh),
    "softmax": (("x",), _softmax),
    "add": (("a", "b"), np.add),
    "mul": (("a", "b"), np.multiply),
}
"""Op -> operands and what NumPy computes of them in f32."""


def _numpy_run(names: tuple[str, ...], formula: Formula) -> Callable[[Call], Run]:
    def factory(c: Call) -> Run:
        def run() -> None:
            given = [c[n].astype(np.float32) if isinstance(c[n], np.ndarray) else c[n] for n in names]
            formula(*given).astype(c[names[0]].dtype)

        return run

    return factory


def _shared(torch: Any, value: Any) -> Any:
    """The array's memory as a tensor."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def cpu_peers(ggml: Path | None = None) -> tuple[PeerLibrary, ...]:
    """NumPy, PyTorch where it is importable, and llama.cpp's kernels built from a source archive `ggml`."""
    return (*_importable(), *(ggml_peers(ggml) if ggml else ()))


def _importable() -> tuple[PeerLibrary, ...]:
    numpy = PeerLibrary("numpy", np.__version__, {op: _numpy_run(*row) for op, row in FORMULAS.items()})
    found = torch_peer()
    if found is None:
        return (numpy,)
    torch, peer = found
    torch.set_num_threads(1)

    def on_arrays(factory: Callable[[Call], Run | None]) -> Callable[[Call], Run | None]:
        return lambda c: factory({name: _shared(torch, value) for name, value in c.items()})

    return numpy, PeerLibrary(peer.name, peer.version, {op: on_arrays(f) for op, f in peer.ops.items()})
