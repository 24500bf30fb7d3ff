"""What the config.json of an EAGLE-3 head says, in every known layout (LAW.md 1.5), and whether it fits a target. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.models.draft_fields import NESTED_LAYER_IDS, DraftFields
from engine.models.rope_fields import take_rope

MIN_TARGET_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes and variants of an EAGLE-3 head.

    head_dim: None: config.json does not say; it follows from the shape of q_proj.
    target_hidden_size: of each feature; that of the target, hidden_size if config.json does not say.
    feature_layers: the target's decoder layers whose *inputs* are the features, in the order of fc's columns; None: EAGLE-3's three.
    max_position_embeddings: the longest sequence it was trained for, None if config.json does not say.
    rope_scaling: {"rope_type": ..., its numbers}, without the base.
    norm_before_residual: the layer's residual is the feature after hidden_norm, not before.
    norm_before_fc: one RMSNorm over all features side by side, before fc (tensor input_norm).
    fc_norm: one RMSNorm for each feature, before fc (tensors fc_norm.0, fc_norm.1, ...).
    norm_output: what a draft step hands to the next is the feature after the last norm, not before (EAGLE-3.1).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    max_position_embeddings: int | None
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def num_features(self) -> int:
        return 3 if self.feature_layers is None else len(self.feature_layers)


def default_feature_layers(num_target_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are EAGLE-3's features: 2, L//2, L-3 (L=30: 2, 15, 27)."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """config.json of an EAGLE-3 head.

    Raises UserError that names the field, its value and what is allowed.
    """
    fields = DraftFields(folder)
    num_heads = fields.take_size("num_attention_heads")
    hidden_size = fields.take_size("hidden_size")
    vocab_size = fields.take_size("vocab_size")
    rope_theta, rope_scaling = take_rope(fields)
    config = Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=fields.take_size("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.take_optional_size("num_key_value_heads") or num_heads,
        head_dim=fields.take_optional_size("head_dim"),
        vocab_size=vocab_size,
        draft_vocab_size=fields.take_optional_size("draft_vocab_size") or vocab_size,
        target_hidden_size=fields.take_optional_size("target_hidden_size") or hidden_size,
        feature_layers=_take_feature_layers(fields),
        max_position_embeddings=fields.take_optional_size("max_position_embeddings"),
        rms_norm_eps=_take_eps(fields),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_before_residual=_take_norm_before_residual(fields),
        norm_before_fc=fields.take_flag("norm_before_fc"),
        fc_norm=fields.take_flag("fc_norm"),
        # false when not set, as vLLM, SGLang, TensorRT-LLM and speculators read it, and SpecForge from September 2026 on (its PR 879)
        norm_output=fields.take_flag("norm_output"),
    )
    if num_heads % config.num_key_value_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if config.head_dim is not None and config.head_dim % 2:
        raise fields.refusal("head_dim", "an even number")
    if config.draft_vocab_size > vocab_size:
        raise fields.refusal("draft_vocab_size", f"at most vocab_size={vocab_size}")
    if fields.take_optional_size("num_aux_hidden_states") not in (None, config.num_features):
        raise fields.refusal("num_aux_hidden_states", f"{config.num_features}, the number of eagle_aux_hidden_state_layer_ids (not set: 3)")
    if config.norm_before_fc and config.fc_norm:
        raise fields.refusal("norm_before_fc", "false, as fc_norm is true")
    fields.refuse_the_rest()
    return config


def check_fits_target(config: Eagle3Config, folder: Path, *, hidden_size: int, vocab_size: int, num_hidden_layers: int) -> None:
    """Raises UserError when the head was made for a target of other sizes; names the field and both values."""
    hidden_field = "hidden_size" if config.target_hidden_size == config.hidden_size else "target_hidden_size"
    for field, value, target_field, target_value in (
        ("vocab_size", config.vocab_size, "vocab_size", vocab_size),
        (hidden_field, config.target_hidden_size, "hidden_size", hidden_size),
    ):
        if value != target_value:
            raise UserError(
                f"draft '{folder}': config.json has {field}={value}, the target has {target_field}={target_value}; they must agree"
            )
    if config.feature_layers is None:
        if num_hidden_layers < MIN_TARGET_LAYERS:
            raise UserError(
                f"draft '{folder}': the target has num_hidden_layers={num_hidden_layers}; allowed: at least {MIN_TARGET_LAYERS} for EAGLE-3"
            )
    elif config.feature_layers[-1] >= num_hidden_layers:
        raise UserError(
            f"draft '{folder}': config.json's eagle_aux_hidden_state_layer_ids mean the inputs of decoder layers "
            f"{list(config.feature_layers)}; allowed: 0 to num_hidden_layers-1 = {num_hidden_layers - 1} of the target"
        )


def _take_feature_layers(fields: DraftFields) -> tuple[int, ...] | None:
    """The layers whose inputs are the features, None when no field says.

    At the top (speculators, vLLM) an id k is the input of layer k. In eagle_config (SpecForge, SGLang, ModelOpt) it is the output of
    layer k, which is the input of layer k+1: with 30 layers [2, 15, 27] and [1, 14, 26] are the same.
    """
    found = {}
    for field, shift in (("eagle_aux_hidden_state_layer_ids", 0), (NESTED_LAYER_IDS, 1)):
        ids = fields.take(field)
        if ids is None or ids == []:
            continue
        # fc's columns are in the order of the layers: every program collects the features as they come up
        if not isinstance(ids, list) or not all(type(layer) is int and layer >= 0 for layer in ids) or ids != sorted(ids):
            raise fields.refusal(field, "integers >= 0 in rising order")
        found[field] = tuple(layer + shift for layer in ids)
    if len(set(found.values())) > 1:
        raise fields.refusal(NESTED_LAYER_IDS, "one less than each of eagle_aux_hidden_state_layer_ids, which counts inputs")
    return next(iter(found.values()), None)


def _take_norm_before_residual(fields: DraftFields) -> bool:
    """False when it is not set, but for speculators' files: there vLLM takes true and speculators itself false, so it must be set."""
    if fields.is_speculators and fields.take("norm_before_residual") is None:
        raise fields.missing("norm_before_residual", "a head of speculators")
    return fields.take_flag("norm_before_residual")


def _take_eps(fields: DraftFields) -> float:
    value = fields.take("rms_norm_eps")
    if value is None:
        return 1e-6  # the default of Llama's configuration, which the reference reads it through
    if not isinstance(value, float) or not 0 < value < 1:
        raise fields.refusal("rms_norm_eps", "a number between 0 and 1")
    return value
