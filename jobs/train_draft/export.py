"""From a training state to a draft in the official EAGLE layout (LAW.md 1.5)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jobs.train_draft import checkpoints


def export(training: Path, draft: Path) -> None:
    """Writes config.json and model.safetensors (bf16) into `draft`, both or none, from the last state in `training`."""
    state = torch.load(training / checkpoints.LAST, map_location="cpu", weights_only=True)
    staged = draft.with_name(f".{draft.name}.part")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    weights = dict(state["head"])
    weights["fc.weight"] = weights["fc.weight"] / state["scale"]
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    config = state["config"]
    targets_U = state["d2t"]
    if config["draft_vocab_size"] < config["vocab_size"]:
        tensors["d2t"] = targets_U - torch.arange(len(targets_U))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, targets_U, True)
    save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
    (staged / "config.json").write_text(json.dumps(_to_json(config), indent=1) + "\n")
    shutil.rmtree(draft, ignore_errors=True)
    os.replace(staged, draft)


def _to_json(config: dict[str, Any]) -> dict[str, Any]:
    """config: the fields of an Eagle3Config."""
    plain = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size")
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    layers = config["feature_layers"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: config[name] for name in (*plain, "rms_norm_eps", "rope_theta")},
        "rope_parameters": {**scaling, "rope_theta": config["rope_theta"]},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": config["max_position_embeddings"],
        **({} if layers is None else {"eagle_aux_hidden_state_layer_ids": list(layers)}),
    }
