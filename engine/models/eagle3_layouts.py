"""Brings the tensors of an EAGLE-3 head, however the program that wrote them names them, to the official names (LAW.md 1.5).

    official, SpecForge     midlayer.*, fc, norm, lm_head, d2t, t2d; SpecForge also fc_norm.*
    speculators             layers.0.* for midlayer.*; also input_norm, embed_tokens
    SGLang, Automodel       a leading model. before all but lm_head, d2t and t2d
    vLLM, as it runs        model.layers.0.*, qkv_proj for q, k and v, gate_up_proj for gate and up, draft_id_to_target_id for d2t
    SGLang, as it runs      hot_token_id, the target's ids themselves, for the offsets d2t

The names alone decide, not `architectures`: what heads say there is often their target's name (FIELD-CASES B25).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError
from engine.models.eagle3_config import Eagle3Config


def to_official_names(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> dict[str, Tensor]:
    """`tensors` under their official names, fused ones split; names that are unknown here stay as they are.

    Raises UserError when two tensors of the file are one, or the rows of a fused one cannot be shared out.
    """
    official: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for name in sorted(tensors):
        for new_name, tensor in _translate(name, tensors[name], config, path).items():
            if new_name in official:
                raise UserError(f"draft '{path}': tensors {origin[new_name]} and {name} are both {new_name}; allowed: one of them")
            official[new_name], origin[new_name] = tensor, name
    return official


def _translate(name: str, tensor: Tensor, config: Eagle3Config, path: Path) -> dict[str, Tensor]:
    A, G = config.num_attention_heads, config.num_key_value_heads
    official = name.removeprefix("model.")
    if official.startswith("layers.0."):
        official = "midlayer." + official.removeprefix("layers.0.")
    match official:
        case "draft_id_to_target_id":
            return {"d2t": tensor}
        case "hot_token_id" if tensor.dim() == 1:
            return {"d2t": tensor - torch.arange(len(tensor))}
        case "midlayer.self_attn.qkv_proj.weight" if tensor.dim() == 2:
            parts = _split_rows(name, tensor, {"q_proj": A, "k_proj": G, "v_proj": G}, path)
            return {f"midlayer.self_attn.{part}.weight": rows for part, rows in parts.items()}
        case "midlayer.mlp.gate_up_proj.weight" if tensor.dim() == 2:
            parts = _split_rows(name, tensor, {"gate_proj": 1, "up_proj": 1}, path)
            return {f"midlayer.mlp.{part}.weight": rows for part, rows in parts.items()}
        case _:
            return {official: tensor}


def _split_rows(name: str, tensor: Tensor, shares: dict[str, int], path: Path) -> dict[str, Tensor]:
    """The rows of `tensor`, part after part, as many to each as its share of the whole."""
    whole = sum(shares.values())
    if len(tensor) % whole:
        parts = ", ".join(f"{share} of {part}" for part, share in shares.items())
        raise UserError(f"draft '{path}': {name} has shape {list(tensor.shape)}; its rows must be a multiple of {whole} ({parts})")
    unit = len(tensor) // whole
    return dict(zip(shares, tensor.split([share * unit for share in shares.values()]), strict=True))
