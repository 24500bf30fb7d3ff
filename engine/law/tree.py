"""Pruning a pool to a tree, and a tree's shape as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.law.candidates import Proposal
from engine.law.growth import Pool


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Drafted trees of B rows, of different sizes: node 0 is the root (the row's last token), parents come before their children.

    token_BR: target ids; the root's is -1, for its token is already text.
    parent_BR: node index of the parent (the root's is 0). depth_BR: 0 for the root. exists_BR: nodes beyond a row's size do not exist.
    rank_BR: place in the order in which the nodes are kept, 0 for the root: a tree of r nodes would have those of ranks below r.
    sampled_BR, slot_BR: how the node was proposed. origin_BR: where in `proposal` [B, E, M] (target ids) q~ of its sampled sibling stands.
    max_depth: levels that the deepest tree may have.
    """

    token_BR: Tensor
    parent_BR: Tensor
    depth_BR: Tensor
    exists_BR: Tensor
    rank_BR: Tensor
    sampled_BR: Tensor
    slot_BR: Tensor
    origin_BR: Tensor
    proposal: Proposal | None
    max_depth: int

    @property
    def size_B(self) -> Tensor:
        """Nodes of each tree, the root included."""
        return self.exists_BR.sum(-1)

    def ancestors_BRR(self) -> Tensor:
        """[b, i, j]: node j lies on the path from the root to node i, both included. The mask of tree attention."""
        node_R = torch.arange(self.token_BR.shape[1], device=self.token_BR.device)
        ancestor_BR = node_R.expand_as(self.parent_BR)
        mask_BRR = ancestor_BR.unsqueeze(-1) == node_R
        for _ in range(self.max_depth):
            ancestor_BR = self.parent_BR.gather(1, ancestor_BR)
            mask_BRR = mask_BRR | (ancestor_BR.unsqueeze(-1) == node_R)
        return mask_BRR


def root_only(num_rows: int, device: torch.device) -> Tree:
    """Trees without drafted nodes: a plain decoding step."""
    zeros_B1 = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
    return Tree(
        token_BR=zeros_B1 - 1,
        parent_BR=zeros_B1,
        depth_BR=zeros_B1,
        exists_BR=torch.ones_like(zeros_B1, dtype=torch.bool),
        rank_BR=zeros_B1,
        sampled_BR=torch.zeros_like(zeros_B1, dtype=torch.bool),
        slot_BR=zeros_B1 - 1,
        origin_BR=zeros_B1,
        proposal=None,
        max_depth=0,
    )


def best_entries(pool: Pool, num_kept_B: Tensor) -> tuple[Tensor, Tensor]:
    """(which entries are among the first `num_kept_B`, each one's rank from 1) [B, P], in the total order of LAW.md 2.5: score descending,
    then level, the parent's rank in its beam, and slot ascending. The pool lies in the order of the last three, so one stable sort decides;
    a child never scores above its parent, so what is kept is connected."""
    order_BP = pool.score_BP.sort(dim=-1, descending=True, stable=True).indices
    rank_P = torch.arange(1, order_BP.shape[1] + 1, device=order_BP.device)
    rank_BP = torch.empty_like(order_BP).scatter_(1, order_BP, rank_P.expand_as(order_BP))
    return (rank_BP <= num_kept_B.unsqueeze(-1)) & (pool.score_BP > -torch.inf), rank_BP


def prune(pool: Pool, size_B: Tensor, max_size: int, target_token_V: Tensor) -> Tree:
    """The tree of the best `size_B - 1` entries of each row, root included in the size.

    Args:
        size_B: at least 1, at most `max_size`; must be fixed before this cycle's draws (LAW.md section 6), for `coupled` anything goes.
        target_token_V: target id of each draft id.
    """
    num_rows, num_pool = pool.score_BP.shape
    device = pool.score_BP.device
    kept_BP, rank_BP = best_entries(pool, size_B - 1)
    index_P = torch.arange(num_pool, device=device)
    width = min(max_size - 1, num_pool)
    entry_BW = torch.where(kept_BP, index_P, num_pool).sort(-1).values[:, :width]
    exists_BW = entry_BW < num_pool
    entry_BW = entry_BW.clamp(max=num_pool - 1)

    # pool index -> node index; the root's children have parent -1, which wraps to the last column
    node_W = torch.arange(1, width + 1, device=device)
    node_BP = torch.zeros(num_rows, num_pool + 1, dtype=torch.long, device=device)
    node_BP.scatter_(1, torch.where(exists_BW, entry_BW, num_pool), node_W.expand_as(entry_BW))
    node_BP[:, num_pool] = 0
    parent_BW = node_BP.gather(1, pool.parent_BP.gather(1, entry_BW) % (num_pool + 1))

    def with_root(column_BW: Tensor, root: int, missing: int) -> Tensor:
        column_BW = torch.where(exists_BW, column_BW, missing)
        return torch.cat([column_BW.new_full((num_rows, 1), root), column_BW], 1)

    return Tree(
        token_BR=with_root(target_token_V[pool.token_BP.gather(1, entry_BW)], -1, -1),
        parent_BR=with_root(parent_BW, 0, 0),
        depth_BR=with_root(pool.level_P[entry_BW], 0, 0),
        exists_BR=with_root(exists_BW.long(), 1, 0).bool(),
        rank_BR=with_root(rank_BP.gather(1, entry_BW), 0, 0),
        sampled_BR=with_root(pool.sampled_BP.gather(1, entry_BW).long(), 0, 0).bool(),
        slot_BR=with_root(pool.slot_BP.gather(1, entry_BW), -1, -1),
        origin_BR=with_root(pool.origin_BP.gather(1, entry_BW), 0, 0),
        proposal=pool.proposal and replace(pool.proposal, token=target_token_V[pool.proposal.token]),
        max_depth=pool.depth,
    )


def among_plain(tree: Tree, before: int, after: int) -> Tree:
    """The same trees, with `before` rows of a root alone in front of them and `after` behind."""
    if not before and not after:
        return tree

    def pad(x: Tensor, value: int = 0) -> Tensor:
        padding = [0, 0] * (x.ndim - 1) + [before, after]
        return torch.nn.functional.pad(x, padding, value=value)

    columns = {name: pad(getattr(tree, name)) for name in ("parent_BR", "depth_BR", "exists_BR", "rank_BR", "sampled_BR", "origin_BR")}
    columns["exists_BR"][:, 0] = True
    proposal = tree.proposal and replace(tree.proposal, token=pad(tree.proposal.token), probability=pad(tree.proposal.probability))
    return replace(tree, token_BR=pad(tree.token_BR, -1), slot_BR=pad(tree.slot_BR, -1), proposal=proposal, **columns)
