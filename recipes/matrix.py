"""The rows of the kernel-family matrix: what inference engines need, whether or not Kiln has it yet.

A row is data. Its ops are those whose declaration names it as `family`; its state is derived from trees
(`kiln matrix`).
"""

from __future__ import annotations

FAMILIES: dict[str, str] = {
    "KERNEL-CPU-A76-Q8-DOT": "Cortex-A76 Q8_0 x Q8_0 dot products for keep-quant decode and prefill",
    "KERNEL-ACCEL-PROVIDER-SELECT": "Which implementation of an op runs when a device has more than one",
    "KERNEL-CUDA-DISPATCH-AOT": "CUDA runtime, streams, graphs, dispatch and artifact selection",
    "KERNEL-FUSION-FRAMEWORK": "Portable op fusion: a recipe declared once, realized per backend",
    "KERNEL-GEMM-BF16": "BF16 dense GEMM, torch.nn.Linear layout, merged input projections",
    "KERNEL-GEMM-FP8": "FP8 and INT8 scaled GEMM with static activation quantization",
    "KERNEL-GEMM-NVFP4-W4A4": "NVFP4 W4A4 dense GEMM, merged and fused projections",
    "KERNEL-GEMM-MARLIN-W4A16": "FP4 W4A16 dense and grouped GEMM with weight repacking",
    "KERNEL-GEMM-INT-LOWBIT": "AWQ, GPTQ and other integer low-bit GEMM",
    "KERNEL-GEMM-W4A8": "W4A8 dense and MoE GEMM",
    "KERNEL-GEMM-QUTLASS-MX": "NVFP4 and MXFP4 block-scaled GEMM",
    "KERNEL-GEMM-DEEPGEMM": "Block-scaled FP8 dense, batched and MoE GEMM",
    "KERNEL-GEMM-CPU-ELEM": "f32, f16 and bf16 CPU GEMM with (K, N) and (N, K) weights",
    "KERNEL-QUANT-CIQ-IQUANT": "Keep-quant dot products for the codebook encodings IQ2_XXS, IQ3_XXS and Q2_K",
    "KERNEL-QUANT-CIQ-GEMM-CUDA": "CUDA keep-quant GEMM for GGUF k-quants",
    "KERNEL-EW-NORM-ACT": "Activations, RMS and layer norm, embedding, casts and glue",
    "KERNEL-EW-NORM-QUANT": "Fused norm, add and activation with FP8 or FP4 quantization",
    "KERNEL-ROPE-QKNORM": "RoPE and MRoPE, fused QK norm, RoPE and KV insertion",
    "KERNEL-KV-CACHE": "KV cache reshape, insertion, copy and maintenance",
    "KERNEL-KV-QUANT": "Quantized KV cache, FP8 and NVFP4",
    "KERNEL-ATTN-PAGED": "Dense reference, paged prefill and decode attention",
    "KERNEL-ATTN-FA2": "Varlen prefill and GQA split-KV decode attention",
    "KERNEL-ATTN-FA3-FA4": "Warp-specialized attention for Hopper and Blackwell",
    "KERNEL-ATTN-FLASHINFER-TRTLLM": "Paged attention, XQA and generation-phase attention",
    "KERNEL-ATTN-TRITON-FLEX-HPC": "Triton, flexible-mask, quantized-cache and HPC attention",
    "KERNEL-ATTN-MLA-SPARSE": "Multi-head latent attention and sparse attention",
    "KERNEL-ATTN-DFLASH-BLOCK": "Bidirectional attention within a draft block",
    "KERNEL-ATTN-DFLASH-PAGED-BLOCK": "Draft-block attention over a paged context, graph-capture safe",
    "KERNEL-DFLASH2-GROUPED-CONV": "Grouped, input-conditioned depthwise convolution",
    "KERNEL-DFLASH2-SELECTOR-EDGES": "Transition scores of the candidate selector's lattice",
    "KERNEL-TOPK-PAIRS": "Top-k that emits the surviving (index, value) pairs",
    "KERNEL-DFLASH2-PATH-WALK": "Path walk through the candidate lattice",
    "KERNEL-ATTN-DSA-SPARSE-INDEX": "Lightning-indexer logits and sparse key selection",
    "KERNEL-ATTN-DSA-COMPRESSOR": "Compressor pooling and fp8 latent KV cache state",
    "KERNEL-MHC-SINKHORN": "Manifold hyper-connections with Sinkhorn normalization",
    "KERNEL-MOE-SQRTSOFTPLUS-HASH": "MoE router with sqrt-softplus scores, hash routing, clamped SwiGLU",
    "KERNEL-DSV4-W7-DEVICE": "Device kernels of hyper-connections, sparse index, compressor and router",
    "KERNEL-KDA-DELTA": "Kimi delta attention: the gated delta rule with a per-channel gate",
    "KERNEL-ATTN-DENSE-FLASH": "Tiled dense non-causal attention for long encoder contexts",
    "KERNEL-MOE-ROUTING": "Router top-k, alignment, permutation, combination and activation",
    "KERNEL-MOE-UNQUANTIZED": "Unquantized grouped and batched MoE GEMM",
    "KERNEL-MOE-QUANTIZED": "FP8, INT8, NVFP4 and MXFP4 grouped MoE GEMM",
    "KERNEL-MOE-SPECIAL": "Cooperative top-k, special routers, Hadamard transform, all-to-all",
    "FIX-FP8-PLAN-CAPTURE": "FP8 GEMM plans that are safe inside CUDA graph capture",
    "KERNEL-GDN-PACKED-DECODE": "Packed recurrent decode of the gated delta rule",
    "KERNEL-GDN-AOT-BF16": "Gated delta rule prefill and decode with BF16 output",
    "GDN-MOE-BF16-OUT": "One model dtype for the delta rule's output, gate and norm weight",
    "GDN-MOE-PACKED-BA": "One merged beta and alpha projection for packed decode",
    "KERNEL-GDN-SCRATCH": "Stream-ordered scratch of the delta rule, capture safe",
    "KERNEL-GDN-REPLAYSSM": "Delta rule decode from a ring of rank-1 factors, state written back rarely",
    "KERNEL-SSM-MAMBA": "Selective scan, causal convolution, SSD and linear attention",
    "KERNEL-SAMPLING": "Sampler reductions, top-k and top-p, penalties, masks, random numbers",
    "KERNEL-COLLECTIVES": "All-reduce and fused collective kernels",
    "KERNEL-SPEC-DECODE": "Speculative decoding: expansion, rejection, acceptance, draft sampling",
    "KERNEL-GEMM-CPU-ELEM-X86WIDE": "AVX2 and AVX-512 tiers of the CPU GEMM",
    "KERNEL-GEMM-CPU-TILED": "Register-tiled CPU GEMM on every architecture",
    "KERNEL-CPU-CONV2D-SUBSAMPLE": "2-D convolution of conformer audio front ends",
    "KERNEL-DEPTHWISE-CONV1D": "Non-causal depthwise 1-D convolution",
    "KERNEL-ATTN-RELPOS": "Relative-position encoder self-attention",
    "KERNEL-CONV3D": "General 3-D convolution",
}
"""Row name -> title, in the matrix's order."""

CAPABILITIES: dict[str, str] = {
    "KERNEL-ACCEL-PROVIDER-SELECT": "provider_selection",
    "KERNEL-CUDA-DISPATCH-AOT": "cuda_dispatch",
    "KERNEL-GDN-SCRATCH": "scratch",
    "GDN-MOE-PACKED-BA": "packed_ba",
    "GDN-MOE-BF16-OUT": "model_dtype",
    "FIX-FP8-PLAN-CAPTURE": "capture",
    "KERNEL-GEMM-CPU-ELEM": "cpu_products",
    "KERNEL-GEMM-CPU-ELEM-X86WIDE": "wide_x86_products",
}
"""Rows that kernels of other rows carry, or that are a backend's or tier's part of them: proved by those
kernels (`kiln.tools.capabilities`). Ops of their own, if any, prepare what those kernels take."""

LACKING: dict[str, str] = {
    "KERNEL-ROPE-QKNORM": "MRoPE, insertion into the KV cache",
    "KERNEL-SSM-MAMBA": "selective scan, SSD",
}
"""What a row's title names and its ops do not cover yet: the row's state is that of the ops it has."""
