"""Static trees: a shape fixed in advance, filled with tokens drawn from the draft (Sequoia, arXiv 2402.12374; LAW.md section 3).

A node of the shape is named by its path of child ranks: (0, 2) is the third child of the root's first child. The children of a node are
drawn without replacement from q_T, and a child's rank is its place in the order of the draws, which verification needs. At T = 0 they are
the most probable tokens, and not drawn. Where q_T has fewer tokens than the node has children, the others do not exist, nor does what
would hang from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.law.candidates import Proposal, keep_top
from engine.law.draws import Draws, Purpose
from engine.law.growth import Expand, Pool
from engine.law.keys import fold
from engine.law.probabilities import remove, softmax_at
from engine.law.tree import Tree, prune


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of a shape: C nodes, the children of the F nodes of the level before that have any, by parent and then by rank.

    has_FK: which ranks each of the F has. parent_C, rank_C: of each node. order_C: its place among the paths of the shape, from 1.
    inner: which of the C have children, the F of the next level.
    """

    has_FK: Tensor
    parent_C: Tensor
    rank_C: Tensor
    order_C: Tensor
    inner: Tensor


def lay_out(paths: Sequence[tuple[int, ...]], device: torch.device) -> list[Level]:
    """A shape level by level. The parent and the lower siblings of each path must be among `paths`, which may have any order."""
    parents: list[tuple[int, ...]] = [()]
    order = {path: place for place, path in enumerate(paths, start=1)}
    inner = {path[:-1] for path in paths}
    levels = []
    for depth in range(1, max(map(len, paths)) + 1):
        nodes = sorted(path for path in paths if len(path) == depth)
        has_FK = torch.zeros(len(parents), 1 + max(path[-1] for path in nodes), dtype=torch.bool)
        parent_C = torch.tensor([parents.index(path[:-1]) for path in nodes])
        rank_C = torch.tensor([path[-1] for path in nodes])
        order_C = torch.tensor([order[path] for path in nodes])
        has_FK[parent_C, rank_C] = True
        inner_index = torch.tensor([index for index, path in enumerate(nodes) if path in inner], dtype=torch.long)
        columns = {"has_FK": has_FK, "parent_C": parent_C, "rank_C": rank_C, "order_C": order_C, "inner": inner_index}
        levels.append(Level(**{name: column.to(device) for name, column in columns.items()}))
        parents = [path for path in nodes if path in inner]
    return levels


def grow_static(
    root_logits_BV: Tensor,
    expand: Expand,
    levels: Sequence[Level],
    *,
    draft_top: int,
    temperature_B: Tensor,
    cycle_B: Tensor,
    draws: Draws,
    active_B: Tensor,
    target_token_V: Tensor,
) -> Tree:
    """Fill the shape for each row.

    Args:
        root_logits_BV: the draft's logits for the root's children.
        expand: called once for each level but the last, with the nodes that have children.
        levels: from `lay_out`.
        draft_top: q keeps this many tokens, renormalised (0: all). temperature_B: the rows' temperatures. cycle_B: their cycle counters.
        active_B: rows that draw; the others get a root alone.
        target_token_V: target id of each draft id.
    """
    num_rows, device = len(root_logits_BV), root_logits_BV.device
    is_greedy_B11 = (temperature_B == 0).view(-1, 1, 1)
    logits_BFV = root_logits_BV.unsqueeze(1)
    active_BF = active_B.unsqueeze(1)
    path_F = torch.zeros(1, dtype=torch.long, device=device)
    pool_index_F = torch.full((1,), -1, device=device)
    parts: list[tuple[Tensor, ...]] = []
    proposals: list[Proposal] = []
    num_pool = num_expanded = 0

    for depth, level in enumerate(levels, start=1):
        logits_BFM, token_BFM = keep_top(logits_BFV, draft_top)
        law_BFM = softmax_at(logits_BFM, temperature_B.unsqueeze(-1).expand(logits_BFM.shape[:-1]))
        wanted_BFK = active_BF.unsqueeze(-1) & level.has_FK
        drawn_BFK, exists_BFK = _draw_children(law_BFM, wanted_BFK & ~is_greedy_B11, draws, cycle_B.unsqueeze(-1), path_F)

        rank_K = torch.arange(level.has_FK.shape[1], device=device)
        num_tokens_BF1 = (logits_BFM > -torch.inf).sum(-1, keepdim=True)
        index_BFK = torch.where(is_greedy_B11, rank_K.clamp(max=logits_BFM.shape[-1] - 1), drawn_BFK)
        exists_BFK = torch.where(is_greedy_B11, wanted_BFK & (rank_K < num_tokens_BF1), exists_BFK)

        token_BC = token_BFM.gather(-1, index_BFK)[:, level.parent_C, level.rank_C]
        exists_BC = exists_BFK[:, level.parent_C, level.rank_C]
        parts.append(
            (
                token_BC,
                # nothing is pruned by it; ranks are then the places among the paths
                torch.where(exists_BC, -level.order_C.float(), -torch.inf),
                exists_BC & ~is_greedy_B11.squeeze(-1),
                level.rank_C.expand_as(token_BC),
                pool_index_F[level.parent_C].expand_as(token_BC),
                (num_expanded + level.parent_C).expand_as(token_BC),
                torch.full_like(level.rank_C, depth),
            )
        )
        proposals.append(Proposal(token=token_BFM, probability=law_BFM, num_draws=len(rank_K)))
        if depth < len(levels):
            parent_F = level.parent_C[level.inner]
            path_F = fold(path_F[parent_F], level.rank_C[level.inner])
            active_BF = exists_BC[:, level.inner]
            pool_index_F = num_pool + level.inner
            logits_BFV = expand(token_BC[:, level.inner], parent_F.expand_as(active_BF))
        num_pool += token_BC.shape[1]
        num_expanded += logits_BFM.shape[1]

    pool = Pool.join(parts, proposals)
    # whatever exists is kept: pruning only closes the gaps
    return prune(pool, torch.full((num_rows,), num_pool + 1, device=device), num_pool + 1, target_token_V)


def _draw_children(law_BFM: Tensor, wanted_BFK: Tensor, draws: Draws, cycle_B1: Tensor, path_F: Tensor) -> tuple[Tensor, Tensor]:
    """(index among the law's tokens, whether there was one left to draw) [B, F, K], rank after rank."""
    indices, were_drawn = [], []
    for rank, wanted_BF in enumerate(wanted_BFK.unbind(-1)):
        is_drawn_BF = wanted_BF & (law_BFM.sum(-1) > 0)
        index_BF = draws.categorical(law_BFM, is_drawn_BF, Purpose.DRAFT, cycle_B1, path_F, torch.full_like(path_F, rank))
        law_BFM = remove(law_BFM, index_BF)
        indices.append(index_BF)
        were_drawn.append(is_drawn_BF)
    return torch.stack(indices, -1), torch.stack(were_drawn, -1)
