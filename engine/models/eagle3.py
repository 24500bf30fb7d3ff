"""The EAGLE-3 draft head: one Llama layer over (token, feature) pairs. Inference only (LAW.md 1.2).

Shapes: N packed tokens of any rows, H hidden size, 3H three of the target's hidden states side by side, A query heads,
G key and value heads, D head size, M inner size of the MLP, V the target's vocabulary, U the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.eagle3_config import Eagle3Config, feature_layers

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

    embedding_VH: the token embedding, shared with the target, not a parameter of the head.
    d2t_U: int64, the target's id of each draft token (not the offsets that the file holds).
    feature_layers: the target's decoder layers whose inputs are the features, low to high.
    """

    def __init__(self, config: Eagle3Config, *, head_dim: int, num_target_layers: int, embedding_VH: Tensor, d2t_U: Tensor):
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.feature_layers = feature_layers(num_target_layers)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, head_dim)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embedding_VH: Tensor
        self.d2t: Tensor
        self.register_buffer("embedding_VH", embedding_VH, persistent=False)
        self.register_buffer("d2t", d2t_U, persistent=False)

    def fuse(self, features_N3H: Tensor) -> Tensor:
        """One feature [N, H] of the target's three hidden states (low, mid, high) at each token."""
        return self.fc(features_N3H)

    def forward(self, tokens_N: Tensor, feature_NH: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """g [N, H], the feature for the next draft step, before the last norm.

        tokens_N: int64 target ids. Token i+1 is paired with the feature of token i.
        feature_NH: `fuse` of the target's features, or g of the parent in the tree.
        positions_N: int64, the pair's index in the sequence from 0, one less than the token's own position in the target.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        embedded_NH = F.embedding(tokens_N, self.embedding_VH)
        x_N2H = torch.cat((layer.input_layernorm(embedded_NH), layer.hidden_norm(feature_NH)), dim=-1)
        query_NAD = attention.q_proj(x_N2H).unflatten(-1, (-1, self.head_dim))
        key_NGD = attention.k_proj(x_N2H).unflatten(-1, (-1, self.head_dim))
        value_NGD = attention.v_proj(x_N2H).unflatten(-1, (-1, self.head_dim))
        cos_N1D, sin_N1D = self._rotary(positions_N, x_N2H.dtype)
        out_NAD = attend(_rotate(query_NAD, cos_N1D, sin_N1D), _rotate(key_NGD, cos_N1D, sin_N1D), value_NGD)
        a_NH = feature_NH + attention.o_proj(out_NAD.flatten(-2))  # the residual is the feature before its norm
        return a_NH + layer.mlp(layer.post_attention_layernorm(a_NH))

    def logits(self, g_NH: Tensor) -> Tensor:
        """Logits [N, U] over the draft vocabulary; column u is target token d2t[u]."""
        return self.lm_head(self.norm(g_NH))

    def _rotary(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # made anew each time, in fp32: a stored table would be rounded by .to(bfloat16) on the module
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions_N.device) / self.head_dim
        angle_N1D = (positions_N[:, None].float() * self.config.rope_theta**-powers).repeat(1, 2).unsqueeze(1)
        return angle_N1D.cos().to(dtype), angle_N1D.sin().to(dtype)


def _rotate(x_NAD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotary positions in Llama's layout: channel i turns with channel i + D/2."""
    low, high = x_NAD.chunk(2, dim=-1)
    return x_NAD * cos_N1D + torch.cat((-high, low), dim=-1) * sin_N1D
