"""What an engine decides once for gated-delta-rule layers, the same for dense and MoE models: whether a batch
may take the packed decode step, and the element types of what surrounds the recurrence.

Neither asks for a model's shape or its experts: a term of that kind is how one family of models silently
takes a slower path.
"""

from dataclasses import dataclass
from enum import StrEnum

from kiln.runtime.errors import ContractError


class Eligibility(StrEnum):
    """Why a batch may not take a decode step, or `ok`."""

    OK = "ok"
    ENV_OFF = "env_off"
    """Switched off; the step with a ring is by default."""
    NO_PACKED_BA = "no_packed_ba"
    """The layer has no merged [b; a] projection."""
    SPEC_DECODE_ACTIVE = "spec_decode_active"
    PREFILL_IN_BATCH = "prefill_in_batch"
    NO_DECODE_ROWS = "no_decode_rows"
    FP8_TOWER_EXCLUDED = "fp8_tower_excluded"
    """The native FP8 layers, whose projection is predicted to stay f32."""
    MIXED_QKV_DTYPE_F32 = "mixed_qkv_dtype_f32"
    """The projection is not of the model's type."""
    KV_CONNECTOR = "kv_connector"
    """States leave the slot's pool at any time: only a flushed state is whole."""
    ALL_MODE_CACHE = "all_mode_cache"
    """Every token's state is cached, and the ring never makes most of them."""


@dataclass(frozen=True)
class DecodeBatch:
    """What of a batch decides."""

    decodes: int
    """Rows of one token."""
    prefills: int = 0
    """Sequences of several."""
    speculative: bool = False
    """Whether any row has draft tokens."""


def packed_decode_eligibility(
    batch: DecodeBatch,
    *,
    packed_ba: bool,
    mixed_qkv: str,
    model: str,
    enabled: bool = True,
    fp8_tower: bool = False,
) -> Eligibility:
    """Whether `gated_delta_rule_packed_decode` may serve a batch; the first reason in the order of checks.

    Args:
        batch: the batch.
        packed_ba: whether the layer holds the merged projection (`kiln.runtime.projections.pack_ba`).
        mixed_qkv: element type of the qkvz product's output.
        model: the activation type of the model.
        enabled: whether the user left it on.
        fp8_tower: whether the layer is of those excluded while their projection is f32.
    """
    checks = (
        (enabled, Eligibility.ENV_OFF),
        (packed_ba, Eligibility.NO_PACKED_BA),
        (not batch.speculative, Eligibility.SPEC_DECODE_ACTIVE),
        (batch.prefills == 0, Eligibility.PREFILL_IN_BATCH),
        (batch.decodes > 0, Eligibility.NO_DECODE_ROWS),
        (not fp8_tower, Eligibility.FP8_TOWER_EXCLUDED),
        (mixed_qkv == model, Eligibility.MIXED_QKV_DTYPE_F32),
    )
    return next((reason for holds, reason in checks if not holds), Eligibility.OK)


def replay_decode_eligibility(
    packed: Eligibility, *, enabled: bool = False, kv_connector: bool = False, all_mode_cache: bool = False
) -> Eligibility:
    """Whether `gated_delta_rule_replay_decode` may serve a batch that the packed step would: off unless
    `enabled`, and never where something else reads states between flushes."""
    if packed is not Eligibility.OK:
        return packed
    checks = (
        (enabled, Eligibility.ENV_OFF),
        (not kv_connector, Eligibility.KV_CONNECTOR),
        (not all_mode_cache, Eligibility.ALL_MODE_CACHE),
    )
    return next((reason for holds, reason in checks if not holds), Eligibility.OK)


@dataclass(frozen=True)
class LayerTypes:
    """Element types of one layer between its recurrence and its output projection."""

    dcore: str
    """Output of the recurrence, of prefill and decode alike; rows of padded tokens are zeros."""
    z: str
    """The gate, a view of the qkvz product."""
    norm_weight: str
    """Converted once, at load."""
    y: str
    """Output of the gated norm."""

    def __post_init__(self) -> None:
        """Raises: ContractError, for types that `rms_norm_gated` does not take together."""
        found = f"dcore {self.dcore}, z {self.z}, norm weight {self.norm_weight}, y {self.y}"
        rules = (
            (self.dcore == self.z, "dcore and z must have the same dtype"),
            (self.norm_weight == self.dcore, "norm weight dtype must match dcore"),
            (self.dcore in (self.y, "f32"), "output dtype must be the model dtype or f32"),
        )
        for holds, rule in rules:
            if not holds:
                raise ContractError(f"delta rule layer: {rule}, found {found}.")


def in_model_type(flag: str | None) -> bool:
    """Whether the recurrence's output has the model's type: a flag of "0" alone rolls back to f32."""
    return flag != "0"


def layer_types(model: str, flag: str | None = None) -> LayerTypes:
    """The types of every layer of a model, dense or MoE.

    Args:
        model: the activation type, bf16 or f16 (or f32).
        flag: the user's switch as read, None where it is not set; see `in_model_type`.
    """
    held = model if in_model_type(flag) else "f32"
    return LayerTypes(held, held, held, model)
