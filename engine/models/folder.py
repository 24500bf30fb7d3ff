"""What a model folder holds, read without torch: its configuration, its weight files, its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import UserError

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TARGET_ARCHITECTURES = ("LlamaForCausalLM",)
TARGET_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TARGET_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")  # what a draft must fit; absent ones would become Llama-7B's


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises UserError with the path when it is missing or no JSON object."""
    path = folder / "config.json"
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
    """The weight file of a model folder, safetensors first. Raises UserError that lists what was looked for."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"'{folder}' has no weights; looked for {', '.join(WEIGHT_FILES)}")


def check_target_config(config: dict[str, Any], folder: Path) -> None:
    """Raises UserError when `config` is not one of a model the engine can run; names the field, the value and what is allowed."""
    architectures = config.get("architectures") or []
    if list(architectures) != list(TARGET_ARCHITECTURES):
        said = ", ".join(architectures) or f"none (model_type={config.get('model_type')!r})"
        raise UserError(f"'{folder}': config.json has architectures {said}; allowed: {', '.join(TARGET_ARCHITECTURES)}")
    for field in TARGET_SIZES:
        if not isinstance(config.get(field), int):
            raise UserError(f"'{folder}': config.json has {field}={config.get(field)!r}; allowed: an integer")
    # the others change their frequencies with the longest sequence of a pass: a row's law would depend on its neighbours
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in TARGET_ROPE_TYPES:
        raise UserError(f"'{folder}': config.json has rope type '{rope_type}'; allowed: {', '.join(TARGET_ROPE_TYPES)}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"'{folder}': config.json has quantization_config ({method}); allowed: unquantised weights")


def check_target_folder(folder: Path) -> None:
    """Every check of a target's folder that needs no model load: configuration, weights and tokenizer are there. Raises UserError."""
    check_target_config(read_config(folder), folder)
    find_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"'{folder}' has no tokenizer; looked for {', '.join(TOKENIZER_FILES)}")
