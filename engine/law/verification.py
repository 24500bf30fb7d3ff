"""Verification: walk each tree from its root, one visited node a level, and emit one token at each (LAW.md 2.4, 7).

At a node with target law p and surviving children, a rule says which token comes next. If a child holds it, the walk goes on from that
child (the token is accepted); if not, the token is the row's bonus or correction and the walk ends. Whatever the tree, the token at each
node has law p: that is losslessness, and what the exact enumeration checks on this code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.law.draws import Draws, Purpose
from engine.law.probabilities import normalise, remove
from engine.law.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The nodes that a level of the walk visits, one for each row.

    p_BV: the target's law there. child_BR: their children. position_B: the output position their next token fills. active_B: rows whose
    walk has not ended.
    """

    p_BV: Tensor
    child_BR: Tensor
    position_B: Tensor
    active_B: Tensor


class Rule(Protocol):
    def __call__(self, tree: Tree, visit: Visit, draws: Draws) -> Tensor:
        """The next token [B], with law p_BV."""
        ...


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a walk emitted; L = max_depth + 1.

    token_BL: emitted tokens (target ids), accepted ones first and the bonus or correction last. num_accepted_B: so many were drafted, and
    one more is emitted. node_BL: the node of each accepted token.
    """

    token_BL: Tensor
    num_accepted_B: Tensor
    node_BL: Tensor


def verify(
    tree: Tree,
    law_at: Callable[[Tensor, Tensor], Tensor],
    rule: Rule,
    draws: Draws,
    position_B: Tensor,
    active_B: Tensor | None = None,
) -> Verdict:
    """Walk the trees of a batch together, level by level; rows whose walk has ended wait.

    Args:
        law_at: (node_B, active_B) -> p [B, V], the target's law at each row's node; called once a level, from the root down.
        position_B: output position that the root's children fill.
        active_B: rows that draw (None: all); the others emit nothing and consume no key.
    """
    num_rows = tree.token_BR.shape[0]
    node_B = torch.zeros_like(position_B)
    if active_B is None:
        active_B = torch.ones_like(position_B, dtype=torch.bool)
    num_accepted_B = torch.zeros_like(position_B)
    token_BL = torch.full((num_rows, tree.max_depth + 1), -1, dtype=torch.long, device=position_B.device)
    node_BL = torch.zeros_like(token_BL)
    for level in range(tree.max_depth + 1):
        # one flag for the whole batch: most walks end early, and a level costs a pass through the target's output head
        if level and not bool(active_B.any()):
            break
        child_BR = tree.exists_BR & (tree.parent_BR == node_B.unsqueeze(-1)) & (tree.depth_BR == level + 1) & active_B.unsqueeze(-1)
        visit = Visit(p_BV=law_at(node_B, active_B), child_BR=child_BR, position_B=position_B + level, active_B=active_B)
        token_B = rule(tree, visit, draws)
        match_BR = child_BR & (tree.token_BR == token_B.unsqueeze(-1))
        token_BL[:, level] = torch.where(active_B, token_B, -1)
        active_B = match_BR.any(-1)
        node_B = torch.where(active_B, match_BR.long().argmax(-1), node_B)
        node_BL[:, level] = node_B
        num_accepted_B = num_accepted_B + active_B.long()
    return Verdict(token_BL=token_BL, num_accepted_B=num_accepted_B, node_BL=node_BL)


def match_target(tree: Tree, visit: Visit, draws: Draws) -> Tensor:
    """y_t = argmax(log p + noise), whatever the tree: for `coupled`, `topk` and `off` (LAW.md section 7)."""
    return draws.token(visit.p_BV, visit.active_B, visit.position_B)


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """The sampled child of each visited node, where it survived: its token, its q~, and the whole of q~ over the target's vocabulary."""

    exists_B: Tensor
    token_B: Tensor
    slot_B: Tensor
    probability_B: Tensor
    q_BV: Tensor


