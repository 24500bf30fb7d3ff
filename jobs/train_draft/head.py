"""A draft head to train: its sizes, its vocabulary, and what its weights begin with.

Shapes: H hidden size, V the target's vocabulary, U the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.models.eagle3 import Eagle3Head
from engine.models.eagle3_config import Eagle3Config, default_feature_layers


def choose_vocabulary(answers: Iterable[Tensor], vocab_size: int, draft_vocab_size: int) -> Tensor:
    """The target tokens that the draft knows, rising, int64 [U]: the most frequent ones; of equally frequent ones the lower ids."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens in answers:
        counts_V += torch.bincount(tokens, minlength=vocab_size)
    return counts_V.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values


def make_config(
    target: PreTrainedModel,
    *,
    draft_vocab_size: int,
    intermediate_size: int | None,
    feature_layers: tuple[int, ...] | None,
    max_tokens: int,
) -> Eagle3Config:
    """As wide as its target, with the target's heads and rotary base. max_tokens: of the longest text that it learns from."""
    config = target.config
    rope = dict(config.rope_parameters)
    return Eagle3Config(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=target.model.layers[0].self_attn.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=config.hidden_size,
        feature_layers=feature_layers,
        max_position_embeddings=max_tokens,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope.pop("rope_theta"),
        rope_scaling=rope,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )


def new_head(config: Eagle3Config, target: PreTrainedModel, vocabulary_U: Tensor) -> Eagle3Head:
    """A head in fp32 that begins with the target's output head and final norm; the rest is random, the layer's outputs near zero."""
    layers = config.feature_layers or default_feature_layers(target.config.num_hidden_layers)
    embedding_VH = target.get_input_embeddings().weight.detach().float()
    head = Eagle3Head(config, head_dim=config.head_dim, feature_layers=layers, embedding_VH=embedding_VH, d2t_U=vocabulary_U)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for module in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
        module.weight.data.mul_(0.3)
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight[vocabulary_U])
    head.norm.weight.data.copy_(target.model.norm.weight)
    return head.requires_grad_(True)
