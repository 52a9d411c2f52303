"""The gated delta rule (KERNEL-GDN-PACKED-DECODE): one token a sequence, straight from the packed projection.
No target is named in this file.

A head's state S is [value, key]. A step decays it, S' = alpha S, adds the outer product of what the key does
not yet recall, d = beta (v - S' k), and reads it: S_new = S' + d k^T, out = S_new q.
"""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F16, F32, I32, I64
from kiln.ir.spec import Attr, Contract, DTypeVar, Op, Scalar, Ship, Tensor

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-GDN-PACKED-DECODE"
T = DTypeVar("T", (BF16, F16, F32))
S = DTypeVar("S", (F32, BF16, F16))
P = DTypeVar("P", (F32, BF16, F16))
O = DTypeVar("O", (BF16, F16, F32))  # noqa: E741  the output's type
I = DTypeVar("I", (I32, I64))  # noqa: E741  the index type

L2_EPS = np.float32(1e-6)
"""Inside the root of the L2 norm of q and k."""
SOFTPLUS_LINEAR = np.float32(20.0)
"""Above it softplus(x) is x."""

ENVELOPE = Contract("envelope", rel_l2=2.0**-8, max_eps=256.0)
"""Relative L2: one rounding of an output to bf16. Worst element, relative to the largest of the output: the
f32 state of one step differs by two sums of 128 terms in another order and by an exponential within 2 ulp."""

_KEYS: Any = ["mul", ["dim", "HEADS"], ["dim", "KEY_DIM"]]
_VALUES: Any = ["mul", ["dim", "HV"], ["dim", "VALUE_DIM"]]


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) in f32, not log1p: exactly 0 below about -17. x where it is above 20."""
    with np.errstate(over="ignore"):
        soft: Array = np.where(x > SOFTPLUS_LINEAR, x, np.log(np.float32(1) + np.exp(x)))
    return soft


def gates(a: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """(alpha, beta) f32: the decay exp(-exp(a_log) softplus(a + dt_bias)), sigmoid(b) rounded to b's type."""
    with np.errstate(all="ignore"):
        x = a.astype(np.float32) + dt_bias.astype(np.float32)
        alpha = np.exp(-np.exp(a_log.astype(np.float32)) * softplus(x))
        beta = np.float32(1) / (np.float32(1) + np.exp(-b.astype(np.float32)))
    return alpha, beta.astype(b.dtype).astype(np.float32)


def _unit(x: Array) -> Array:
    unit: Array = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float64(L2_EPS))
    return unit


def _packed_decode(
    *,
    mixed_qkv: Array,
    a: Array,
    b: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array,
    state_indices: Array,
    heads: int,
    scale: float,
    key_dim: int = 128,
    value_dim: int = 128,
    qk_l2norm: bool = True,
) -> tuple[Array, Array]:
    """(out [B, HV * V] before its rounding, state [SLOTS, HV * V * K]): one step of every row in float64."""
    rows, value_heads = a.shape
    split = heads * key_dim
    wide = mixed_qkv.astype(np.float64)
    q = wide[:, :split].reshape(rows, heads, key_dim)
    k = wide[:, split : 2 * split].reshape(rows, heads, key_dim)
    v = wide[:, 2 * split :].reshape(rows, value_heads, value_dim)
    with np.errstate(all="ignore"):
        q, k = (_unit(q), _unit(k)) if qk_l2norm else (q, k)
        repeat = value_heads // heads
        q, k = np.repeat(q * np.float64(np.float32(scale)), repeat, axis=1), np.repeat(k, repeat, axis=1)
        alpha, beta = gates(a, b, a_log, dt_bias)
        pool = state.copy().reshape(len(state), value_heads, value_dim, key_dim)
        out = np.zeros((rows, value_heads, value_dim))
        for n in range(rows):
            slot = int(state_indices[n])
            if slot <= 0:
                continue
            old = pool[slot].astype(np.float64) * alpha[n, :, None, None]
            d = beta[n, :, None] * (v[n] - np.einsum("hvk,hk->hv", old, k[n]))
            new = old + d[:, :, None] * k[n][:, None, :]
            out[n] = np.einsum("hvk,hk->hv", new, q[n])
            pool[slot] = new.astype(np.float32).astype(state.dtype)
        return out.reshape(rows, -1).astype(np.float32), pool.reshape(state.shape)


PACKED_DECODE = Op(
    name="gated_delta_rule_packed_decode",
    family=FAMILY,
    operands=(
        Tensor("mixed_qkv", T, ("B", ["add", ["mul", 2, _KEYS], _VALUES]),
               doc="q of every key head, k of every "
               "key head, v of every value head"),
        Tensor("a", T, ("B", "HV"), doc="decay, before its bias"),
        Tensor("b", T, ("B", "HV"), doc="update strength, before the sigmoid"),
        Tensor("a_log", F32, ("HV",), layout="dense"),
        Tensor("dt_bias", P, ("HV",), layout="dense"),
        Tensor("state", S, ("SLOTS", ["mul", _VALUES, ["dim", "KEY_DIM"]]), role="inout",
               doc="[value head, value, key] of every slot; slots that no row names are not touched"),
        Tensor("state_indices", I, ("B",), layout="dense",
               doc="the slot of each row, no two alike; 0 and below: "
               "none, the row of out is zeros"),
        Scalar("heads", I32, minimum=1, doc="key heads; value head h has key head h * heads / HV"),
        Scalar("scale", F32, positive=True, doc="of q; models use key_dim ** -0.5"),
        Scalar("key_dim", I32, default=128, minimum=1),
        Scalar("value_dim", I32, default=128, minimum=1),
        Tensor("out", O, ("B", _VALUES), role="out", doc="[value head, value] of every row"),
    ),
    returns=("out", "state"),
    attrs=(Attr("qk_l2norm", (True, False), True, "divide q and k by sqrt(sum of squares + 1e-6)"),),
    rows="B",
    width="HV",
    constraints=(
        (["eq", ["mod", ["dim", "HV"], ["dim", "HEADS"]], 0],
        "HV must be divisible by H: every key head serves as many "
         "value heads"),
        (["lt", ["mul", ["dim", "B"], ["mul", ["dim", "HV"], ["dim", "VALUE_DIM"]]], 2**31],
         "the rows of all states must be fewer than 2**31: split the batch"),
    ),
    contract=ENVELOPE,
    ship=(
        Ship({"T": BF16, "S": F32, "P": BF16, "O": BF16, "I": I32}),
        Ship({"T": BF16, "S": F32, "P": F32, "O": BF16, "I": I32}),
        Ship({"T": BF16, "S": F32, "P": F32, "O": F32, "I": I32}),
        Ship({"T": BF16, "S": BF16, "P": F32, "O": BF16, "I": I32}),
        Ship({"T": F16, "S": F32, "P": F32, "O": F16, "I": I32}),
        Ship({"T": F16, "S": F16, "P": F32, "O": F16, "I": I32}),
        Ship({"T": F32, "S": F32, "P": F32, "O": F32, "I": I32}),
    ),
    doc="One decode step of the gated delta rule from packed raw projections: L2 norm of q and k, gates, "
    "state update in place, output. Arithmetic in f32; beta is rounded to b's type, state and out once each.",
    reference=_packed_decode,
)  # fmt: skip

OPS: tuple[Op, ...] = (PACKED_DECODE,)
