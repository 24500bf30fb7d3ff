"""Prompt-lookup drafts: no model, but the row's own text. What followed the last tokens before may follow them again, as in a summary
that quotes its document (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.drafts.model import Start
from engine.row import Row

#: tokens that a match has at most
LONGEST = 4

#: a place whose match is one token longer weighs so much more
WEIGHT_PER_TOKEN = 16.0


class NgramDraft:
    """q(x) is the share of x among the tokens that follow a match in the row's text, each weighed by the length of its match.

    A place matches as far as the tokens before it are the last tokens of the path. Where nothing matches, nothing is proposed.
    """

    caches = ()
    feature_layers = ()
    trained_length = None

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self, rows: Sequence[Row]) -> Start | None:
        """The draft's vocabulary is what the rows' texts hold."""
        if not any(row.drafts for row in rows):
            return None
        texts = [torch.tensor(row.tokens if row.drafts else (), dtype=torch.long) for row in rows]
        token_BT = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1).to(self._device)
        target_token_U, place_BT = token_BT.unique(return_inverse=True)
        if target_token_U[0] < 0:
            target_token_U, place_BT = target_token_U[1:], place_BT - 1
        lookup = _Lookup(place_BT, torch.tensor([len(text) for text in texts], device=self._device), len(target_token_U))
        return Start(logits_BU=lookup.logits().squeeze(1), target_token_U=target_token_U, expand=lookup)


class _Lookup:
    """token_BT: draft ids of the rows' texts, -1 behind their ends. length_B: their lengths."""

    def __init__(self, token_BT: Tensor, length_B: Tensor, num_tokens: int):
        self._token_BT, self._num_tokens = token_BT, num_tokens
        back_S = torch.arange(1, LONGEST + 1, device=token_BT.device)
        place_BS = length_B.unsqueeze(-1) - back_S
        last_BS = token_BT.gather(1, place_BS.clamp(min=0))
        #: the last tokens of each node's path, the last one first; -2 (which nothing equals) where the text is shorter
        self._suffix_BFS = last_BS.masked_fill(place_BS < 0, -2).unsqueeze(1)

    def __call__(self, token_BF: Tensor, parent_BF: Tensor) -> Tensor:
        parent_BFS = self._suffix_BFS.gather(1, parent_BF.unsqueeze(-1).expand(-1, -1, LONGEST))
        self._suffix_BFS = torch.cat([token_BF.unsqueeze(-1), parent_BFS[..., :-1]], -1)
        return self.logits()

    def logits(self) -> Tensor:
        """log q up to a constant [B, F, U], -inf for tokens that follow no match."""
        before_BT, next_BT = self._token_BT[:, :-1], self._token_BT[:, 1:]
        num_rows, num_nodes = self._suffix_BFS.shape[:2]
        matches_BFT = torch.ones(num_rows, num_nodes, before_BT.shape[1], dtype=torch.bool, device=before_BT.device)
        length_BFT = torch.zeros(matches_BFT.shape, device=before_BT.device)
        for back in range(LONGEST):
            earlier_BT = torch.nn.functional.pad(before_BT, [back, 0], value=-1)[:, : before_BT.shape[1]]
            matches_BFT = matches_BFT & (earlier_BT.unsqueeze(1) == self._suffix_BFS[..., back : back + 1])
            length_BFT += matches_BFT
        weight_BFT = torch.where((length_BFT > 0) & (next_BT >= 0).unsqueeze(1), WEIGHT_PER_TOKEN**length_BFT, 0)
        index_BFT = next_BT.clamp(min=0).unsqueeze(1).expand_as(weight_BFT)
        total_BFU = torch.zeros(num_rows, num_nodes, self._num_tokens, device=before_BT.device).scatter_add_(2, index_BFT, weight_BFT)
        return total_BFU.log()
