"""The gated delta rule's decode step that seldom writes its state (KERNEL-GDN-REPLAYSSM). No target is named
in this file.

A state S [value, key] is kept as an older state S0 and the last m steps, of each the update d, the key k and
the log decay g: S = exp(sum of g) S0 + sum over j of W_j d_j k_j^T, with W_j = exp(sum of g after j). A step
with decay alpha, strength beta, value v and query q is d = beta (v - alpha S k), out = alpha S q + d (k . q).
It appends (d, k, g) to the ring, and S0 is read alone. The step that would fill the window, or one that is
forced, writes S0 = alpha S + d k^T instead and appends nothing: at most window - 1 entries live, and the
caller's next write_pos is 0, else one more.
"""

from typing import Any, TypeAlias

import numpy as np

from kiln.ir.dtypes import BF16, F16, F32, I32
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Ship, Tensor
from kiln.recipes.gdn import ENVELOPE, gates, log_decay, unit

Array: TypeAlias = np.ndarray[Any, Any]

FAMILY = "KERNEL-GDN-REPLAYSSM"
WINDOW = 16
"""Steps from one write of the state to the next. State and ring traffic together are least at
sqrt(4 HV V K / (HV V + 2 H K)): 16.0 for 32 value heads, 17.5 for 48."""
T = DTypeVar("T", (BF16, F16, F32))
R = DTypeVar("R", (F32, BF16))
O = DTypeVar("O", (BF16, F16, F32))  # noqa: E741  the output's type

_KEYS: Any = ["mul", ["dim", "HEADS"], ["dim", "KEY_DIM"]]
_VALUES: Any = ["mul", ["dim", "HV"], ["dim", "VALUE_DIM"]]


def _weights(g: Array) -> tuple[Any, Array]:
    """(decay since S0, W [m]) of the log decays [m]: sums from the last entry on, so that a g of -inf forgets
    what was before it and nothing else."""
    after = np.concatenate([np.cumsum(g[:0:-1])[::-1], np.zeros(min(1, len(g)))])
    return np.exp(g.sum()), np.exp(after)


def _append(old: list[Array], q: Array, step: Any) -> tuple[Array, Array]:
    """(out [V], d [V]) of one head from S0 and its ring, S itself never made."""
    state, d, k, g = old
    v, key, alpha, beta = step
    kept, weights = _weights(g)
    recalled = alpha * (kept * (state @ key) + (weights * (k @ key)) @ d)
    read = alpha * (kept * (state @ q) + (weights * (k @ q)) @ d)
    fresh = beta * (v - recalled)
    return read + fresh * (key @ q), fresh


def _fold(old: list[Array], q: Array, step: Any) -> tuple[Array, Array]:
    """(out [V], state [V, K]) of one head: the ring's steps one after another, then this one."""
    s, d, k, g = old
    v, key, alpha, beta = step
    for j in range(len(g)):
        s = np.exp(g[j]) * s + np.outer(d[j], k[j])
    s = alpha * s
    s = s + np.outer(beta * (v - s @ key), key)
    return s @ q, s


def replay_step(
    *,
    mixed_qkv: Array,
    a: Array,
    b: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array,
    ring_d: Array,
    ring_k: Array,
    ring_g: Array,
    state_indices: Array,
    write_pos: Array,
    force_flush: Array | None = None,
    heads: int,
    scale: float,
    window: int = WINDOW,
    key_dim: int = 128,
    value_dim: int = 128,
    qk_l2norm: bool = True,
) -> tuple[Array, ...]:
    """(out f64, state, ring_d, ring_k, ring_g): one step of every row in float64 but for the gates' f32.
    State and rings are copies in the types that they have, f64 too."""
    rows, value_heads = a.shape
    split, repeat = heads * key_dim, value_heads // heads
    wide = mixed_qkv.astype(np.float64)
    q = wide[:, :split].reshape(rows, heads, key_dim)
    k = wide[:, split : 2 * split].reshape(rows, heads, key_dim)
    v = wide[:, 2 * split :].reshape(rows, value_heads, value_dim)
    pool = state.copy().reshape(-1, value_heads, value_dim, key_dim)
    d_ring = ring_d.copy().reshape(-1, value_heads, window, value_dim)
    k_ring = ring_k.copy().reshape(-1, heads, window, key_dim)
    g_ring = ring_g.copy().reshape(-1, value_heads, window)
    out = np.zeros((rows, value_heads, value_dim))
    with np.errstate(all="ignore"):
        q, k = (unit(q), unit(k)) if qk_l2norm else (q, k)
        q = q * np.float64(np.float32(scale))
        decays = log_decay(a, a_log, dt_bias)
        alpha = np.exp(decays.astype(np.float64))
        beta = gates(a, b, a_log, dt_bias)[1].astype(np.float64)
        for n in range(rows):
            slot, m = int(state_indices[n]), int(write_pos[n])
            if slot <= 0 or not 0 <= m < window:
                continue
            flush = m == window - 1 or (force_flush is not None and bool(force_flush[n]))
            for hv in range(value_heads):
                h = hv // repeat
                old = (pool[slot, hv], d_ring[slot, hv, :m], k_ring[slot, h, :m], g_ring[slot, hv, :m])
                step = (v[n, hv], k[n, h], alpha[n, hv], beta[n, hv])
                run = _fold if flush else _append
                out[n, hv], made = run([x.astype(np.float64) for x in old], q[n, h], step)
                if flush:
                    pool[slot, hv] = made
                else:
                    d_ring[slot, hv, m], g_ring[slot, hv, m] = made.astype(d_ring.dtype), decays[n, hv]
            if not flush:
                k_ring[slot, :, m] = k[n].astype(k_ring.dtype)
    written = ((pool, state), (d_ring, ring_d), (k_ring, ring_k), (g_ring, ring_g))
    return out.reshape(rows, -1), *(x.reshape(like.shape) for x, like in written)


