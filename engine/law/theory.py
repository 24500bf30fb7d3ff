"""Closed forms for one layer with its full pool, to hold the code against (LAW.md 2.4, 3.4 and 7).

Laws are vectors over the vocabulary [V], float64; the ranking of q is taken inside. `q_tilde` may be at another
temperature than `q`, which ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rank(q: Tensor) -> Tensor:
    """Token ids by falling q, ties by lower id."""
    return q.sort(dim=-1, descending=True, stable=True).indices


def residual_law(q: Tensor, m: int) -> Tensor:
    """q~: q without its m lead tokens, renormalised (LAW.md 2.1)."""
    rest = q.clone()
    rest[rank(q)[:m]] = 0
    return rest / rest.sum()


def acceptance_top_k(p: Tensor, q: Tensor, k: int) -> float:
    """Deterministic children: p(Top_k)."""
    return float(p[rank(q)[:k]].sum())


def acceptance_stochastic_first(p: Tensor, q: Tensor, k: int, m: int, q_tilde: Tensor | None = None) -> float:
    """alpha_SF of RheoVerification with the full pool of k slots, the closed form of the paper's Theorem 3 (LAW.md 2.4)."""
    order, q_tilde = rank(q), residual_law(q, m) if q_tilde is None else q_tilde
    head, last = order[: k - 1], order[k - 1]
    outside = torch.ones_like(p, dtype=torch.bool)
    outside[head] = False
    excess = (q_tilde - p).clamp(min=0)
    alpha = p[head].sum() + torch.minimum(p, q_tilde)[outside].sum()
    if excess.sum() > 0:
        alpha = alpha + (p - q_tilde).clamp(min=0)[last] * excess[order[m:k]].sum() / excess.sum()
    return float(alpha)


def acceptance_optimal_transport(p: Tensor, q: Tensor, k: int, m: int, q_tilde: Tensor | None = None) -> float:
    """alpha_OT: the most that any verification of the same pool can accept (LAW.md 2.4; the optimum of the linear program)."""
    order, q_tilde = rank(q), residual_law(q, m) if q_tilde is None else q_tilde
    merged = q_tilde.clone()
    merged[order[:k]] = 0
    merged[order[k - 1]] = q_tilde[order[m:k]].sum()
    outside = torch.ones_like(p, dtype=torch.bool)
    outside[order[: k - 1]] = False
    return float(p[order[: k - 1]].sum() + torch.minimum(p, merged)[outside].sum())


def acceptance_coupled_single(p: Tensor, q: Tensor) -> float:
    """One coupled candidate: sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x)) (arXiv 2408.07978)."""
    both = (p > 0) & (q > 0)
    ratio = torch.maximum(p.unsqueeze(0) / p[both].unsqueeze(1), q.unsqueeze(0) / q[both].unsqueeze(1))
    return float((1 / ratio.sum(1)).sum())


def acceptance_coupled_floor(p: Tensor, q: Tensor) -> float:
    """The least that one coupled candidate can accept: (1 - TV) / (1 + TV) (arXiv 2408.07978)."""
    distance = 0.5 * (p - q).abs().sum()
    return float((1 - distance) / (1 + distance))
