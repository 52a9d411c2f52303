"""Adapters to kernels that users have today: each is tried when its package is importable, on our arrays.

A row makes, from operands, a closure that runs the peer once, or None where it has no such kernel.
Nothing is installed or downloaded for it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Call = Mapping[str, Any]
Run = Callable[[], Any]


@dataclass(frozen=True)
class PeerLibrary:
    """One peer: its name, version, and per op a factory of runs."""

    name: str
    version: str
    ops: Mapping[str, Callable[[Call], Run | None]]


def _torch_ops(torch: Any) -> dict[str, Callable[[Call], Run | None]]:
    functional = torch.nn.functional

    def rms_norm(c: Call) -> Run:
        return lambda: functional.rms_norm(c["x"], (c["x"].shape[-1],), c["weight"], c["eps"])

    def add_rms_norm(c: Call) -> Run:
        def run() -> None:
            total = c["x"] + c["residual"]
            functional.rms_norm(total, (total.shape[-1],), c["weight"], c["eps"])

        return run

    def silu_and_mul(c: Call) -> Run:
        gate, up = c["x"].chunk(2, -1)
        return lambda: functional.silu(gate) * up

    def top_k(c: Call) -> Run:
        return lambda: torch.topk(c["scores"], c["k"])

    return {
        "rms_norm": rms_norm,
        "fused_add_rms_norm_std": add_rms_norm,
        "silu_mul": lambda c: lambda: functional.silu(c["gate"]) * c["up"],
        "silu_and_mul": silu_and_mul,
        "mul": lambda c: lambda: torch.mul(c["a"], c["b"], out=c["out"]),
        "layer_norm": lambda c: (
            lambda: functional.layer_norm(c["x"], (c["x"].shape[-1],), c["weight"], c["bias"], c["eps"])
        ),
        "softmax": lambda c: lambda: torch.softmax(c["x"], -1),
        "silu": lambda c: lambda: functional.silu(c["x"]),
        "gelu_tanh": lambda c: lambda: functional.gelu(c["x"], approximate="tanh"),
        "gelu": lambda c: lambda: functional.gelu(c["x"]),
        "add": lambda c: lambda: torch.add(c["a"], c["b"], out=c["out"]),
        "top_k_pairs": top_k,
        "matmul_bt": lambda c: lambda: torch.matmul(c["x"], c["weight"].t(), out=c["out"]),
    }


def _vllm_ops(ops: Any, torch: Any) -> dict[str, Callable[[Call], Run | None]]:
    c_ops = ops._C

    def fused_add(c: Call) -> Run:
        return lambda: c_ops.fused_add_rms_norm(c["x"], c["residual"], c["weight"], c["eps"])

    def per_token(c: Call) -> Run:
        out, scales = c["out"].view(torch.float8_e4m3fn), c["scales"].view(-1, 1)
        return lambda: c_ops.rms_norm_dynamic_per_token_quant(
            out, c["x"], c["weight"], scales, c["eps"], None, c.get("residual")
        )

    def static(c: Call) -> Run | None:
        out, scale = c["out"].view(torch.float8_e4m3fn), torch.full((1,), c["scale"], device=c["x"].device)
        if c.get("residual") is None:
            return lambda: c_ops.rms_norm_static_fp8_quant(out, c["x"], c["weight"], scale, c["eps"])
        return lambda: c_ops.fused_add_rms_norm_static_fp8_quant(
            out, c["x"], c["residual"], c["weight"], scale, c["eps"]
        )

    def quant(c: Call) -> Run:
        out, scales = c["out"].view(torch.float8_e4m3fn), c["scales"].view(-1, 1)
        return lambda: c_ops.dynamic_per_token_scaled_fp8_quant(out, c["x"], scales, None)

    return {
        "rms_norm": lambda c: lambda: c_ops.rms_norm(c["out"], c["x"], c["weight"], c["eps"]),
        "fused_add_rms_norm_std": fused_add,
        "rms_norm_quant_fp8_per_token": per_token,
        "rms_norm_quant_fp8": static,
        "quant_fp8_per_token": quant,
        "silu_and_mul": lambda c: lambda: c_ops.silu_and_mul(c["out"], c["x"]),
    }


def torch_peer() -> tuple[Any, PeerLibrary] | None:
    """PyTorch, and it as a peer; None where it is not importable."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch, PeerLibrary("torch", str(torch.__version__), _torch_ops(torch))


def _vllm() -> PeerLibrary | None:
    """vLLM's kernels: an installed vllm, or its kernel libraries in a folder (`--peer-libraries`)."""
    try:
        torch = importlib.import_module("torch")
        if not hasattr(torch.ops._C, "rms_norm"):
            importlib.import_module("vllm._custom_ops")
        if not hasattr(torch.ops._C, "rms_norm"):
            return None
        version = importlib.import_module("importlib.metadata").version("vllm")
    except ImportError:
        return None
    return PeerLibrary("vllm", version, _vllm_ops(torch.ops, torch))


def _liger() -> PeerLibrary | None:
    try:
        module = importlib.import_module("liger_kernel.ops.rms_norm")
        swiglu = importlib.import_module("liger_kernel.ops.swiglu")
        version = importlib.import_module("importlib.metadata").version("liger-kernel")
    except (ImportError, ModuleNotFoundError):
        return None
    forward = module.rms_norm_forward
    return PeerLibrary("liger", version, {
        "rms_norm": lambda c: lambda: forward(c["x"], c["weight"], c["eps"], 0.0, "llama", None),
        "silu_mul": lambda c: lambda: swiglu.swiglu_forward(c["gate"], c["up"]),
    })  # fmt: skip


def load_libraries(folder: str) -> PeerLibrary | None:
    """Kernel libraries of vLLM from a folder of `*.so` files, not installed; the folder names the version."""
    torch = importlib.import_module("torch")
    for name in sorted(os.listdir(folder)):
        if name.endswith(".so"):
            torch.ops.load_library(os.path.join(folder, name))
    if not hasattr(torch.ops._C, "rms_norm"):
        return None
    return PeerLibrary("vllm", os.path.basename(os.path.normpath(folder)), _vllm_ops(torch.ops, torch))


def installed(folder: str | None = None) -> tuple[PeerLibrary, ...]:
    """Every peer on CUDA that can be had here."""
    torch = torch_peer()
    found = [torch and torch[1], load_libraries(folder) if folder else _vllm(), _liger()]
    return tuple(p for p in found if p is not None)
