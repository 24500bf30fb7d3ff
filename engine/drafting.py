"""Drafting: the draft head over the tokens accepted last, then a tree grown level by level (DESIGN.md section 7, steps 1 to 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention import BACKENDS, NewTokens
from engine.kv_cache import KVCache
from engine.law.candidates import CoupledPolicy, Policy, RheoPolicy, TopKPolicy
from engine.law.growth import grow
from engine.law.tree import Tree, prune
from engine.models.eagle3 import Eagle3Head
from engine.packing import pack, pad_runs
from engine.params import Speculation
from engine.row import Row
from engine.row_tensors import RowTensors

#: sharpness of the coupled method's construction values (LAW.md section 7, Tree scores)
COUPLED_BETA = 0.7


class Drafter:
    """An EAGLE-3 head with its cache of (token, feature) pairs.

    Pairs are stored from the target's own features only: what growth puts behind them is overwritten by the next cycle (FIELD-CASES B18).

    Args:
        speculation: tree_size and depth resolved.
        num_target_tokens: the target's vocabulary.
    """

    def __init__(self, head: Eagle3Head, speculation: Speculation, *, num_target_tokens: int, attention: str):
        self._head = head
        self._speculation = speculation
        self._num_target_tokens = num_target_tokens
        self._backend = BACKENDS[attention]
        self._scale = head.head_dim**-0.5
        weight = head.fc.weight
        self.cache = KVCache(
            num_layers=1,
            num_kv_heads=head.config.num_key_value_heads,
            head_dim=head.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        chain = speculation.method == "chain"
        self._width = 1 if chain else speculation.top_k
        # a node at level d needs d - 1 ancestors in the tree, so deeper levels could not be kept
        self.depth = min(speculation.depth, speculation.tree_size - 1)

    @property
    def room(self) -> int:
        """Places behind the committed pairs that growth writes to."""
        return (self.depth - 1) * self._width

    def draft(self, rows: Sequence[Row], tensors: RowTensors, size_B: Tensor) -> Tree:
        """Trees of `size_B` nodes at most; rows without pending features get a root alone, whatever their size.

        The rows' slots are consecutive. Takes up the rows' pending features.
        """
        first_slot = rows[0].slot
        feature_BH, logits_BV = self._read_pending(rows, first_slot)
        has_draft_B = torch.tensor([row.pending_TF is not None for row in rows], device=logits_BV.device)
        for row in rows:
            if row.pending_TF is not None:
                row.num_paired += len(row.pending_TF)
                row.pending_TF = None
        prefix_B = torch.tensor([row.num_paired for row in rows], device=logits_BV.device)
        expand = _Expand(self._head, self._forward, first_slot=first_slot, prefix_B=prefix_B, feature_BH=feature_BH)
        pool = grow(logits_BV, expand, self._policy(tensors), depth=self.depth, width=self._width, active_B=has_draft_B)
        size_B = torch.where(has_draft_B, size_B, 1)
        return prune(pool, size_B, self._speculation.tree_size, self._head.d2t)

    def _policy(self, tensors: RowTensors) -> Policy:
        speculation = self._speculation
        if speculation.method == "topk":
            return TopKPolicy(top_k=speculation.top_k)
        if speculation.method == "coupled":
            return CoupledPolicy(
                top_k=speculation.top_k,
                beta=COUPLED_BETA,
                temperature_B=tensors.temperature_B,
                position_B=tensors.position_B,
                target_token_V=self._head.d2t,
                num_target_tokens=self._num_target_tokens,
                draws=tensors.draws,
            )
        return RheoPolicy(
            top_k=self._width,
            m=0 if speculation.method == "chain" else speculation.m,
            draft_top=speculation.draft_top,
            temperature_B=tensors.temperature_B,
            cycle_B=tensors.cycle_B,
            draws=tensors.draws,
        )

    def _read_pending(self, rows: Sequence[Row], first_slot: int) -> tuple[Tensor, Tensor]:
        """Store the pairs of the pending features; g [B, H] and logits [B, V] of each row's last pair."""
        device = self.cache.key.device
        pending = [row.pending_TF for row in rows]
        runs = [[] if row.pending_TF is None else row.tokens[row.num_paired + 1 :] for row in rows]
        padded, long = pad_runs(runs, device)
        prefix_B = torch.tensor([row.num_paired for row in rows], device=device)
        packed = pack(padded, long, prefix_B, first_slot)
        long_rows = {row for row, _ in long}
        order = [row for row in range(len(rows)) if row not in long_rows] + [row for row, _ in long]
        feature_NH = self._head.fuse(torch.cat([pending[row] for row in order if pending[row] is not None]))
        g_NH = self._forward(packed.token_N, feature_NH, packed.position_N, packed.new)
        g_BH = g_NH[packed.last_B]
        return g_BH, self._head.logits(g_BH).float()

    def _forward(self, token_N: Tensor, feature_NH: Tensor, position_N: Tensor, new: NewTokens) -> Tensor:
        attention = self._backend(self.cache, new)
        return self._head(token_N, feature_NH, position_N, lambda query, key, value: attention(0, query, key, value, self._scale))


class _Expand:
    """One draft forward a level: the nodes of a beam, each seeing the committed pairs, its ancestors and itself.

    Args:
        forward: (token_N, feature_NH, position_N, new tokens) -> g [N, H].
        prefix_B: committed pairs of each row. feature_BH: g of each root.
    """

    def __init__(self, head: Eagle3Head, forward: Callable[..., Tensor], *, first_slot: int, prefix_B: Tensor, feature_BH: Tensor):
        self._head, self._forward = head, forward
        self._first_slot, self._prefix_B = first_slot, prefix_B
        self._feature_BFH = feature_BH.unsqueeze(1)
        self._visible_BFW = torch.zeros(len(prefix_B), 1, 0, dtype=torch.bool, device=prefix_B.device)
        self._level = 0

    def __call__(self, token_BF: Tensor, parent_BF: Tensor) -> Tensor:
        num_rows, width = token_BF.shape
        device = token_BF.device
        offset = self._visible_BFW.shape[2]
        ancestors_BFW = self._visible_BFW.gather(1, parent_BF.unsqueeze(-1).expand(-1, -1, offset))
        self_BFF = torch.eye(width, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
        self._visible_BFW = torch.cat([ancestors_BFW, self_BFF], 2)
        feature_BFH = self._feature_BFH.gather(1, parent_BF.unsqueeze(-1).expand(-1, -1, self._feature_BFH.shape[-1]))
        new = NewTokens(
            first_slot=self._first_slot,
            prefix_B=self._prefix_B,
            start_B=torch.arange(num_rows, device=device) * width,
            count_B=torch.full((num_rows,), width, device=device),
            offset=offset,
            visible_BQW=self._visible_BFW,
        )
        # all nodes of a level stand at the same position, one behind the level before
        position_BF = (self._prefix_B + self._level).unsqueeze(-1).expand(-1, width)
        self._level += 1
        g_NH = self._forward(self._head.d2t[token_BF].flatten(), feature_BFH.flatten(0, 1), position_BF.flatten(), new)
        self._feature_BFH = g_NH.view(num_rows, width, -1)
        return self._head.logits(g_NH).float().view(num_rows, width, -1)
