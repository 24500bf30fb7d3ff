"""Drafts by an EAGLE-3 head, which reads (token, feature) pairs: the target's own features in the text, its own ones in the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import BACKENDS, find_backend
from engine.drafts.beam import BeamRegion
from engine.drafts.model import Start
from engine.kv_cache import KVCache
from engine.models.eagle3 import Eagle3Head
from engine.new_tokens import NewTokens
from engine.packed_linear import pack_linears
from engine.packing import pack, pad_runs
from engine.pages import make_table
from engine.row import Row


class Eagle3Draft:
    """An EAGLE-3 head with its cache of pairs (token i+1, feature i)."""

    def __init__(self, head: Eagle3Head, *, attention: str):
        self._head = head
        self._scale = head.head_dim**-0.5
        weight = head.embedding_VH
        self._cache = KVCache(
            num_layers=1,
            num_kv_heads=head.config.num_key_value_heads,
            head_dim=head.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._backend = BACKENDS[find_backend(attention, self._cache)]
        self.caches = (self._cache,)
        self.feature_layers = head.feature_layers
        pack_linears(head)
        self.trained_length = head.config.max_position_embeddings

    def begin(self, rows: Sequence[Row]) -> Start | None:
        """Takes up the rows' pending features. A row without any has no pair to draft from."""
        if all(row.pending_TF is None for row in rows):
            return None
        device = self._cache.key.device
        table_BP = make_table([row.pages for row in rows], device)
        pending = [row.pending_TF for row in rows]
        runs = [
            [] if features is None else row.tokens[row.num_draft_cached + 1 : row.num_draft_cached + 1 + len(features)]
            for row, features in zip(rows, pending, strict=True)
        ]
        padded, long = pad_runs(runs, device)
        packed = pack(padded, long, self._prefix_B(rows), table_BP)
        long_rows = {row for row, _ in long}
        order = [row for row in range(len(rows)) if row not in long_rows] + [row for row, _ in long]
        feature_NH = self._head.fuse(torch.cat([pending[row] for row in order if pending[row] is not None]))
        g_BH = self._forward(packed.token_N, feature_NH, packed.position_N, packed.new)[packed.last_B]
        for row, run in zip(rows, runs, strict=True):
            row.num_draft_cached += len(run)
            row.pending_TF = None
        return Start(
            logits_BU=self._head.logits(g_BH).float(),
            target_token_U=self._head.d2t,
            expand=_Expand(self._head, self._forward, BeamRegion(table_BP, self._prefix_B(rows)), g_BH),
        )

    def _prefix_B(self, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row.num_draft_cached for row in rows], device=self._cache.key.device)

    def _forward(self, token_N: Tensor, feature_NH: Tensor, position_N: Tensor, new: NewTokens) -> Tensor:
        attention = self._backend(self._cache, new)
        return self._head(token_N, feature_NH, position_N, lambda query, key, value: attention(0, query, key, value, self._scale))


class _Expand:
    """One forward of the head a level. feature_BH: g of each root; a node's feature is the g of its parent."""

    def __init__(self, head: Eagle3Head, forward, region: BeamRegion, feature_BH: Tensor):
        self._head, self._forward, self._region = head, forward, region
        self._feature_BFH = feature_BH.unsqueeze(1)

    def __call__(self, token_BF: Tensor, parent_BF: Tensor) -> Tensor:
        new, position_BF = self._region.add_level(parent_BF)
        feature_BFH = self._feature_BFH.gather(1, parent_BF.unsqueeze(-1).expand(-1, -1, self._feature_BFH.shape[-1]))
        g_NH = self._forward(self._head.d2t[token_BF].flatten(), feature_BFH.flatten(0, 1), position_BF.flatten(), new)
        self._feature_BFH = g_NH.view(*token_BF.shape, -1)
        return self._head.logits(g_NH).float().view(*token_BF.shape, -1)
