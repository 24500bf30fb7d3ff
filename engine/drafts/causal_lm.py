"""Drafts by another causal language model with the target's tokenizer: standard speculative decoding, and trees over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import BACKENDS, find_backend
from engine.drafts.beam import BeamRegion
from engine.drafts.model import Start
from engine.new_tokens import NewTokens
from engine.packing import pack, pad_runs
from engine.pages import make_table
from engine.row import Row
from engine.target import Target


class CausalLMDraft:
    """A small model with its own cache of the rows' tokens.

    Args:
        model: the draft. num_target_tokens: the target's vocabulary; where the two are padded to different sizes, the draft proposes
            from the tokens that both have.
    """

    feature_layers = ()

    def __init__(self, model: Target, *, attention: str, num_target_tokens: int):
        self._model = model
        self._cache = model.new_cache()
        self._backend = BACKENDS[find_backend(attention, self._cache)]
        self.caches = (self._cache,)
        self.trained_length = model.length_limit.num_tokens
        self._target_token_U = torch.arange(min(model.vocab_size, num_target_tokens), device=model.device)

    def begin(self, rows: Sequence[Row]) -> Start | None:
        """Follows the target: of a prompt that is still being read, the part that the target has read."""
        runs = [row.tokens[row.num_draft_cached : len(row.tokens) if row.is_prefilled else row.num_cached] for row in rows]
        if not any(runs):
            return None
        table_BP = make_table([row.pages for row in rows], self._model.device)
        padded, long = pad_runs(runs, self._model.device)
        packed = pack(padded, long, self._prefix_B(rows), table_BP)
        hidden_NH = self._forward(packed.token_N, packed.position_N, packed.new)
        for row, run in zip(rows, runs, strict=True):
            row.num_draft_cached += len(run)
        region = BeamRegion(table_BP, self._prefix_B(rows))

        def expand(token_BF: Tensor, parent_BF: Tensor) -> Tensor:
            new, position_BF = region.add_level(parent_BF)
            hidden_NH = self._forward(token_BF.flatten(), position_BF.flatten(), new)
            return self._logits(hidden_NH).view(*token_BF.shape, -1)

        return Start(logits_BU=self._logits(hidden_NH[packed.last_B]), target_token_U=self._target_token_U, expand=expand)

    def _prefix_B(self, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row.num_draft_cached for row in rows], device=self._model.device)

    def _forward(self, token_N: Tensor, position_N: Tensor, new: NewTokens) -> Tensor:
        # a token that only the target's padding has can be drawn, if hardly ever: however the draft reads it, the law is the target's
        token_N = token_N.clamp(max=self._model.vocab_size - 1)
        return self._model.forward(token_N, position_N, self._backend(self._cache, new))[0]

    def _logits(self, hidden_NH: Tensor) -> Tensor:
        return self._model.logits(hidden_NH)[:, : len(self._target_token_U)]
