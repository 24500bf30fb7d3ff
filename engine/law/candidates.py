"""Candidate slots of a node: which tokens a node proposes, with what construction value, and what the sampled one was drawn from.

A policy maps the draft's logits at the frontier [B, F, V] to `Slots`. Construction is at temperature 1; the row's temperature enters only
the law of the sampled token (LAW.md 2.2). Values are logarithms, added to the parent's score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.law.draws import Draws, Purpose
from engine.law.probabilities import softmax_at

#: log of a construction value that underflowed: finite, so that such a slot still ranks before one that holds no token (-inf)
FLOOR = -1e30

#: m = 0: how far the sampled token's value lies above q(x_1), so that its rank does not depend on what was drawn
ABOVE_TOP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The law q~ of a node's sampled token: the very tensor that it was drawn from, that acceptance divides by, and that the residual
    subtracts (LAW.md 2.5). Where a node has no sampled token, `probability` is not used.

    token [B, F, M] ids of the draft's vocabulary; probability [B, F, M], sums to 1.
    num_draws: sampled tokens that a node may have. The first is drawn from `probability`, and each further one from what
    `probabilities.remove` leaves of it.
    """

    token: Tensor
    probability: Tensor
    num_draws: int = 1


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Slots of frontier nodes, in slot order.

    token_BFK: ids of the draft's vocabulary; value_BFK: log construction value <= 0, -inf where the slot holds no token;
    sampled_BFK: the slot holds a token drawn from `proposal`.
    """

    token_BFK: Tensor
    value_BFK: Tensor
    sampled_BFK: Tensor
    proposal: Proposal | None = None


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Where candidates are asked for: level (1 for the root's children), path_BF (the node's slot path, as a key), active_BF."""

    level: int
    path_BF: Tensor
    active_BF: Tensor


class Policy(Protocol):
    def __call__(self, logits_BFV: Tensor, frontier: Frontier) -> Slots: ...


#: how many more tokens `ranked` looks at, to see all that tie with the last one it keeps
_TIE_MARGIN = 32