def _sampled_child(tree: Tree, visit: Visit) -> _Sampled:
    sampled_BR = visit.child_BR & tree.sampled_BR
    exists_B = sampled_BR.any(-1)
    node_B1 = sampled_BR.long().argmax(-1, keepdim=True)  # a node has one sampled child at most
    token_B1 = tree.token_BR.gather(1, node_B1).clamp(min=0)
    token_BM, probability_BM = _proposal_of(tree, node_B1)
    q_BV = torch.zeros_like(visit.p_BV).scatter_(1, token_BM, (probability_BM * exists_B.unsqueeze(-1)).to(visit.p_BV.dtype))
    return _Sampled(
        exists_B=exists_B,
        token_B=token_B1.squeeze(1),
        slot_B=tree.slot_BR.gather(1, node_B1).squeeze(1),
        probability_B=q_BV.gather(1, token_B1).squeeze(1),
        q_BV=q_BV,
    )


def _proposal_of(tree: Tree, node_B1: Tensor) -> tuple[Tensor, Tensor]:
    """(token, probability) [B, M] of the law that each row's node was drawn from; of any law where the node was not drawn."""
    assert tree.proposal is not None, "a tree with sampled nodes carries the law they were drawn from"
    origin_B1M = tree.origin_BR.gather(1, node_B1).unsqueeze(-1).expand(-1, 1, tree.proposal.token.shape[-1])
    return tree.proposal.token.gather(1, origin_B1M).squeeze(1), tree.proposal.probability.gather(1, origin_B1M).squeeze(1)


def accept_probability(p_BV: Tensor, sampled: _Sampled) -> Tensor:
    """min(1, p(x_s) / q~(x_s)); q~(x_s) > 0, for x_s was drawn from it."""
    p_B = p_BV.gather(1, sampled.token_B.unsqueeze(-1)).squeeze(-1)
    return (p_B / torch.where(sampled.exists_B, sampled.probability_B, 1)).clamp(max=1)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """(p - q~)+, not normalised; p itself where rounding leaves no mass. q_BV is 0 where there is nothing to subtract."""
    rest_BV = (p_BV - q_BV).clamp_(min=0)
    return torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)


