"""The target model: transformers' own layers over packed tokens, with this engine's attention put in."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from engine.fused_layers import Attend, FusedLayers, can_fuse
from engine.kv_cache import KVCache
from engine.models.folder import LengthLimit, find_length_limit
from engine.packed_linear import pack_linears

_ATTENTION = "rheo_packed"


def _packed_attention(module, query, key, value, attention_mask, *, scaling: float, attend: Attend, **_):
    """transformers' attention interface: [1, heads, N, D] in, [1, N, heads, D] out; position and cache handling are the engine's."""
    unpacked = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return attend(module.layer_idx, *unpacked, scaling).unsqueeze(0), None


AttentionInterface.register(_ATTENTION, _packed_attention)


class Target:
    """A causal language model of one of the architectures in `engine.models.folder`: they share the names of Llama's parts.

    Args:
        model: as `load_causal_lm` gives it; its layers are taken over, and it cannot be used without this object.
        feature_layers: layers whose entering hidden states the draft reads (LAW.md 1.5); empty without a draft.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: tuple[int, ...] = ()):
        model.config._attn_implementation = _ATTENTION
        self._model = model
        self._feature_layers = feature_layers
        self._head_dim = model.model.layers[0].self_attn.head_dim
        self._fused = FusedLayers(model) if can_fuse(model) else None
        pack_linears(model)
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype

    def without_features(self) -> Target:
        """The same weights, for an engine without a draft."""
        plain = copy.copy(self)
        plain._feature_layers = ()
        return plain

    @property
    def embedding(self) -> torch.nn.Embedding:
        return self._model.get_input_embeddings()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def length_limit(self) -> LengthLimit:
        """Tokens of prompt and output together, at most."""
        return find_length_limit(self.config.to_dict())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Of config.json and generation_config.json: chat models name their end of turn in the second alone."""
        found = [self.config.eos_token_id, self._model.generation_config.eos_token_id]
        ids = [ids if isinstance(ids, list | tuple) else [ids] for ids in found if ids is not None]
        return tuple(sorted({token for some in ids for token in some}))

    def new_cache(self) -> KVCache:
        config = self.config
        return KVCache(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self._head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, token_N: Tensor, position_N: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Last hidden states after the final norm [N, H], and the draft's features [N, len(feature_layers) * H]."""
        body = self._model.model
        hidden_1NH = body.embed_tokens(token_N).unsqueeze(0)
        rotary = body.rotary_emb(hidden_1NH, position_ids=position_N.unsqueeze(0))
        if self._fused is not None:
            last_NH, features = self._fused(hidden_1NH[0], tuple(x.squeeze(0) for x in rotary), attend, self._feature_layers)
        else:
            last_NH, features = self._run_layers(hidden_1NH, rotary, attend)
        return last_NH, torch.cat(features, -1) if features else last_NH.new_zeros(len(token_N), 0)

    def _run_layers(self, hidden_1NH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> tuple[Tensor, list[Tensor]]:
        """transformers' own layers, in place of `FusedLayers`."""
        body = self._model.model
        entering: dict[int, Tensor] = {}
        for index, layer in enumerate(body.layers):
            if index in self._feature_layers:
                entering[index] = hidden_1NH.squeeze(0)
            hidden_1NH = layer(hidden_1NH, position_embeddings=rotary, attend=attend)
        # in the draft's order: in a shallow target a layer can stand twice, or out of order
        return body.norm(hidden_1NH).squeeze(0), [entering[index] for index in self._feature_layers]

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, V] in fp32: the output head on the few places where a law is needed."""
        return self._model.lm_head(hidden_BH).float()
