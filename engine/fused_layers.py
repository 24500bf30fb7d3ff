"""The layers of a Llama-like model as few calls: products of the same input in one, and compiled kernels between them.

Nothing in it but the order of sums differs from transformers' own layers, whose weights it takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.native.build import why_none
from engine.native.layers import add_norm, rotate, silu_mul
from engine.packed_linear import PackedLinear, can_pack

_CHANNELS = 16  # that a kernel handles at once


class Attend(Protocol):
    """Keys and values of new tokens are stored, and queries attend to them and what was there: [N, A, D] -> [N, A, D]."""

    def __call__(self, layer: int, query_NAD: Tensor, key_NGD: Tensor, value_NGD: Tensor, scale: float) -> Tensor: ...


def can_fuse(model: PreTrainedModel) -> bool:
    """On a CPU with the kernels, in bf16, for the sizes and the activation that they know."""
    config, head_dim = model.config, model.model.layers[0].self_attn.head_dim
    sizes = (config.hidden_size, config.intermediate_size, head_dim // 2)
    return (
        can_pack(model.model.embed_tokens.weight)
        and all(size % _CHANNELS == 0 for size in sizes)
        and config.hidden_act == "silu"
        and why_none() is None
    )


class FusedLayers:
    """Takes the weights out of the model's layers, which cannot run after it.

    Args:
        model: one that `can_fuse`.
    """

    def __init__(self, model: PreTrainedModel):
        self._layers = []
        for index, layer in enumerate(model.model.layers):
            self._layers.append(_Layer(index, layer))
            layer.to("meta")  # lets the weights go, one layer after another
        self._norm = _Norm.of(model.model.norm)

    def __call__(
        self, hidden_NH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, watched: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """(last hidden states after the final norm [N, H], hidden states that enter the watched layers).

        hidden_NH: embeddings, which are overwritten. rotary: cos and sin [N, D].
        """
        entering: dict[int, Tensor] = {}
        delta_NH = None
        for index, layer in enumerate(self._layers):
            normed_NH = layer.enter(hidden_NH, delta_NH)
            if index in watched:
                entering[index] = hidden_NH.clone()
            delta_NH = layer(hidden_NH, normed_NH, rotary, attend)
        return add_norm(hidden_NH, delta_NH, *self._norm), [entering[index] for index in watched]


class _Norm(NamedTuple):
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> _Norm:
        return cls(module.weight.detach(), module.variance_epsilon)


class _Layer:
    """One decoder layer. What it adds to the hidden states at its end is added by the next one, with its norm."""

    def __init__(self, index: int, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._head_dim, self._scale = attention.head_dim, attention.scaling
        self._input_norm, self._attention_norm = _Norm.of(layer.input_layernorm), _Norm.of(layer.post_attention_layernorm)
        self._qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = PackedLinear([attention.o_proj])
        self._gate_up, self._down = PackedLinear([mlp.gate_proj, mlp.up_proj]), PackedLinear([mlp.down_proj])
        # of the heads of queries and of keys, in Qwen3
        self._head_norms = [_Norm.of(attention.get_submodule(name)) if hasattr(attention, name) else () for name in ("q_norm", "k_norm")]
        self._heads = [projection.out_features // self._head_dim for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def enter(self, hidden_NH: Tensor, delta_NH: Tensor | None) -> Tensor:
        """Adds what the layer before has left, and norms."""
        return add_norm(hidden_NH, delta_NH, *self._input_norm)

    def __call__(self, hidden_NH: Tensor, normed_NH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query_NAD, key_NGD, value_NGD = self._qkv(normed_NH).unflatten(-1, (-1, self._head_dim)).split(self._heads, 1)
        for x, norm in zip((query_NAD, key_NGD), self._head_norms, strict=True):
            rotate(x, *rotary, *norm)
        attended_NH = self._output(attend(self._index, query_NAD, key_NGD, value_NGD, self._scale).flatten(1))
        normed_NH = add_norm(hidden_NH, attended_NH, *self._attention_norm)
        return self._down(silu_mul(self._gate_up(normed_NH)))
