"""EAGLE-3's training-time test: the draft is trained on several steps of its own features, as it drafts (LAW.md 1.2; arXiv 2503.01840).

A query is a place in an answer where drafting begins. Pair i of a text is (token i+1, the target's feature of token i). Step 0 of query i
reads pairs 0..i with true features. Step s reads what step 0 read of the pairs before i, and pairs i..i+s, of which those after i carry
the draft's own features; the tokens are those of the text, as on an accepted path. What it says of token i+s+2 is compared with the
target's law there. Places that are no query need only their key and value, which is most of the saving over running the layer everywhere.

Shapes: B texts, L pairs (padded), N of them that exist, Q queries a text (consecutive), S steps, T = Q + S - 1 places that are compared,
F, H, A, G, D, U as in engine.models.eagle3.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from engine.models.eagle3 import Eagle3Head


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some texts, on one device.

    context_BL: bool, the pairs that exist. token_N, feature_NF, position_N: of those pairs.
    first_B: index of each text's first query. token_BT: second token of pairs first..first + T - 1.
    hidden_BTH: the target's last hidden state at that token, after the final norm; log_z_BT: log of the sum of exp(logits), fp32.
    exists_BT: whether there is a law to compare with.
    """

    context_BL: Tensor
    token_N: Tensor
    feature_NF: Tensor
    position_N: Tensor
    first_B: Tensor
    token_BT: Tensor
    hidden_BTH: Tensor
    log_z_BT: Tensor
    exists_BT: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)})


class Unroll(nn.Module):
    """A head in training.

    Args:
        head: its fc reads features that are divided by `scale_F`, which `export` undoes.
    """

    def __init__(self, head: Eagle3Head, scale_F: Tensor):
        super().__init__()
        self.head = head
        self.scale_F: Tensor
        self.register_buffer("scale_F", scale_F, persistent=False)

    def forward(self, batch: Batch, steps: int) -> Tensor:
        """What the output head reads, at each step of each query [S, B, Q, H]. steps: S."""
        num_texts, num_places = batch.token_BT.shape
        num_queries = num_places - steps + 1
        fused_NH = self.head.fuse(batch.feature_NF / self.scale_F)
        fused_BLH = _spread(fused_NH, batch.context_BL)
        index_BQ = batch.first_B.unsqueeze(-1) + torch.arange(num_queries, device=batch.first_B.device)
        attend = _Attend(
            *(_spread(x, batch.context_BL) for x in self.head.key_value(batch.token_N, fused_NH, batch.position_N)),
            index_BQ,
            self.head.head_dim**-0.5,
        )
        within_BQ = index_BQ.clamp(max=batch.context_BL.shape[1] - 1)  # past a short text's end, where nothing is compared
        feature_MH = fused_BLH.gather(1, within_BQ.unsqueeze(-1).expand(-1, -1, fused_BLH.shape[-1])).flatten(0, 1)
        outputs = []
        for step in range(steps):
            token_M = batch.token_BT[:, step : step + num_queries].flatten()
            feature_MH = self.head(token_M, feature_MH, (index_BQ + step).flatten(), attend)
            outputs.append(feature_MH if self.head.config.norm_output else self.head.norm(feature_MH))
        return torch.stack(outputs).unflatten(1, (num_texts, num_queries))


def _spread(x_N: Tensor, exists_BL: Tensor) -> Tensor:
    """[N, ...] -> [B, L, ...], zeros where nothing is."""
    place_N = exists_BL.flatten().nonzero().squeeze(-1)
    return x_N.new_zeros(exists_BL.numel(), *x_N.shape[1:]).index_copy(0, place_N, x_N).unflatten(0, exists_BL.shape)


class _Attend:
    """Attention of one step after another: to the text's pairs before the query, and to the query's own chain of steps so far."""

    def __init__(self, key_BLGD: Tensor, value_BLGD: Tensor, index_BQ: Tensor, scale: float):
        self._key_BGDL = key_BLGD.permute(0, 2, 3, 1)
        self._value_BGLD = value_BLGD.permute(0, 2, 1, 3)
        hidden_BQL = torch.arange(key_BLGD.shape[1], device=index_BQ.device) >= index_BQ.unsqueeze(-1)
        self._hidden_BGRQL = hidden_BQL[:, None, None]
        self._shape = index_BQ.shape
        self._scale = scale
        self._chain_key: list[Tensor] = []
        self._chain_value: list[Tensor] = []

    def __call__(self, query_MAD: Tensor, key_MGD: Tensor, value_MGD: Tensor) -> Tensor:
        num_groups = key_MGD.shape[1]
        query_BGRQD = query_MAD.unflatten(0, self._shape).unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4) * self._scale
        for chain, new in ((self._chain_key, key_MGD), (self._chain_value, value_MGD)):
            chain.append(new.unflatten(0, self._shape).transpose(1, 2).unsqueeze(2))  # [B, G, 1, Q, D]
        text_BGRQL = (query_BGRQD.flatten(2, 3) @ self._key_BGDL).unflatten(2, query_BGRQD.shape[2:4])
        text_BGRQL = text_BGRQL.float().masked_fill(self._hidden_BGRQL, -torch.inf)
        own_BGRQS = torch.stack([(query_BGRQD * key).sum(-1) for key in self._chain_key], -1).float()
        weight = torch.cat([text_BGRQL, own_BGRQS], -1).softmax(-1).to(value_MGD.dtype)
        text_weight, own_weight = weight.split([text_BGRQL.shape[-1], own_BGRQS.shape[-1]], -1)
        out_BGRQD = (text_weight.flatten(2, 3) @ self._value_BGLD).unflatten(2, query_BGRQD.shape[2:4])
        for step, value in enumerate(self._chain_value):
            out_BGRQD = out_BGRQD + own_weight[..., step : step + 1] * value
        return out_BGRQD.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
