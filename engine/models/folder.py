"""What a model folder holds, read without torch: its configuration, its weight files, its tokenizer."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from engine.errors import UserError

#: what safetensors and torch.load raise for a broken file
BROKEN_FILE = (SafetensorError, pickle.UnpicklingError, struct.error, LookupError, ValueError, RuntimeError, OSError, EOFError)

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

#: `architectures` of a config.json -> its `model_type`, by which transformers picks the class
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

#: the others change their frequencies with the longest sequence of a pass: a row's law would depend on its neighbours
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

TARGET_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")  # what a draft must fit
_NEEDED_SIZES = (*TARGET_SIZES, "max_position_embeddings")  # absent ones would become those of some other model

#: fields that change the mathematics, which the classes of these architectures pass over -> the values that change nothing
_IGNORED_FIELDS = {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "partial_rotary_factor": (None, 1.0)}


class LengthLimit(NamedTuple):
    """Tokens that a text may have, prompt and output together, and the field of config.json that says so."""

    num_tokens: int
    field: str


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """config.json of a model folder, or another such file. Raises UserError with the path when it is missing or no JSON object."""
    path = folder / name
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder; a model is a folder with config.json and weights")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"'{folder}' has no config.json; a model is a folder with config.json and weights") from None
    except (ValueError, OSError) as error:
        raise UserError(f"'{path}' cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"'{path}' holds a {type(config).__name__}, not a JSON object")
    return config


def find_weights(folder: Path) -> Path:
    """The weight file of a model folder, or the index of several, safetensors first. Raises UserError that lists what was looked for."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"'{folder}' has no weights; looked for {', '.join(WEIGHT_FILES)}")


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of weights in several files. Raises UserError when it is broken, or a file is missing."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(name for name in set(files.values()) if not (index.parent / name).is_file())
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"'{index}' is no index of weights: {type(error).__name__}: {error}") from None
    if missing:
        raise UserError(f"'{index.parent}' lacks weight files that '{index.name}' lists: {', '.join(missing)}")
    return files


def find_length_limit(config: dict[str, Any]) -> LengthLimit:
    """How long a text this engine can run exactly, from config.json or a configuration of transformers as a dict.

    Every token here attends to all tokens before it. A layer with a sliding window of W tokens does the same in the first W, so the limit
    of such a model is W.
    """
    limits = {"max_position_embeddings": config["max_position_embeddings"], "sliding_window": _find_window(config)}
    return min(LengthLimit(num_tokens, field) for field, num_tokens in limits.items() if num_tokens is not None)


def check_max_model_len(max_model_len: int, limit: LengthLimit) -> None:
    """Raises UserError when texts are to be longer than the model's limit."""
    if max_model_len > limit.num_tokens:
        raise UserError(f"model.max_model_len={max_model_len}; allowed: up to {limit.num_tokens}, the model's {limit.field}")


def check_eos(eos_token_id: object, vocab_size: int, where: str) -> None:
    """Raises UserError unless it is a token, a list of tokens, or None; `where` it was found begins the message."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise UserError(f"{where} has eos_token_id={eos_token_id!r}; allowed: token ids from 0 to {vocab_size - 1}")


def check_target_config(config: dict[str, Any], folder: Path) -> None:
    """Raises UserError when `config` is not one of a model the engine can run; names the field, the value and what is allowed."""

    def refuse(field: str, allowed: str) -> UserError:
        return UserError(f"'{folder}': config.json has {field}={config.get(field)!r}; allowed: {allowed}")

    architectures = config.get("architectures") or []
    if not _is_list_of_str(architectures):
        raise refuse("architectures", f"a list with one of {', '.join(ARCHITECTURES)}")
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        said = ", ".join(architectures) or f"none (model_type={config.get('model_type')!r})"
        raise UserError(f"'{folder}': config.json has architectures {said}; allowed: {', '.join(ARCHITECTURES)}")
    model_type = ARCHITECTURES[architectures[0]]
    if config.get("model_type") != model_type:
        raise refuse("model_type", f"{model_type} with architectures {architectures[0]}")
    for field in _NEEDED_SIZES:
        if type(config.get(field)) is not int or config[field] < 1:
            raise refuse(field, "an integer >= 1")
    for field, plain in _IGNORED_FIELDS.items():
        if config.get(field) not in plain:
            raise refuse(field, " or ".join("not set" if value is None else str(value) for value in plain))
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(field), dict | None):
            raise refuse(field, "a JSON object")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UserError(f"'{folder}': config.json has rope type '{rope_type}'; allowed: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor") not in _IGNORED_FIELDS["partial_rotary_factor"]:
        raise refuse("rope_parameters" if config.get("rope_parameters") else "rope_scaling", "partial_rotary_factor not set or 1.0")
    for field, least in (("sliding_window", 1), ("max_window_layers", 0)):
        value = config.get(field)
        if value is not None and (type(value) is not int or value < least):
            raise refuse(field, f"an integer >= {least}, or null")
    if not _is_list_of_str(config.get("layer_types") or []):
        raise refuse("layer_types", "a list of names")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds - {"sliding_attention"} or (kinds and _find_window(config) is None):
        raise refuse("layer_types", "full_attention, and sliding_attention where use_sliding_window=true")
    if config.get("quantization_config"):
        said = config["quantization_config"]
        method = said.get("quant_method", "unknown") if isinstance(said, dict) else repr(said)
        raise UserError(f"'{folder}': config.json has quantization_config ({method}); allowed: unquantised weights")
    check_eos(config.get("eos_token_id"), config["vocab_size"], f"'{folder}': config.json")


def check_target_folder(folder: Path) -> None:
    """Every check of a target's folder that needs no model load: configuration, weights and tokenizer are there. Raises UserError."""
    config = read_config(folder)
    check_target_config(config, folder)
    if (folder / "generation_config.json").is_file():
        generation = read_config(folder, "generation_config.json")
        check_eos(generation.get("eos_token_id"), config["vocab_size"], f"'{folder}': generation_config.json")
    file = find_weights(folder)
    if file.suffix == ".json":
        read_weight_map(file)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"'{folder}' has no tokenizer; looked for {', '.join(TOKENIZER_FILES)}")


def _is_list_of_str(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _find_window(config: dict[str, Any]) -> int | None:
    """Tokens that the layer with the narrowest view attends to, itself included; None: all. Defaults are transformers'."""
    if config["model_type"] == "mistral":
        return config.get("sliding_window", 4096)
    if config["model_type"] == "llama" or not config.get("use_sliding_window", False):
        return None
    some_slide = config.get("max_window_layers", 28) < config["num_hidden_layers"]
    if config.get("layer_types"):
        some_slide = "sliding_attention" in config["layer_types"]
    return config.get("sliding_window", 4096) if some_slide else None
