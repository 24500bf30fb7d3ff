"""From logits and parameters to a law. The one function that does it, for target and draft alike (FIELD-CASES B1, B5, B35, B42).

Order on the target (LAW.md 2.3): logit_bias, repetition penalty, masks, then temperature, top_k, top_p, min_p, eta, each on the
renormalised result of the one before, ties by lower id, over the full vocabulary, in fp32 (or float64 when the logits are).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.law.draws import smallest_argmax


def softmax_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / T) over the last dimension; T = 0 is a point mass on the largest logit (the lowest id on a tie).

    `temperature` broadcasts to `logits` without its last dimension. A row of -inf alone, or with +inf or NaN, gives a row of zeros.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.amax(-1, keepdim=True)
    some = largest.isfinite()
    temperature = temperature.to(logits.dtype).unsqueeze(-1)
    # the largest logit becomes 0 before the division, so a temperature near 0 cannot overflow
    scaled = (logits - torch.where(some, largest, 0)) / torch.where(temperature > 0, temperature, 1)
    law = torch.where(some, scaled, 0).softmax(-1) * some
    if bool((temperature > 0).all()):
        return law
    point = torch.zeros_like(law).scatter_(-1, smallest_argmax(logits).unsqueeze(-1), 1) * some
    return torch.where(temperature > 0, law, point)


def normalise(weight: Tensor) -> Tensor:
    """`weight` [..., V] over its sum; all 0 where that is 0."""
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total > 0, total, 1)


def remove(law: Tensor, index: Tensor) -> Tensor:
    """`law` [..., V] without one token, renormalised: what the next draw without replacement is from. All 0 where nothing is left."""
    return normalise(law.scatter(-1, index.unsqueeze(-1), 0))


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Per-row sampling parameters of a batch; a filter that no row uses is None and costs nothing.

    temperature_B, top_k_B (0: off), top_p_B (1: off), min_p_B (0: off), eta_B (0: off).
    """

    temperature_B: Tensor
    top_k_B: Tensor | None = None
    top_p_B: Tensor | None = None
    min_p_B: Tensor | None = None
    eta_B: Tensor | None = None


def process_logits(
    logits_BV: Tensor,
    *,
    bias_BV: Tensor | None = None,
    repetition_penalty_B: Tensor | None = None,
    seen_BV: Tensor | None = None,
    banned_BV: Tensor | None = None,
) -> Tensor:
    """logit_bias, then the repetition penalty on tokens `seen` (Keskar et al. 2019), then the masks of min_tokens."""
    if bias_BV is not None:
        logits_BV = logits_BV + bias_BV
    if repetition_penalty_B is not None:
        penalty_B1 = repetition_penalty_B.to(logits_BV.dtype).unsqueeze(-1)
        penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if banned_BV is not None:
        logits_BV = logits_BV.masked_fill(banned_BV, -torch.inf)
    return logits_BV


def probabilities(logits_BV: Tensor, filters: Filters, softmax: Callable[[Tensor, Tensor], Tensor] = softmax_at) -> Tensor:
    """The target's law p [B, V] from processed logits: temperature, top_k, top_p, min_p, eta. softmax: what `softmax_at` does."""
    p_BV = softmax(logits_BV, filters.temperature_B)
    if filters.top_k_B is not None or filters.top_p_B is not None:
        p_BV = _truncate_tail(p_BV, filters.top_k_B, filters.top_p_B)
    if filters.min_p_B is not None:
        floor_B1 = filters.min_p_B.to(p_BV.dtype).unsqueeze(-1) * p_BV.amax(-1, keepdim=True)
        p_BV = _keep(p_BV, p_BV >= floor_B1)
    if filters.eta_B is not None:
        eta_B1 = filters.eta_B.to(p_BV.dtype).unsqueeze(-1)
        entropy_B1 = torch.special.entr(p_BV).sum(-1, keepdim=True)
        floor_B1 = torch.minimum(eta_B1, eta_B1.sqrt() * torch.exp(-entropy_B1))
        p_BV = _keep(p_BV, p_BV >= torch.minimum(floor_B1, p_BV.amax(-1, keepdim=True)))
    return p_BV


def _keep(p_BV: Tensor, kept_BV: Tensor) -> Tensor:
    """p on what is kept, renormalised; rows that lose nothing stay as they are, to the last bit, whatever their neighbours ask for."""
    rest_BV = p_BV * kept_BV
    return torch.where(kept_BV.all(-1, keepdim=True), p_BV, rest_BV / rest_BV.sum(-1, keepdim=True))


def _truncate_tail(p_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> Tensor:
    """top_k, then top_p on what it leaves.

    top_p keeps the token that crosses: p = (.5, .3, .15, .05) at top_p = .7 has (0, .5, .8, .95) before each token, so two are kept.
    """
    sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)  # stable: ties by lower id
    rank_V = torch.arange(p_BV.shape[-1], device=p_BV.device)
    if top_k_B is not None:
        sorted_BV = _keep(sorted_BV, (rank_V < top_k_B.unsqueeze(-1)) | (top_k_B == 0).unsqueeze(-1))
    if top_p_B is not None:
        before_BV = sorted_BV.double().cumsum(-1) - sorted_BV
        sorted_BV = _keep(sorted_BV, (before_BV < top_p_B.unsqueeze(-1)) | (top_p_B >= 1).unsqueeze(-1))
    return torch.zeros_like(p_BV).scatter_(-1, order_BV, sorted_BV)
