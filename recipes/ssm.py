"""What surrounds linear attention (KERNEL-SSM-MAMBA): causal convolutions over tokens, and the split after
them. No target is named in this file.

A convolution has `width` taps, the newest last: y[c, t] = act(bias[c] + sum over j of weight[c, j] z[c, t -
(width - 1) + j]), where z before a sequence is its state, the last width - 1 raw inputs. Products and sums
are f32 in that order, rounded once.
"""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F16, F32, I32
from kiln.ir.spec import Attr, Contract, DTypeVar, Op, Scalar, Ship, Tensor
from kiln.recipes.gdn_chunk import BOUNDS, COVERED, sequences

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-SSM-MAMBA"
T = DTypeVar("T", (BF16, F16, F32))
P = DTypeVar("P", (F32, BF16, F16))

ENVELOPE = Contract("envelope", rel_l2=2.0**-8, max_eps=16.0)
"""One rounding to bf16; the exponential of silu within 2 ulp."""
L2_EPS = np.float32(1e-6)

_TAPS: Any = ["dim", "WIDTH"]
_HELD: Any = ["mul", ["sub", _TAPS, 1], ["dim", "C"]]
WEIGHT = Tensor("weight", T, ("C", "WIDTH"), layout="dense", doc="taps of each channel, the newest last")
BIAS = Tensor("bias", T, ("C",), layout="dense", optional=True)
STATE = Tensor(
    "conv_state",
    T,
    ("SLOTS", _HELD),
    "inout",
    doc="the last width - 1 inputs of each slot, the oldest first: [width - 1, C]",
)
ACTIVATION = Attr("silu", (True, False), True, "apply silu; False: none")
LIMITS: tuple[tuple[list[Any], str], ...] = (
    (["ge", _TAPS, 2], "width must be 2..4: the state holds at least one input"),
    (["le", _TAPS, 4], "width must be 2..4"),
)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (np.float32(1) + np.exp(-x))


def _convolve(window: Array, weight: Array, bias: Array | None, silu: bool) -> Array:
    """f32 [tokens, C] of [tokens + width - 1, C] inputs."""
    taps, width = weight.astype(np.float32), weight.shape[1]
    z = window.astype(np.float32)
    tokens = len(z) - width + 1
    total = (
        np.zeros((tokens, z.shape[1]), np.float32)
        if bias is None
        else np.tile(bias.astype(np.float32), (tokens, 1))
    )
    for j in range(width):
        total = total + z[j : j + tokens] * taps[:, j]
    return _silu(total) if silu else total


def _update(
    *,
    x: Array,
    weight: Array,
    conv_state: Array,
    state_indices: Array,
    bias: Array | None = None,
    silu: bool = True,
) -> tuple[Array, Array]:
    """(out [B, C] before its rounding, conv_state): one token of every row."""
    out, state = np.zeros(x.shape, np.float32), conv_state.copy()
    with np.errstate(all="ignore"):
        for n, slot in enumerate(map(int, state_indices)):
            if slot > 0:
                window = np.concatenate([state[slot].reshape(-1, x.shape[1]), x[n : n + 1]])
                out[n] = _convolve(window, weight, bias, silu)[0]
                state[slot] = window[1:].reshape(-1)
    return out, state


