"""Drafting: a draft's laws grown into trees, level by level, by the method's policy (DESIGN.md section 7, steps 1 to 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.drafts.model import DraftModel
from engine.kv_cache import KVCache
from engine.law.candidates import CoupledPolicy, Policy, RheoPolicy, TopKPolicy
from engine.law.growth import grow
from engine.law.static import grow_static, lay_out
from engine.law.tree import Tree, prune, root_only
from engine.params import Speculation
from engine.row import Row
from engine.row_tensors import RowTensors

#: of the coupled method's construction values (LAW.md section 7, Tree scores): what makes the target's own draws likeliest under them, by
#: `python -m jobs.acceptance.coupled_scores` with the draft that ships
COUPLED_SCALE, COUPLED_NOISE_SCALE = 1.15, 0.95


class Drafter:
    """Trees from a draft.

    Args:
        speculation: tree_size and depth resolved.
        num_target_tokens: the target's vocabulary.
        topology: of `static` trees, the nodes as paths of child ranks.
    """

    def __init__(
        self,
        model: DraftModel,
        speculation: Speculation,
        *,
        num_target_tokens: int,
        device: torch.device,
        topology: Sequence[tuple[int, ...]] = (),
    ):
        self._model = model
        self._speculation = speculation
        self._num_target_tokens = num_target_tokens
        self._levels = lay_out(topology, device) if topology else []
        self._width = 1 if speculation.method == "chain" else speculation.top_k
        # a node at level d needs d - 1 ancestors in the tree, so deeper levels could not be kept
        self.depth = min(speculation.depth, speculation.tree_size - 1)

    @property
    def caches(self) -> Sequence[KVCache]:
        return self._model.caches

    @property
    def room(self) -> int:
        """Places behind a row's text that growth writes to."""
        if self._levels:
            return sum(len(level.inner) for level in self._levels)
        return (self.depth - 1) * self._width

    def draft(self, rows: Sequence[Row], tensors: RowTensors, size_B: Tensor) -> Tree:
        """Trees of `size_B` nodes at most; rows that do not draft get a root alone, whatever their size.

        The draft reads what it has not seen of each row's text.
        """
        start = self._model.begin(rows)
        drafts = [row.drafts for row in rows]
        if start is None or not any(drafts):
            return root_only(len(rows), size_B.device)
        has_draft_B = torch.tensor(drafts, device=size_B.device)
        if self._levels:
            return grow_static(
                start.logits_BU,
                start.expand,
                self._levels,
                draft_top=self._speculation.draft_top,
                temperature_B=tensors.temperature_B,
                cycle_B=tensors.cycle_B,
                draws=tensors.draws,
                active_B=has_draft_B,
                target_token_V=start.target_token_U,
            )
        policy = self._policy(tensors, start.target_token_U)
        pool = grow(start.logits_BU, start.expand, policy, depth=self.depth, width=self._width, active_B=has_draft_B)
        return prune(pool, torch.where(has_draft_B, size_B, 1), self._speculation.tree_size, start.target_token_U)

    def _policy(self, tensors: RowTensors, target_token_U: Tensor) -> Policy:
        speculation = self._speculation
        if speculation.method == "topk":
            return TopKPolicy(top_k=speculation.top_k)
        if speculation.method == "coupled":
            return CoupledPolicy(
                top_k=speculation.top_k,
                scale=COUPLED_SCALE,
                noise_scale=COUPLED_NOISE_SCALE,
                temperature_B=tensors.temperature_B,
                position_B=tensors.position_B,
                target_token_V=target_token_U,
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