def stochastic_first(tree: Tree, visit: Visit, draws: Draws) -> Tensor:
    """RheoVerification: the sampled child is tried first, against the whole of p; the deterministic ones take what is left (LAW.md 2.4).

    Acceptance is min(1, p/q~). After a rejection y has the law of the residual, so that y = x_s is impossible; y may be another child.
    """
    if tree.proposal is None:
        return draws.categorical(visit.p_BV, visit.active_B, Purpose.BONUS, visit.position_B)
    sampled = _sampled_child(tree, visit)
    accepted_B = sampled.exists_B & draws.bernoulli(
        accept_probability(visit.p_BV, sampled), sampled.exists_B, Purpose.ACCEPT, visit.position_B
    )
    purpose_B = torch.where(sampled.exists_B, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    rest_BV = residual(visit.p_BV, sampled.q_BV)
    y_B = draws.categorical(rest_BV, visit.active_B & ~accepted_B, purpose_B, visit.position_B)
    return torch.where(accepted_B, sampled.token_B, y_B)


def deterministic_first(tree: Tree, visit: Visit, draws: Draws) -> Tensor:
    """The paper's ablation, RRSw: leads are tried one-hot against p, then the sampled child against p renormalised without them, and the
    fill tokens take what is left (LAW.md 2.4). Lossless; accepts less for m >= 1."""
    if tree.proposal is None:
        return draws.categorical(visit.p_BV, visit.active_B, Purpose.BONUS, visit.position_B)
    sampled = _sampled_child(tree, visit)
    lead_BR = visit.child_BR & (tree.slot_BR < sampled.slot_B.unsqueeze(-1)) & sampled.exists_B.unsqueeze(-1)
    lead_BV = torch.zeros_like(visit.p_BV).scatter_add_(1, tree.token_BR.clamp(min=0), lead_BR.to(visit.p_BV.dtype)) > 0

    purpose_B = torch.where(sampled.exists_B, int(Purpose.LEAD), int(Purpose.BONUS))
    first_B = draws.categorical(visit.p_BV, visit.active_B, purpose_B, visit.position_B)
    is_trial_B = sampled.exists_B & ~lead_BV.gather(1, first_B.unsqueeze(-1)).squeeze(-1)

    rest_BV = visit.p_BV.masked_fill(lead_BV, 0)
    rest_BV = rest_BV / torch.where(is_trial_B, rest_BV.sum(-1), 1).unsqueeze(-1)
    accepted_B = is_trial_B & draws.bernoulli(accept_probability(rest_BV, sampled), is_trial_B, Purpose.ACCEPT, visit.position_B)
    last_B = draws.categorical(residual(rest_BV, sampled.q_BV), is_trial_B & ~accepted_B, Purpose.RESIDUAL, visit.position_B)
    return torch.where(is_trial_B, torch.where(accepted_B, sampled.token_B, last_B), first_B)


def without_replacement(tree: Tree, visit: Visit, draws: Draws) -> Tensor:
    """Recursive rejection for children drawn without replacement, in the order of their draws (LAW.md 3.1; Sequoia, arXiv 2402.12374).

    P starts as p, and Q as the law of the first draw. A child c is accepted with min(1, P(c)/Q(c)); after a rejection P becomes the
    residual norm((P - Q)+), and Q what the next child was drawn from. If all are rejected the token is drawn from P, in which none of them
    is left. Children that were not drawn (T = 0) are met by a token from p or not.
    """
    if tree.proposal is None:
        return draws.categorical(visit.p_BV, visit.active_B, Purpose.BONUS, visit.position_B)
    sampled_BR = visit.child_BR & tree.sampled_BR
    token_BM, q_BM = _proposal_of(tree, sampled_BR.long().argmax(-1, keepdim=True))
    # Q is 0 outside its M tokens, so the others are one outcome more, which they share as they do in p
    outside_BV = visit.p_BV.scatter(1, token_BM, 0)
    outside_B1 = outside_BV.sum(-1, keepdim=True)
    p_BO = torch.cat([visit.p_BV.gather(1, token_BM), outside_B1], 1)
    q_BO = torch.nn.functional.pad(q_BM.to(p_BO.dtype), (0, 1))

    accepted_B = torch.zeros_like(visit.active_B)
    token_B = torch.zeros_like(visit.position_B)
    for rank in range(tree.proposal.num_draws):
        child_BR = sampled_BR & (tree.slot_BR == rank)
        child_B = tree.token_BR.gather(1, child_BR.long().argmax(-1, keepdim=True)).squeeze(1)
        is_trial_B = child_BR.any(-1) & ~accepted_B
        index_B = (token_BM == child_B.unsqueeze(-1)).long().argmax(-1)
        ratio_B = _at(p_BO, index_B) / torch.where(is_trial_B, _at(q_BO, index_B), 1)
        key = Purpose.ACCEPT, visit.position_B, torch.full_like(visit.position_B, rank)
        accepts_B = is_trial_B & draws.bernoulli(ratio_B.clamp(max=1), is_trial_B, *key)
        token_B = torch.where(accepts_B, child_B, token_B)
        accepted_B = accepted_B | accepts_B
        rejects_B1 = (is_trial_B & ~accepts_B).unsqueeze(-1)
        p_BO = torch.where(rejects_B1, normalise(residual(p_BO, q_BO)), p_BO)
        q_BO = torch.where(rejects_B1, remove(q_BO, index_B), q_BO)

    share_B1 = p_BO[:, -1:] / torch.where(outside_B1 > 0, outside_B1, 1)
    rest_BV = (outside_BV * share_B1).scatter(1, token_BM, p_BO[:, :-1])
    purpose_B = torch.where(sampled_BR.any(-1), int(Purpose.RESIDUAL), int(Purpose.BONUS))
    y_B = draws.categorical(rest_BV, visit.active_B & ~accepted_B, purpose_B, visit.position_B)
    return torch.where(accepted_B, token_B, y_B)


def _at(law_BO: Tensor, index_B: Tensor) -> Tensor:
    return law_BO.gather(1, index_B.unsqueeze(-1)).squeeze(-1)


RULES: dict[str, Rule] = {"stochastic_first": stochastic_first, "deterministic_first": deterministic_first}
