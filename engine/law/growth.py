"""Growth: candidates level by level, a beam of K nodes at most from one level to the next (LAW.md 1.3, as EAGLE-2/3 grow)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.law.candidates import Frontier, Policy, Proposal
from engine.law.keys import fold


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Everything that was proposed, in the order that breaks ties: level, then the parent's rank in its beam, then slot.

    token_BP (draft ids), score_BP (log, -inf: no token), sampled_BP, slot_BP: of the entries.
    parent_BP: pool index of the parent, -1 for the root's children. origin_BP: which expanded node (0: the root) proposed the entry.
    level_P: draft level, from 1 to `depth`. proposal: q~ of the expanded nodes [B, E, M], or None.
    """

    token_BP: Tensor
    score_BP: Tensor
    sampled_BP: Tensor
    slot_BP: Tensor
    parent_BP: Tensor
    origin_BP: Tensor
    level_P: Tensor
    depth: int
    proposal: Proposal | None

    @classmethod
    def join(cls, levels: Sequence[tuple[Tensor, ...]], proposals: Sequence[Proposal]) -> Pool:
        """From the first seven fields of each level, and the proposals of its nodes (empty: nothing is drawn)."""
        columns = (torch.cat(column, -1) for column in zip(*levels, strict=True))
        proposal = None
        if proposals:
            proposal = Proposal(
                token=torch.cat([each.token for each in proposals], 1),
                probability=torch.cat([each.probability for each in proposals], 1),
                num_draws=max(each.num_draws for each in proposals),
            )
        names = ("token_BP", "score_BP", "sampled_BP", "slot_BP", "parent_BP", "origin_BP", "level_P")
        return cls(**dict(zip(names, columns, strict=True)), depth=len(levels), proposal=proposal)


class Expand(Protocol):
    """The draft, one level further."""

    def __call__(self, token_BF: Tensor, parent_BF: Tensor) -> Tensor:
        """Logits [B, F, V] after each node of a new beam. token_BF: draft ids; parent_BF: each node's parent in the beam before."""
        ...


def select_beam(score_BC: Tensor, width: int) -> Tensor:
    """The `width` best candidates of one level, by (score, then index): a stable sort, since torch.topk promises no order on ties."""
    return score_BC.sort(dim=-1, descending=True, stable=True).indices[:, :width]


def beam_widths(size: int, depth: int, width: int) -> list[int]:
    """How many nodes of each level but the last are expanded, where a tree keeps `size` nodes, the root included.

    `width`, or fewer where the others could keep no child: the j-th best node of level l stands behind j - 1 nodes of its level and its
    l - 1 ancestors, so its children are the (j + l)-th best of the tree or worse, and size - 1 are kept. With size 4 and depth 3: of level
    1 two nodes, of level 2 one. The pruned tree is the same.
    """
    return [min(width, size - 1 - level) for level in range(1, min(depth, size - 1))]


def grow(root_logits_BV: Tensor, expand: Expand, policy: Policy, *, widths: Sequence[int], active_B: Tensor) -> Pool:
    """Grow a tree for each row, of len(widths) + 1 levels.

    Args:
        root_logits_BV: the draft's logits for the root's children.
        expand: called len(widths) times.
        widths: nodes of each level that are expanded, as `beam_widths` gives them.
        active_B: rows that draw; the others' trees mean nothing.
    """
    num_rows, device = root_logits_BV.shape[0], root_logits_BV.device
    logits_BFV = root_logits_BV.unsqueeze(1)
    score_BF = torch.zeros(num_rows, 1, dtype=torch.promote_types(logits_BFV.dtype, torch.float32), device=device)
    path_BF = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
    pool_index_BF = torch.full((num_rows, 1), -1, dtype=torch.long, device=device)
    active_BF = active_B.unsqueeze(1)
    parts: list[tuple[Tensor, ...]] = []
    proposals: list[Proposal] = []
    num_pool = num_expanded = 0

    for level in range(1, len(widths) + 2):
        slots = policy(logits_BFV, Frontier(level=level, path_BF=path_BF, active_BF=active_BF))
        num_frontier, num_slots = slots.token_BFK.shape[1:]
        score_BC = (score_BF.unsqueeze(-1) + slots.value_BFK).masked_fill(~active_BF.unsqueeze(-1), -torch.inf).flatten(1)
        frontier_C = torch.arange(num_frontier, device=device).repeat_interleave(num_slots)
        slot_C = torch.arange(num_slots, device=device).repeat(num_frontier)
        token_BC = slots.token_BFK.flatten(1)
        parts.append(
            (
                token_BC,
                score_BC,
                slots.sampled_BFK.flatten(1),
                slot_C.expand_as(token_BC),
                pool_index_BF[:, frontier_C],
                (num_expanded + frontier_C).expand_as(token_BC),
                torch.full_like(slot_C, level),
            )
        )
        if slots.proposal is not None:
            proposals.append(slots.proposal)
        if level <= len(widths):
            beam_BF = select_beam(score_BC, widths[level - 1])
            parent_BF = frontier_C[beam_BF]
            path_BF = fold(path_BF.gather(1, parent_BF), slot_C[beam_BF])
            score_BF = score_BC.gather(1, beam_BF)
            active_BF = score_BF > -torch.inf
            pool_index_BF = num_pool + beam_BF
            logits_BFV = expand(token_BC.gather(1, beam_BF), parent_BF)
        num_pool += len(slot_C)
        num_expanded += num_frontier

    return Pool.join(parts, proposals)