def _forward(
    *, x: Array, weight: Array, conv_state: Array, cu_seqlens: Array, state_indices: Array,
    has_initial_state: Array,
    bias: Array | None = None, silu: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """(out [T, C] before its rounding, conv_state): every token of every sequence."""
    out, state = np.zeros(x.shape, np.float32), conv_state.copy()
    with np.errstate(all="ignore"):
        for n, (begin, end) in enumerate(sequences(cu_seqlens, len(x))):
            slot = int(state_indices[n])
            if slot <= 0 or begin == end:
                continue
            held = state[slot].reshape(-1, x.shape[1])
            window = np.concatenate([held if has_initial_state[n] else np.zeros_like(held), x[begin:end]])
            out[begin:end] = _convolve(window, weight, bias, silu)
            state[slot] = window[len(window) - len(held) :].reshape(-1)
    return out, state


def _ships(*types: Any) -> tuple[Ship, ...]:
    return tuple(
        Ship({"T": t}, {"silu": s}, absent=a)
        for t in types
        for s, a in ((True, ("bias",)), (True, ()), (False, ("bias",)))
    )


UPDATE = Op(
    name="causal_conv1d_update",
    family=FAMILY,
    operands=(
        Tensor("x", T, ("B", "C"), doc="one token of each row"), WEIGHT, BIAS, STATE,
        Tensor("state_indices", I32, ("B",), layout="dense",
            doc="the slot of each row, no two alike; 0 and below: none, zeros"),
        Tensor("out", T, ("B", "C"), "out", layout="dense"),
    ),
    returns=("out", "conv_state"),
    attrs=(ACTIVATION,),
    rows="B",
    width="C",
    constraints=LIMITS,
    contract=ENVELOPE,
    ship=_ships(BF16, F32),
    doc="One step of a causal convolution over channels; the state takes the token in.",
    reference=_update,
)  # fmt: skip
FORWARD = Op(
    name="causal_conv1d",
    family=FAMILY,
    operands=(
        Tensor("x", T, ("T", "C"), doc="tokens of all sequences"), WEIGHT, BIAS, STATE, BOUNDS,
        Tensor("state_indices", I32, ("SEQS",), layout="dense",
            doc="the slot of each sequence, no two alike; 0 and below: none, zeros"),
        Tensor("has_initial_state", I32, ("SEQS",), layout="dense", doc="0: the sequence begins after zeros"),
        Tensor("out", T, ("T", "C"), "out", layout="dense"),
    ),
    returns=("out", "conv_state"),
    attrs=(ACTIVATION,),
    rows="T",
    width="C",
    constraints=(*LIMITS, COVERED),
    contract=ENVELOPE,
    ship=_ships(BF16, F32),
    doc="A causal convolution over the channels of sequences of any lengths; the states end as the last "
        "inputs, those of empty sequences stay. Boundaries as in "
    "gated_delta_rule_chunk.",
    reference=_forward,
)  # fmt: skip


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)) that loses nothing on either side; x where it is above 20."""
    with np.errstate(over="ignore"):
        small = np.log(np.float32(1) + np.exp(-np.abs(x)))
        return np.where(x > np.float32(20), x, np.maximum(x, np.float32(0)) + small)


def _post_conv(
    *, mixed_qkv: Array, a: Array, b: Array, a_log: Array, dt_bias: Array, heads: int, key_dim: int = 128,
    value_dim: int = 128,
) -> tuple[Array, ...]:  # fmt: skip
    """(q, k, v, g, beta) before rounding: [T, H K] twice, [T, HV V], [T, HV] twice."""
    del value_dim
    split = heads * key_dim
    with np.errstate(all="ignore"):
        parts = mixed_qkv[:, : 2 * split].astype(np.float64).reshape(len(a), 2, heads, key_dim)
        unit = parts / np.sqrt((parts * parts).sum(axis=-1, keepdims=True) + np.float64(L2_EPS))
        q, k = (unit[:, i].reshape(len(a), split).astype(np.float32) for i in (0, 1))
        g = -np.exp(a_log.astype(np.float32)) * _softplus(a.astype(np.float32) + dt_bias.astype(np.float32))
        beta = np.float32(1) / (np.float32(1) + np.exp(-b.astype(np.float32)))
    return q, k, mixed_qkv[:, 2 * split :].copy(), g, beta


_KEYS: Any = ["mul", ["dim", "HEADS"], ["dim", "KEY_DIM"]]
_VALUES: Any = ["mul", ["dim", "HV"], ["dim", "VALUE_DIM"]]
POST_CONV = Op(
    name="gated_delta_rule_post_conv",
    family=FAMILY,
    operands=(
        Tensor(
            "mixed_qkv",
            T,
            ("T", ["add", ["mul", 2, _KEYS], _VALUES]),
            doc="q, k, v of every head after the convolution",
        ),
        Tensor("a", T, ("T", "HV"), doc="decay, before its bias"),
        Tensor("b", T, ("T", "HV"), doc="update strength, before the sigmoid"),
        Tensor("a_log", F32, ("HV",), layout="dense"),
        Tensor("dt_bias", P, ("HV",), layout="dense"),
        Scalar("heads", I32, minimum=1, doc="key heads"),
        Scalar("key_dim", I32, default=128, minimum=1),
        Scalar("value_dim", I32, default=128, minimum=1),
        Tensor("q", T, ("T", _KEYS), "out", layout="dense", doc="over the root of its sum of squares + 1e-6"),
        Tensor("k", T, ("T", _KEYS), "out", layout="dense", doc="the same"),
        Tensor("v", T, ("T", _VALUES), "out", layout="dense", doc="bit for bit"),
        Tensor("g", F32, ("T", "HV"), "out", layout="dense", doc="-exp(a_log) softplus(a + dt_bias)"),
        Tensor("beta", F32, ("T", "HV"), "out", layout="dense", doc="sigmoid(b), not rounded"),
    ),
    rows="T",
    width="HV",
    constraints=((["eq", ["mod", ["dim", "HV"], ["dim", "HEADS"]], 0], "HV must be divisible by H"),),
    contract=Contract("envelope", rel_l2=2.0**-8, max_eps=64.0),
    ship=(Ship({"T": BF16, "P": F32}), Ship({"T": BF16, "P": BF16}), Ship({"T": F32, "P": F32})),
    doc="Between the convolution and gated_delta_rule_chunk: q and k normalized, v copied, log decays and "
        "strengths.",
    reference=_post_conv,
)

OPS: tuple[Op, ...] = (UPDATE, FORWARD, POST_CONV)
