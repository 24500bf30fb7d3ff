"""The EAGLE-3 draft head: one Llama layer over (token, feature) pairs. Inference only (LAW.md 1.2).

Shapes: N packed tokens of any rows, H hidden size, F width of the target's hidden states that are the features, side by side (three of
its layers, as a rule), A query heads, G key and value heads, D head size, M inner size of the MLP, V the target's vocabulary, U the
draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.eagle3_config import Eagle3Config
from engine.models.loading import quiet_transformers

#: attend(query_NAD, key_NGD, value_NGD) -> out_NAD. Queries and keys come rotated; the caller owns cache, mask and the scale 1/sqrt(D).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in fp32, rounded before the weight as in Llama."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class _Attention(nn.Module):
    """Projections only; their input is 2H wide."""

    def __init__(self, config: Eagle3Config, head_dim: int):
        super().__init__()
        H, A, G = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * H, A * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * H, G * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * H, G * head_dim, bias=False)
        self.o_proj = nn.Linear(A * head_dim, H, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        H, M = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, M, bias=False)
        self.up_proj = nn.Linear(H, M, bias=False)
        self.down_proj = nn.Linear(M, H, bias=False)

    def forward(self, x_NH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_NH)) * self.up_proj(x_NH))


class _Layer(nn.Module):
    """Parameter names are those of the official checkpoint, below `midlayer.`."""

    def __init__(self, config: Eagle3Config, head_dim: int):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = _Attention(config, head_dim)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = _MLP(config)


class Eagle3Head(nn.Module):
    """An EAGLE-3 head beside its target. Made by `engine.models.checkpoint.load_eagle3`.

    embedding_VH: the token embedding, as a rule shared with the target, not a parameter of the head.
    d2t_U: int64, the target's id of each draft token (not the offsets that the file holds).
    feature_layers: the target's decoder layers whose inputs are the features, low to high.
    """

    def __init__(self, config: Eagle3Config, *, head_dim: int, feature_layers: tuple[int, ...], embedding_VH: Tensor, d2t_U: Tensor):
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.feature_layers = feature_layers
        eps, feature_size = config.rms_norm_eps, config.target_hidden_size
        self.input_norm = RMSNorm(len(feature_layers) * feature_size, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(feature_size, eps) for _ in feature_layers) if config.fc_norm else None
        self.fc = nn.Linear(len(feature_layers) * feature_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, head_dim)
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embedding_VH: Tensor
        self.d2t: Tensor
        self.register_buffer("embedding_VH", embedding_VH, persistent=False)
        self.register_buffer("d2t", d2t_U, persistent=False)
        # no buffer: .to(bfloat16) on the module would round it
        frequency_D, self._rotary_scale = _rotary_frequencies(config, head_dim)
        self._frequency_D = frequency_D.repeat(2).to(embedding_VH.device)

    def fuse(self, features_NF: Tensor) -> Tensor:
        """One feature [N, H] of the target's hidden states (of `feature_layers`, side by side) at each token."""
        if self.input_norm is not None:
            features_NF = self.input_norm(features_NF)
        if self.fc_norm is not None:
            parts = features_NF.chunk(len(self.fc_norm), dim=-1)
            features_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features_NF)

    def forward(self, tokens_N: Tensor, feature_NH: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """g [N, H], the feature for the next draft step: before the last norm, or after it with `norm_output`.

        tokens_N: int64 target ids. Token i+1 is paired with the feature of token i.
        feature_NH: `fuse` of the target's features, or g of the parent in the tree.
        positions_N: int64, the pair's index in the sequence from 0, one less than the token's own position in the target.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        x_N2H, normed_NH = self._pair(tokens_N, feature_NH)
        residual_NH = normed_NH if self.config.norm_before_residual else feature_NH
        rotary = self._rotary(positions_N, x_N2H.dtype)
        query_NAD = _rotate(attention.q_proj(x_N2H).unflatten(-1, (-1, self.head_dim)), *rotary)
        key_NGD, value_NGD = self._key_value(x_N2H, rotary)
        a_NH = residual_NH + attention.o_proj(attend(query_NAD, key_NGD, value_NGD).flatten(-2))
        g_NH = a_NH + layer.mlp(layer.post_attention_layernorm(a_NH))
        return self.norm(g_NH) if self.config.norm_output else g_NH

    def key_value(self, tokens_N: Tensor, feature_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` hands to `attend` as keys and values [N, G, D] of the same pairs: all that others need of them."""
        x_N2H, _ = self._pair(tokens_N, feature_NH)
        return self._key_value(x_N2H, self._rotary(positions_N, x_N2H.dtype))

    def _pair(self, tokens_N: Tensor, feature_NH: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input [N, 2H], and the second half of it."""
        normed_NH = self.midlayer.hidden_norm(feature_NH)
        embedded_NH = self.midlayer.input_layernorm(F.embedding(tokens_N, self.embedding_VH))
        return torch.cat((embedded_NH, normed_NH), dim=-1), normed_NH

    def _key_value(self, x_N2H: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        attention = self.midlayer.self_attn
        key_NGD, value_NGD = (project(x_N2H).unflatten(-1, (-1, self.head_dim)) for project in (attention.k_proj, attention.v_proj))
        return _rotate(key_NGD, *rotary), value_NGD

    def logits(self, g_NH: Tensor) -> Tensor:
        """Logits [N, U] over the draft vocabulary; column u is target token d2t[u]."""
        return self.lm_head(g_NH if self.config.norm_output else self.norm(g_NH))

    def _rotary(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle_N1D = (positions_N[:, None].float() * self._frequency_D).unsqueeze(1)
        return (angle_N1D.cos() * self._rotary_scale).to(dtype), (angle_N1D.sin() * self._rotary_scale).to(dtype)


def _rotary_frequencies(config: Eagle3Config, head_dim: int) -> tuple[Tensor, float]:
    """The angle per position of each pair of channels, fp32 [D/2], and the factor of cos and sin.

    Both are those of transformers' Llama, so that a base and a scaling mean here what they mean there.
    """
    rope_parameters = {**config.rope_scaling, "rope_theta": config.rope_theta}
    with torch.device("cpu"), quiet_transformers():  # the head itself may be made without memory, on "meta"
        rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, rope_parameters=rope_parameters))
    return rotary.inv_freq, rotary.attention_scaling


def _rotate(x_NAD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotary positions in Llama's layout: channel i turns with channel i + D/2."""
    low, high = x_NAD.chunk(2, dim=-1)
    return x_NAD * cos_N1D + torch.cat((-high, low), dim=-1) * sin_N1D
