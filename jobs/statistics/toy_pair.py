"""A real Llama and real drafts over 8 tokens, small enough for exact laws, built so that a draft is the target, perturbed.

A random head would agree with its target by luck only, and trees would end at once. This one is made by hand: its attention looks at the
last pair alone (queries and keys are constants, which rotary positions turn away from each other), its value is the token's embedding
minus the incoming feature, and so its output is the last token's embedding, which is what the target's law mostly follows too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 8
_HIDDEN, _HEADS, _LAYERS = 32, 4, 4
_HEAD_DIM = _HIDDEN // _HEADS
_MISSING = 5  # the target token that the draft's vocabulary lacks
_FOCUS = 80.0  # score of the pair itself, before the softmax's scale
_NOISE = 0.04


class Toy(NamedTuple):
    """Folders: the target, its EAGLE-3 head, and another language model with its vocabulary."""

    target: Path
    head: Path
    language_model: Path


def build_toy(folder: Path, seed: int = 0) -> Toy:
    """Write the models below `folder`, in fp32."""
    torch.manual_seed(seed)
    toy = Toy(folder / "target", folder / "head", folder / "language_model")
    model = _target()
    model.save_pretrained(toy.target)
    _save_head(model, toy.head)
    with torch.no_grad():
        for weight in model.parameters():
            weight += _NOISE * weight.std() * torch.randn_like(weight)
    model.save_pretrained(toy.language_model)
    return toy


def _target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=256,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    embedding = torch.randn(VOCAB, _HIDDEN)
    embedding[:, 0] = 2.0  # the channel from which the head makes its constant queries and keys
    embedding[:, 1:] *= (_HIDDEN - 4) ** 0.5 / embedding[:, 1:].norm(dim=1, keepdim=True)
    model.model.embed_tokens.weight.data = embedding
    model.lm_head.weight.data = 0.4 * torch.randn(VOCAB, _HIDDEN)
    return model


def _save_head(model: LlamaForCausalLM, folder: Path) -> None:
    identity = torch.eye(_HIDDEN)
    constant = torch.zeros(_HIDDEN, 2 * _HIDDEN)
    for head in range(_HEADS):
        for channel in (0, 1):  # the two fastest rotary frequencies
            constant[head * _HEAD_DIM + channel, 0] = 0.5 * (_FOCUS * _HEAD_DIM**0.5 / 2) ** 0.5
    drafted = [token for token in range(VOCAB) if token != _MISSING]
    tensors = {
        "fc.weight": torch.cat([0 * identity, identity, 0 * identity], 1),
        "midlayer.self_attn.q_proj.weight": constant,
        "midlayer.self_attn.k_proj.weight": constant.clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat([identity, -identity], 1),
        "midlayer.self_attn.o_proj.weight": identity.clone(),
        "midlayer.mlp.gate_proj.weight": torch.zeros(2 * _HIDDEN, _HIDDEN),
        "midlayer.mlp.up_proj.weight": torch.zeros(2 * _HIDDEN, _HIDDEN),
        "midlayer.mlp.down_proj.weight": torch.zeros(_HIDDEN, 2 * _HIDDEN),
        "lm_head.weight": model.lm_head.weight.data[drafted].clone(),
    }
    tensors = {name: tensor + _NOISE * torch.randn(tensor.shape) for name, tensor in tensors.items()}
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(_HIDDEN)
    tensors["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(drafted),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