def ranked(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The `num_tokens` largest logits and their ids, ties by lower id; -inf alone where a logit is +inf or NaN.

    An overflow in the draft is no law to draw from, so such a node proposes nothing.
    torch.topk promises no order, and takes any of the tokens that tie at its end, so it is asked for a few more. In bf16 ties are common.
    """
    num_looked_at = min(num_tokens + _TIE_MARGIN, logits.shape[-1])
    value, token = logits.topk(num_looked_at, dim=-1)
    token, by_id = token.sort(-1)
    value, by_value = value.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    token = token.gather(-1, by_value)
    last, end = value[..., num_tokens - 1], value[..., -1]
    if num_looked_at < logits.shape[-1] and bool(((last == end) & (end > -torch.inf)).any()):
        value, token = logits.sort(dim=-1, descending=True, stable=True)
    value, token = value[..., :num_tokens], token[..., :num_tokens]
    return value.masked_fill(~value[..., :1].isfinite(), -torch.inf), token  # NaN sorts as the largest, so the first value shows it


def keep_top(logits: Tensor, draft_top: int) -> tuple[Tensor, Tensor]:
    """What the draft's law keeps: its `draft_top` largest logits (0: all of them) and their ids (LAW.md 2.3)."""
    num_tokens = logits.shape[-1]
    return ranked(logits, min(draft_top or num_tokens, num_tokens))


def log_value(q: Tensor) -> Tensor:
    return q.log().clamp_(min=FLOOR)


def residual_mass(q_BFM: Tensor, m: int) -> Tensor:
    """z: the mass outside the lead, summed directly. 1 minus the lead would lose the rank floor to rounding (LAW.md 2.1)."""
    return q_BFM[..., m:].sum(-1)


def proxy(q_BFM: Tensor, m: int) -> Tensor:
    """The sampled token's construction probability, a function of q and not of which token was drawn: min{q(x_m), z}, or for m = 0 a
    little more than q(x_1). Never below q(x_{m+1}), the rank floor (LAW.md 2.5, Lemma 1)."""
    if m == 0:
        return (q_BFM[..., 0] + ABOVE_TOP).clamp(max=1)
    last_lead = min(m, q_BFM.shape[-1]) - 1  # with no more than m tokens there is no sample, and this value is not used
    return torch.minimum(q_BFM[..., last_lead], residual_mass(q_BFM, m))


@dataclass(frozen=True, kw_only=True)
class RheoPolicy:
    """RheoSampling's pool (LAW.md 2.1): m lead tokens, one token from the residual, fill tokens. With top_k = 1 and m = 0 it is a chain
    drawn from the draft's law.

    draft_top: q keeps this many tokens, renormalised (0: all). temperature_B: the rows' temperatures. cycle_B: the rows' cycle counters.
    """

    top_k: int
    m: int
    draft_top: int
    temperature_B: Tensor
    cycle_B: Tensor
    draws: Draws

    def __call__(self, logits_BFV: Tensor, frontier: Frontier) -> Slots:
        logits_BFM, token_BFM = keep_top(logits_BFV, self.draft_top)
        num_kept = logits_BFM.shape[-1]
        q_BFM = softmax_at(logits_BFM, torch.ones_like(logits_BFM[..., 0]))
        num_finite_BF = (logits_BFM > -torch.inf).sum(-1)
        has_sample_BF = num_finite_BF > self.m

        rank_M = torch.arange(num_kept, device=logits_BFV.device)
        residual_logits_BFM = logits_BFM.masked_fill(rank_M < self.m, -torch.inf)
        proposal_BFM = softmax_at(residual_logits_BFM, self.temperature_B.unsqueeze(-1).expand(has_sample_BF.shape))
        sampled_rank_BF = self.draws.categorical(
            proposal_BFM, frontier.active_BF & has_sample_BF, Purpose.DRAFT, self.cycle_B.unsqueeze(-1), frontier.path_BF
        )

        # rank of each slot: 0..m-1, the sampled one, then the ranking from m on without it
        slot_K = torch.arange(self.top_k, device=logits_BFV.device)
        fill_rank_BFK = slot_K - 1 + (slot_K - 1 >= sampled_rank_BF.unsqueeze(-1)).long()
        rank_BFK = torch.where(slot_K < self.m, slot_K, fill_rank_BFK)
        rank_BFK = torch.where(slot_K == self.m, sampled_rank_BF.unsqueeze(-1), rank_BFK)
        holds_BFK = (rank_BFK < num_finite_BF.unsqueeze(-1)) & ((slot_K != self.m) | has_sample_BF.unsqueeze(-1))
        rank_BFK = rank_BFK.clamp(max=num_kept - 1)

        proxy_BF = proxy(q_BFM, self.m)
        if self.m < num_kept:
            floor_BF = q_BFM[..., self.m]
            torch._assert_async((proxy_BF >= floor_BF).all(), "the sampled token's proxy lies below the rank floor")
        value_BFK = torch.where(slot_K == self.m, proxy_BF.unsqueeze(-1), q_BFM.gather(-1, rank_BFK))
        return Slots(
            token_BFK=token_BFM.gather(-1, rank_BFK),
            value_BFK=log_value(value_BFK).masked_fill(~holds_BFK, -torch.inf),
            sampled_BFK=(slot_K == self.m) & has_sample_BF.unsqueeze(-1),
            proposal=Proposal(token=token_BFM, probability=proposal_BFM),
        )


@dataclass(frozen=True, kw_only=True)
class TopKPolicy:
    """EAGLE-2/3's pool: the K most probable tokens of the whole draft vocabulary, all deterministic (LAW.md 1.3)."""

    top_k: int

    def __call__(self, logits_BFV: Tensor, frontier: Frontier) -> Slots:
        logits_BFV = logits_BFV.to(torch.promote_types(logits_BFV.dtype, torch.float32))
        logits_BFK, token_BFK = ranked(logits_BFV, min(self.top_k, logits_BFV.shape[-1]))
        value_BFK = (logits_BFK - logits_BFV.logsumexp(-1, keepdim=True)).clamp_(min=FLOOR)
        return Slots(
            token_BFK=token_BFK,
            value_BFK=value_BFK.masked_fill(logits_BFK == -torch.inf, -torch.inf),
            sampled_BFK=torch.zeros_like(token_BFK, dtype=torch.bool),
        )


@dataclass(frozen=True, kw_only=True)
class CoupledPolicy:
    """Coupled trees (LAW.md section 7): the K tokens likeliest to be the target's own draw y_t, which reads the same noise: that of the
    position their parent fills next.

    A token's value estimates that chance: a softmax over the draft's vocabulary of scale * log q_T + noise_scale * noise. Any value is
    lossless; a calibrated one builds better trees. At T = 0 there is no noise, and the pool is Top-K's.

    position_B: output position of the root's children; target_token_V: target id of each draft id.
    """

    top_k: int
    scale: float
    noise_scale: float
    temperature_B: Tensor
    position_B: Tensor
    target_token_V: Tensor
    num_target_tokens: int
    draws: Draws

    def __call__(self, logits_BFV: Tensor, frontier: Frontier) -> Slots:
        greedy = TopKPolicy(top_k=self.top_k)(logits_BFV, frontier)
        temperature_B11 = self.temperature_B.view(-1, 1, 1).to(greedy.value_BFK.dtype)
        noise_BV = self.draws.noise(self.position_B + frontier.level - 1, self.num_target_tokens)[:, self.target_token_V]
        # log q_T up to a constant of the node, which neither the ranking nor the softmax sees
        scale_B11 = self.scale / torch.where(temperature_B11 > 0, temperature_B11, 1)
        utility_BFV = torch.addcmul(self.noise_scale * noise_BV.unsqueeze(1), logits_BFV, scale_B11)
        utility_BFK, token_BFK = ranked(utility_BFV, greedy.token_BFK.shape[-1])
        value_BFK = (utility_BFK - utility_BFV.logsumexp(-1, keepdim=True)).clamp_(min=FLOOR)
        value_BFK = value_BFK.masked_fill(utility_BFK == -torch.inf, -torch.inf)
        return Slots(
            token_BFK=torch.where(temperature_B11 > 0, token_BFK, greedy.token_BFK),
            value_BFK=torch.where(temperature_B11 > 0, value_BFK, greedy.value_BFK),
            sampled_BFK=greedy.sampled_BFK,
        )
