"""What the config.json of an EAGLE-3 head says, in the official layout (LAW.md 1.5), and whether it fits a target. Imports no torch.

Nothing is guessed: a flag that changes the mathematics and is not implemented is refused by name, whatever its tensors look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.models.folder import read_config

DEFAULT_ROPE_THETA = 10000.0  # the reference's, also for targets with another base
MIN_TARGET_LAYERS = 3

#: field -> the values under which the forward pass is that of LAW.md 1.2; an absent field is one of them
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "norm_before_residual": (None, False),
    "norm_before_fc": (None, False),
    "fc_norm": (None, False),
    "norm_output": (None, True),
    "target_hidden_size": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "num_hidden_layers": (None, 1),
    "architectures": (None, [], ["LlamaForCausalLM"], ["LlamaForCausalLMEagle3"]),
    "model_type": (None, "llama"),
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 head. head_dim None: config.json does not say; it follows from the shape of q_proj."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    aux_layer_ids: tuple[int, ...] | None = None


def feature_layers(num_target_layers: int) -> tuple[int, int, int]:
    """The decoder layers whose *inputs* are the fused features: 2, L//2, L-3 (L=30: 2, 15, 27)."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """config.json of an EAGLE-3 head.

    Raises UserError that names the field, its value and what is allowed.
    """
    raw = read_config(folder)

    def refuse(field: str, allowed: str) -> UserError:
        return UserError(f"draft '{folder}': config.json has {field}={raw[field]!r}; allowed: {allowed}")

    for field in ("speculators_config", "transformer_layer_config"):
        if field in raw:
            raise UserError(f"draft '{folder}': config.json has {field}: the speculators layout; allowed: the official EAGLE-3 layout")
    for field, plain in _PLAIN_VALUES.items():
        if not any(raw.get(field) == value and type(raw.get(field)) is type(value) for value in plain):
            raise refuse(field, " or ".join("not set" if value is None else repr(value) for value in plain))

    def read_size(field: str, default: int | None = None) -> int:
        value = raw.get(field, default)
        if value is None:
            raise UserError(f"draft '{folder}': config.json has no {field}; an EAGLE-3 head needs it")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refuse(field, "an integer >= 1")
        return value

    num_heads = read_size("num_attention_heads")
    vocab_size = read_size("vocab_size")
    config = Eagle3Config(
        hidden_size=read_size("hidden_size"),
        intermediate_size=read_size("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=read_size("num_key_value_heads", num_heads),
        head_dim=read_size("head_dim") if raw.get("head_dim") is not None else None,
        vocab_size=vocab_size,
        draft_vocab_size=read_size("draft_vocab_size", vocab_size),
        rms_norm_eps=_read_eps(raw, folder),
        rope_theta=_read_rope_theta(raw, folder),
        aux_layer_ids=_read_aux_layer_ids(raw, folder),
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise refuse("num_key_value_heads", f"a divisor of num_attention_heads={config.num_attention_heads}")
    if config.head_dim is not None and config.head_dim % 2:
        raise refuse("head_dim", "an even number")
    if config.draft_vocab_size > config.vocab_size:
        raise refuse("draft_vocab_size", f"at most vocab_size={config.vocab_size}")
    return config


def check_fits_target(config: Eagle3Config, folder: Path, *, hidden_size: int, vocab_size: int, num_hidden_layers: int) -> None:
    """Raises UserError when the head was made for a target of other sizes; names the field and both values."""
    for field, target_value in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
        value = getattr(config, field)
        if value != target_value:
            raise UserError(f"draft '{folder}': config.json has {field}={value}, the target has {field}={target_value}; they must agree")
    if num_hidden_layers < MIN_TARGET_LAYERS:
        raise UserError(
            f"draft '{folder}': the target has num_hidden_layers={num_hidden_layers}; allowed: at least {MIN_TARGET_LAYERS} for EAGLE-3"
        )
    # the field counts layer outputs, which enter the layer after: [1, 14, 26] are the inputs of 2, 15, 27
    expected = tuple(layer - 1 for layer in feature_layers(num_hidden_layers))
    if config.aux_layer_ids is not None and config.aux_layer_ids != expected:
        raise UserError(
            f"draft '{folder}': config.json has eagle_aux_hidden_state_layer_ids={list(config.aux_layer_ids)}; "
            f"allowed: {list(expected)} (inputs of layers 2, L//2, L-3 of a target of {num_hidden_layers})"
        )


def _read_eps(raw: dict[str, Any], folder: Path) -> float:
    value = raw.get("rms_norm_eps", 1e-6)  # the default of Llama's configuration, which the reference reads it through
    if not isinstance(value, float) or not 0 < value < 1:
        raise UserError(f"draft '{folder}': config.json has rms_norm_eps={value!r}; allowed: a number between 0 and 1")
    return value


def _read_rope_theta(raw: dict[str, Any], folder: Path) -> float:
    """The rotary base: `rope_theta`, or `rope_parameters.rope_theta`; without both 10000, whatever the target's (LAW.md 1.5)."""
    found: dict[str, float] = {}
    for field in ("rope_scaling", "rope_parameters"):
        section = raw.get(field) or {}
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise UserError(f"draft '{folder}': config.json has {field} of type {kind!r}; allowed: default (no scaling)")
        if section.get("rope_theta") is not None:
            found[f"{field}.rope_theta"] = section["rope_theta"]
    if raw.get("rope_theta") is not None:
        found["rope_theta"] = raw["rope_theta"]
    for field, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise UserError(f"draft '{folder}': config.json has {field}={value!r}; allowed: a number > 0")
    if len(set(found.values())) > 1:
        both = " and ".join(f"{field}={value}" for field, value in found.items())
        raise UserError(f"draft '{folder}': config.json has {both}; they must agree")
    return float(next(iter(found.values()), DEFAULT_ROPE_THETA))


def _read_aux_layer_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...] | None:
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise UserError(f"draft '{folder}': config.json has eagle_aux_hidden_state_layer_ids={ids!r}; allowed: a list of three integers")
    return tuple(ids)
