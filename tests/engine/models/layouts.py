"""Rewrites a saved head of `tiny_eagle3` as the programs that train and serve such heads would have written it (LAW.md 1.5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

Tensors = dict[str, Tensor]
Fields = dict[str, Any]

#: of the heads here; 8 layers, so that the features' three layers 2, 4, 5 are different ones
TARGET = LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2)


def read(folder: Path) -> tuple[Tensors, Fields]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: Tensors, fields: Fields) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))


def rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_model_prefix(tensors: Tensors) -> Tensors:
    return {name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}


def specforge(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    more = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        "max_window_layers": 36,
        "norm_output": False,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,  # of the target; the head has its own lm_head
        "use_sliding_window": False,
    }
    return tensors, {**fields, **more}


def sglang(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    return with_model_prefix(tensors), {**fields, "architectures": ["LlamaForCausalLMEagle3"]}


def sglang_running(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    offset = tensors["d2t"]
    others = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return with_model_prefix(others) | {"hot_token_id": offset + torch.arange(len(offset))}, fields


def speculators(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    own = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    layer = {name: value for name, value in fields.items() if name not in own}
    rope = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    top = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/target"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **{name: fields[name] for name in own if name in fields},
        "transformer_layer_config": {**layer, "layer_types": ["full_attention"], "mlp_bias": False, "rope_parameters": rope},
    }
    return rename(tensors, "midlayer.", "layers.0."), top


def speculators_by_default(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    """Layer ids null, and without t2d."""
    tensors, fields = speculators(tensors, fields)
    del tensors["t2d"]
    return tensors, {**fields, "eagle_aux_hidden_state_layer_ids": None}


def vllm_running(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    tensors = dict(tensors)
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    tensors[f"{attention}qkv_proj.weight"] = torch.cat([tensors.pop(f"{attention}{part}_proj.weight") for part in "qkv"])
    tensors[f"{mlp}gate_up_proj.weight"] = torch.cat([tensors.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")])
    tensors = rename(with_model_prefix(tensors), "midlayer.", "layers.0.")
    del tensors["t2d"]
    return rename(tensors, "d2t", "draft_id_to_target_id"), {**fields, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}


def community(tensors: Tensors, fields: Fields) -> tuple[Tensors, Fields]:
    """The target's architecture and number of layers, no base and no head size (they are the reference's defaults)."""
    fields = {name: value for name, value in fields.items() if name != "rope_theta"}
    return tensors, {**fields, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "bias": True, "torch_dtype": "float16"}


LAYOUTS: dict[str, Callable[[Tensors, Fields], tuple[Tensors, Fields]]] = {
    "specforge": specforge,
    "sglang": sglang,
    "sglang, running": sglang_running,
    "speculators": speculators,
    "speculators, by default": speculators_by_default,
    "vllm, running": vllm_running,
    "community": community,
}


def rewrite(folder: Path, layout: str) -> None:
    write(folder, *LAYOUTS[layout](*read(folder)))


def as_older_head(folder: Path, inputs_of_fc: int | None) -> None:
    """An EAGLE-1/2 head's names and shapes; its fc reads (token, feature), or is not there when `inputs_of_fc` is None."""
    tensors, fields = read(folder)
    H = fields["hidden_size"]
    layer = {name: tensor[..., :H] if ".self_attn." in name else tensor for name, tensor in tensors.items() if name.startswith("midlayer.")}
    del layer["midlayer.hidden_norm.weight"], layer["midlayer.input_layernorm.weight"]
    layer["embed_tokens.weight"] = torch.zeros(fields["vocab_size"], H)
    if inputs_of_fc is not None:
        layer |= {"fc.weight": torch.zeros(H, inputs_of_fc), "fc.bias": torch.zeros(H)}
    write(folder, rename(layer, "midlayer.", "layers.0."), fields)
