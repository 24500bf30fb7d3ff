"""The fields of a draft head's config.json, from every known layout brought into one. Imports no torch.

A field that changes the mathematics must not be passed over in silence (FIELD-CASES B23), and its name does not tell. So every field is
either read, or must have the one value that is implemented, or is known to mean nothing here; any other is refused by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.models.folder import read_config

#: where SpecForge and ModelOpt nest the layer ids; elsewhere they are a top-level field, and count differently
NESTED_LAYER_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"

#: field -> the values under which the forward pass is the implemented one; unset is one of them
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral", "qwen2", "qwen3"),  # one layer of theirs is Llama's, but for tensors that would be refused
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "layer_types": (["full_attention"],),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "speculators_model_type": ("eagle3",),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "has_lm_head": (True,),
    "parallel_draft_step": (1,),
}

_OF_TRANSFORMERS = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "pretraining_tp", "return_dict"),
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan"),
)
_OF_TRAINING = (
    *("initializer_range", "attention_dropout", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init"),
    *("speculators_config", "speculators_version", "target_model_type", "modal_type", "inference_type"),
)
_WITHOUT_THEIR_SWITCH = ("max_window_layers", "parallel_draft_heads_num_layers")  # of use_sliding_window and parallel_draft_step
_TOLD_BY_TENSORS = ("num_hidden_layers", "bias", "tie_word_embeddings")  # Vicuna-13B's head says 40 layers and has one
_IGNORED = {*_OF_TRANSFORMERS, *_OF_TRAINING, *_WITHOUT_THEIR_SWITCH, *_TOLD_BY_TENSORS}


class DraftFields:
    """The fields of config.json in `folder` that are set. Each is taken once; `refuse_the_rest` then looks at those that nobody took.

    Of speculators' `transformer_layer_config` and of `eagle_config` the fields count as if they stood at the top. Null is not set.

    Raises UserError from every method, with the field, its value and what is allowed; from the start on when a section is no JSON object
    or says another thing than the top does.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._values: dict[str, Any] = {}
        top = read_config(folder)
        self.is_speculators = top.get("transformer_layer_config") is not None
        sections = {name: top.pop(name, None) or {} for name in ("transformer_layer_config", "eagle_config")}
        for name, section in sections.items():
            if not isinstance(section, dict):
                raise UserError(f"draft '{folder}': config.json has {name}={section!r}; allowed: a JSON object")
        if "eagle_aux_hidden_state_layer_ids" in sections["eagle_config"]:
            top[NESTED_LAYER_IDS] = sections["eagle_config"].pop("eagle_aux_hidden_state_layer_ids")
        for fields in (*sections.values(), top):
            for name, value in fields.items():
                if value is None or name in _IGNORED or name.startswith("_"):
                    continue
                other = self._values.setdefault(name, value)
                if other != value:
                    raise UserError(f"draft '{folder}': config.json has {name}={other!r} and {name}={value!r}; they must agree")
        self._left = set(self._values)

    def take(self, field: str) -> Any:
        """The value of `field`, None when it is not set."""
        self._left.discard(field)
        return self._values.get(field)

    def refusal(self, field: str, allowed: str) -> UserError:
        """The error to raise of a value that is set."""
        return UserError(f"draft '{self._folder}': config.json has {field}={self._values[field]!r}; allowed: {allowed}")

    def missing(self, field: str, whose: str = "an EAGLE-3 head") -> UserError:
        """The error to raise of a field that is not set."""
        return UserError(f"draft '{self._folder}': config.json has no {field}; {whose} needs it")

    def take_optional_size(self, field: str) -> int | None:
        """An integer from 1, None when it is not set."""
        value = self.take(field)
        if value is not None and (type(value) is not int or value < 1):
            raise self.refusal(field, "an integer >= 1")
        return value

    def take_size(self, field: str) -> int:
        """An integer from 1."""
        value = self.take_optional_size(field)
        if value is None:
            raise self.missing(field)
        return value

    def take_flag(self, field: str) -> bool:
        """True or false; false when it is not set."""
        value = self.take(field)
        if value is not None and type(value) is not bool:
            raise self.refusal(field, "true or false")
        return bool(value)

    def refuse_the_rest(self) -> None:
        """Raises UserError unless every field that was not taken has an implemented value."""
        if self._values.get("use_sliding_window") is False:
            self.take("sliding_window")  # a window that is switched off
        for field, allowed in _IMPLEMENTED.items():
            value = self.take(field)
            if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
                raise self.refusal(field, " or ".join(["not set", *map(repr, allowed)]))
        if self._left:
            field = min(self._left)
            raise self.refusal(field, "no field of this name; if it does not change the mathematics of the head, remove it")
