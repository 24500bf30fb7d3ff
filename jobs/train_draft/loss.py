"""Soft targets over the draft's vocabulary, and their gradient at the output head, in one pass over the logits.

Shapes: S steps, B texts, Q queries a text, T = Q + S - 1 places, H hidden size, U draft vocabulary, C tokens of it that are looked at.

With z the draft's logits, q = softmax(z), p the target's law on the draft's vocabulary (its sum is below 1), P = sum p and
a = sum min(p, q), the chance that a token drawn from q is accepted:
    cross-entropy   -sum p log q        gradient in z:  P q - p
    acceptance      -log a              gradient in z:  q (sum_{q<p} q - [q<p]) / a

The output head is most of the work, and most of its tokens are unlikely everywhere in a batch. So a step may look at the likeliest and at
a sample of the others, each of which then stands for w tokens: p w in place of p, and z + log w in place of z. Sums over the vocabulary,
and so the loss within rounding of its logarithm, keep their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.native.build import has_kernels
from jobs.train_draft.unroll import Batch, Unroll

METRICS = ("cross_entropy", "acceptance", "top1")
_MASS_STRIDE = 4  # one in so many places tells which tokens are likely in a batch
_ROWS = 128  # of logits at once: what a processor's cache holds


class DraftLoss(torch.autograd.Function):
    """Mean loss over the places that exist, weighted by step."""

    @staticmethod
    def forward(
        ctx,
        output_SBQH: Tensor,
        lm_head_CH: Tensor,
        target_head_CH: Tensor,
        log_share_C: Tensor,
        hidden_BTH: Tensor,
        log_z_BT: Tensor,
        exists_BT: Tensor,
        weight_S: Tensor,
        acceptance_share: float,
    ) -> tuple[Tensor, Tensor]:
        """(loss, sums [S, len(METRICS) + 1] of the metrics and of the places).

        output: as `Unroll.forward` gives it. lm_head, target_head: the rows of both output heads for the tokens that are looked at.
        log_share: log of the number of tokens that each of them stands for.
        hidden, log_z, exists: of a Batch. weight: of each step. acceptance_share: of the second loss, the rest is the first.
        """
        num_steps, num_texts, num_queries, _ = output_SBQH.shape
        dtype = target_head_CH.dtype
        head_CH = lm_head_CH.to(dtype)
        output_SBQH = output_SBQH.to(dtype)
        count_S = torch.stack([exists_BT[:, step : step + num_queries].sum() for step in range(num_steps)]).clamp(min=1)
        gradient_SBQC = output_SBQH.new_zeros(*output_SBQH.shape[:3], len(head_CH))
        sums = output_SBQH.new_zeros(num_steps, len(METRICS) + 1, dtype=torch.float32)
        loss = sums.new_zeros(())
        compare = _choose_compare(target_head_CH)
        texts = max(1, _ROWS // num_queries)
        for start in range(0, num_texts, texts):
            chunk = slice(start, start + texts)
            law_logit_BTC = hidden_BTH[chunk].to(dtype) @ target_head_CH.T
            for step in range(num_steps):
                places = slice(step, step + num_queries)
                exists_BQ = exists_BT[chunk, places]
                gradient_BQC, loss_BQ, *values = compare(
                    output_SBQH[step, chunk] @ head_CH.T,
                    law_logit_BTC[:, places],
                    log_z_BT[chunk, places],
                    log_share_C,
                    weight_S[step] / count_S[step] * exists_BQ,
                    acceptance_share,
                )
                gradient_SBQC[step, chunk] = gradient_BQC
                loss = loss + loss_BQ.sum()
                for column, value_BQ in enumerate(values):
                    sums[step, column] += (value_BQ * exists_BQ).sum()
                sums[step, -1] += exists_BQ.sum()
        ctx.save_for_backward(output_SBQH, head_CH, gradient_SBQC)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx, loss_gradient: Tensor, _) -> tuple[Tensor | None, ...]:
        output_SBQH, head_CH, gradient_SBQC = ctx.saved_tensors
        output_gradient = (gradient_SBQC @ head_CH).float() * loss_gradient
        head_gradient = (gradient_SBQC.flatten(0, 2).T @ output_SBQH.flatten(0, 2)).float() * loss_gradient
        return output_gradient, head_gradient, *[None] * 7


def _compare(
    logit_BQC: Tensor, law_logit_BQC: Tensor, log_z_BQ: Tensor, log_share_C: Tensor, factor_BQ: Tensor, acceptance_share: float
) -> tuple[Tensor, ...]:
    """(gradient of the loss in the draft's logits, loss, each of METRICS), at some places. factor: of their losses."""
    p_BQC = torch.exp(law_logit_BQC.float() - log_z_BQ.unsqueeze(-1) + log_share_C)
    z_BQC = logit_BQC.float() + log_share_C
    log_sum_BQ, mass_BQ = z_BQC.logsumexp(-1), p_BQC.sum(-1)
    entropy_BQ = log_sum_BQ * mass_BQ - (p_BQC * logit_BQC.float()).sum(-1)
    q_BQC = torch.exp(z_BQC - log_sum_BQ.unsqueeze(-1))
    accepted_BQ = torch.minimum(p_BQC, q_BQC).sum(-1)
    is_top_BQ = ((z_BQC == z_BQC.amax(-1, keepdim=True)) & (p_BQC == p_BQC.amax(-1, keepdim=True))).any(-1)
    gradient_BQC = (1 - acceptance_share) * (q_BQC * mass_BQ.unsqueeze(-1) - p_BQC)
    loss_BQ = (1 - acceptance_share) * entropy_BQ
    if acceptance_share:
        below_BQC = q_BQC * (q_BQC < p_BQC)
        accept_BQC = q_BQC * below_BQC.sum(-1, keepdim=True) - below_BQC
        gradient_BQC = gradient_BQC + accept_BQC * (acceptance_share / accepted_BQ).unsqueeze(-1)
        loss_BQ = loss_BQ - acceptance_share * accepted_BQ.log()
    return (gradient_BQC * factor_BQ.unsqueeze(-1)).to(logit_BQC.dtype), loss_BQ * factor_BQ, entropy_BQ, accepted_BQ, is_top_BQ


_compare_fused = torch.compile(_compare)  # a fifth of a training step on a processor is this, one operation after another


def _choose_compare(head_UH: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Fused where a run is meant to be fast and the machine has a compiler."""
    is_fast = head_UH.dtype == torch.bfloat16 and (head_UH.is_cuda or has_kernels(head_UH.device))
    return _compare_fused if is_fast else _compare


class Objective(nn.Module):
    """From a batch to its loss: all that is shared out over workers.

    Args:
        target_head_UH: rows of the target's output head for the draft's vocabulary. columns: tokens that a step looks at; None: all.
        step_weight, acceptance_share: of `TrainSection`.
    """

    def __init__(self, unroll: Unroll, target_head_UH: Tensor, *, columns: int | None, step_weight: float, acceptance_share: float):
        super().__init__()
        self.unroll = unroll
        self._columns = columns
        self._step_weight = step_weight
        self._acceptance_share = acceptance_share
        self.target_head_UH: Tensor
        self.register_buffer("target_head_UH", target_head_UH, persistent=False)

    def forward(self, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
        """(loss, sums) of `DraftLoss`, in the precision of the target's head; over all tokens in eval mode."""
        dtype, device = self.target_head_UH.dtype, self.target_head_UH.device
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            output_SBQH = self.unroll(batch, steps)
        lm_head_CH, target_head_CH = self.unroll.head.lm_head.weight, self.target_head_UH
        log_share_C = batch.log_z_BT.new_zeros(len(target_head_CH))
        if self.training and self._columns is not None and self._columns < len(target_head_CH):
            column_C, log_share_C = _choose_columns(_mass(batch, target_head_CH), self._columns)
            lm_head_CH, target_head_CH = lm_head_CH[column_C], target_head_CH[column_C]
        weight_S = self._step_weight ** torch.arange(steps, device=device)
        laws = batch.hidden_BTH, batch.log_z_BT, batch.exists_BT
        return DraftLoss.apply(
            output_SBQH, lm_head_CH, target_head_CH, log_share_C, *laws, weight_S / weight_S.sum(), self._acceptance_share
        )


def _mass(batch: Batch, target_head_UH: Tensor) -> Tensor:
    """[U]: the target's probability of each token, summed over some places of a batch."""
    mass_U = batch.log_z_BT.new_zeros(len(target_head_UH))
    hidden_NH, log_z_N = (x[batch.exists_BT][::_MASS_STRIDE] for x in (batch.hidden_BTH, batch.log_z_BT))
    for hidden_MH, log_z_M in zip(hidden_NH.split(_ROWS), log_z_N.split(_ROWS), strict=True):
        logit_MU = hidden_MH.to(target_head_UH.dtype) @ target_head_UH.T
        mass_U += torch.exp(logit_MU.float() - log_z_M.unsqueeze(-1)).sum(0)
    return mass_U


def _choose_columns(mass_U: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """(tokens [C], log of what each stands for): three quarters are the likeliest, and the others are drawn from the rest."""
    num_likely = number * 3 // 4
    ranked_U = mass_U.argsort(descending=True)
    rest = len(mass_U) - num_likely
    drawn = ranked_U[num_likely + torch.randperm(rest, device=mass_U.device)[: number - num_likely]]
    share_C = mass_U.new_zeros(number)
    share_C[num_likely:] = math.log(rest / (number - num_likely))
    return torch.cat([ranked_U[:num_likely], drawn]), share_C