def _replay_decode(**call: Any) -> tuple[Array, ...]:
    """replay_step with out as f32, before its rounding."""
    results = replay_step(**call)
    return results[0].astype(np.float32), *results[1:]


def _domain(
    *, write_pos: Array, ring_k: Array, ring_g: Array, window: int, key_dim: int,
    force_flush: Array | None = None, **_: Any,
) -> dict[str, Array]:  # fmt: skip
    """Positions inside the window, keys of length 1, decays; every third forced row is one."""
    with np.errstate(all="ignore"):
        keys = ring_k.astype(np.float64).reshape(-1, key_dim)
        inside = {"write_pos": write_pos % window, "ring_g": -np.abs(ring_g)}
        inside |= {"ring_k": unit(keys).reshape(ring_k.shape)}
    return inside if force_flush is None else {**inside, "force_flush": force_flush % 3 == 0}


def _ships() -> tuple[Ship, ...]:
    return tuple(
        Ship({"T": t, "R": r, "O": t}, absent=absent, rare=t is F32 or bool(absent))
        for t, r in ((BF16, F32), (BF16, BF16), (F32, F32))
        for absent in (("force_flush",), ())
    )


REPLAY_DECODE = Op(
    name="gated_delta_rule_replay_decode",
    family=FAMILY,
    operands=(
        Tensor("mixed_qkv", T, ("B", ["add", ["mul", 2, _KEYS], _VALUES]),
               doc="q of every key head, k of every key head, v of every value head"),
        Tensor("a", T, ("B", "HV"), doc="decay, before its bias"),
        Tensor("b", T, ("B", "HV"), doc="update strength, before the sigmoid"),
        Tensor("a_log", F32, ("HV",), layout="dense"),
        Tensor("dt_bias", F32, ("HV",), layout="dense",
               doc="converted once, at load, where a checkpoint has bf16"),
        Tensor("state", F32, ("SLOTS", ["mul", _VALUES, ["dim", "KEY_DIM"]]), role="inout",
               doc="[value head, value, key] of every slot as of its last flush; written by flushes alone"),
        Tensor("ring_d", R, ("SLOTS", ["mul", ["dim", "WINDOW"], _VALUES]), role="inout",
               doc="[value head, window, value]: updates d since the flush"),
        Tensor("ring_k", R, ("SLOTS", ["mul", ["dim", "WINDOW"], _KEYS]), role="inout",
               doc="[key head, window, key]: keys, normalized, not scaled"),
        Tensor("ring_g", F32, ("SLOTS", ["mul", ["dim", "WINDOW"], ["dim", "HV"]]), role="inout",
               doc="[value head, window]: log decays"),
        Tensor("state_indices", I32, ("B",), layout="dense",
               doc="the slot of each row, no two alike; 0 and below: none, the row of out is zeros"),
        Tensor("write_pos", I32, ("B",), layout="dense",
               doc="live entries of each row's ring, 0..window - 1; 0 in a slot that begins a request"),
        Tensor("force_flush", I32, ("B",), layout="dense", optional=True,
               doc="not 0: this step writes the state, wherever its ring stands; absent on CPUs alone"),
        Scalar("heads", I32, minimum=1, doc="key heads; value head h has key head h * heads / HV"),
        Scalar("scale", F32, positive=True, doc="of q; models use key_dim ** -0.5"),
        Scalar("window", I32, default=WINDOW, minimum=1, doc="steps from a flush to the next"),
        Scalar("key_dim", I32, default=128, minimum=1),
        Scalar("value_dim", I32, default=128, minimum=1),
        Tensor("out", O, ("B", _VALUES), role="out", doc="[value head, value] of every row"),
    ),
    returns=("out", "state", "ring_d", "ring_k", "ring_g"),
    attrs=(Attr("qk_l2norm", (True, False), True, "divide q and k by sqrt(sum of squares + 1e-6)"),),
    rows="B",
    width="HV",
    constraints=(
        (["eq", ["mod", ["dim", "HV"], ["dim", "HEADS"]], 0],
         "HV must be divisible by H: every key head serves as many value heads"),
        (["lt", ["mul", ["dim", "B"], ["mul", ["dim", "HV"], ["dim", "VALUE_DIM"]]], 2**31],
         "the rows of all states must be fewer than 2**31: split the batch"),
    ),
    contract=ENVELOPE,
    ship=_ships(),
    doc="gated_delta_rule_packed_decode over a state that is read at every step and written at every "
    "window-th: between, its updates lie in a ring. Entries beyond write_pos are never read. A row whose "
    "write_pos is outside the window is refused on CPUs and, as one without a slot, skipped on CUDA.",
    reference=_replay_decode,
    domain=_domain,
)  # fmt: skip

OPS: tuple[Op, ...] = (REPLAY_DECODE,)
