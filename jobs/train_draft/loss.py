"""Soft targets over the draft's vocabulary, and their gradient at the output head, in one pass over the logits.

Shapes: S steps, B texts, Q queries a text, T = Q + S - 1 places, H hidden size, U draft vocabulary.

With z the draft's logits, q = softmax(z), p the target's law on the draft's vocabulary (its sum is below 1), P = sum p and
a = sum min(p, q), the chance that a token drawn from q is accepted:
    cross-entropy   -sum p log q        gradient in z:  P q - p
    acceptance      -log a              gradient in z:  q (sum_{q<p} q - [q<p]) / a
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jobs.train_draft.unroll import Batch, Unroll

METRICS = ("cross_entropy", "acceptance", "top1")
_ROWS = 128  # of logits at once: what a processor's cache holds


class DraftLoss(torch.autograd.Function):
    """Mean loss over the places that exist, weighted by step."""

    @staticmethod
    def forward(
        ctx,
        output_SBQH: Tensor,
        lm_head_UH: Tensor,
        target_head_UH: Tensor,
        hidden_BTH: Tensor,
        log_z_BT: Tensor,
        exists_BT: Tensor,
        weight_S: Tensor,
        acceptance_share: float,
    ) -> tuple[Tensor, Tensor]:
        """(loss, sums [S, len(METRICS) + 1] of the metrics and of the places).

        output: as `Unroll.forward` gives it. target_head: rows of the target's output head for the draft's vocabulary.
        hidden, log_z, exists: of a Batch. weight: of each step. acceptance_share: of the second loss, the rest is the first.
        """
        num_steps, num_texts, num_queries, _ = output_SBQH.shape
        dtype = target_head_UH.dtype
        head_UH = lm_head_UH.to(dtype)
        output_SBQH = output_SBQH.to(dtype)
        exists_SBQ = torch.stack([exists_BT[:, step : step + num_queries] for step in range(num_steps)])
        count_S = exists_SBQ.sum((1, 2)).clamp(min=1)
        gradient_SBQU = output_SBQH.new_zeros(*output_SBQH.shape[:3], len(head_UH))
        sums = output_SBQH.new_zeros(num_steps, len(METRICS) + 1, dtype=torch.float32)
        loss = sums.new_zeros(())
        texts = max(1, _ROWS // num_queries)
        for start in range(0, num_texts, texts):
            chunk = slice(start, start + texts)
            law_BTU = torch.exp((hidden_BTH[chunk].to(dtype) @ target_head_UH.T).float() - log_z_BT[chunk].unsqueeze(-1))
            for step in range(num_steps):
                p_BQU = law_BTU[:, step : step + num_queries]
                z_BQU = (output_SBQH[step, chunk] @ head_UH.T).float()
                exists_BQ = exists_SBQ[step, chunk]
                log_sum_BQ = z_BQU.logsumexp(-1)
                mass_BQ = p_BQU.sum(-1)
                entropy_BQ = log_sum_BQ * mass_BQ - (p_BQU * z_BQU).sum(-1)
                is_top_BQ = z_BQU.argmax(-1) == p_BQU.argmax(-1)
                q_BQU = z_BQU.sub_(log_sum_BQ.unsqueeze(-1)).exp_()
                accepted_BQ = torch.minimum(p_BQU, q_BQU).sum(-1)
                for column, value_BQ in enumerate((entropy_BQ, accepted_BQ, is_top_BQ, torch.ones_like(entropy_BQ))):
                    sums[step, column] += (value_BQ * exists_BQ).sum()
                factor_BQ = weight_S[step] / count_S[step] * exists_BQ
                loss_BQ = (1 - acceptance_share) * entropy_BQ - acceptance_share * accepted_BQ.log()
                loss = loss + (loss_BQ * factor_BQ).sum()
                if acceptance_share:
                    below_BQU = q_BQU * (q_BQU < p_BQU)
                    below_sum_BQ1 = below_BQU.sum(-1, keepdim=True)
                    accept_BQU = (q_BQU * below_sum_BQ1 - below_BQU) * (acceptance_share / accepted_BQ).unsqueeze(-1)
                    q_BQU = q_BQU.mul_(mass_BQ.unsqueeze(-1)).sub_(p_BQU).mul_(1 - acceptance_share).add_(accept_BQU)
                else:
                    q_BQU = q_BQU.mul_(mass_BQ.unsqueeze(-1)).sub_(p_BQU)
                gradient_SBQU[step, chunk] = q_BQU.mul_(factor_BQ.unsqueeze(-1)).to(dtype)
        ctx.save_for_backward(output_SBQH, head_UH, gradient_SBQU)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx, loss_gradient: Tensor, _) -> tuple[Tensor | None, ...]:
        output_SBQH, head_UH, gradient_SBQU = ctx.saved_tensors
        output_gradient = (gradient_SBQU @ head_UH).float() * loss_gradient
        head_gradient = (gradient_SBQU.flatten(0, 2).T @ output_SBQH.flatten(0, 2)).float() * loss_gradient
        return output_gradient, head_gradient, *[None] * 6


class Objective(nn.Module):
    """From a batch to its loss: all that is shared out over workers.

    Args:
        target_head_UH: as in `DraftLoss`. step_weight, acceptance_share: of `TrainSection`.
    """

    def __init__(self, unroll: Unroll, target_head_UH: Tensor, *, step_weight: float, acceptance_share: float):
        super().__init__()
        self.unroll = unroll
        self._step_weight = step_weight
        self._acceptance_share = acceptance_share
        self.target_head_UH: Tensor
        self.register_buffer("target_head_UH", target_head_UH, persistent=False)

    def forward(self, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
        """(loss, sums) of `DraftLoss`, in the precision of the target's head."""
        dtype, device = self.target_head_UH.dtype, self.target_head_UH.device
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            output_SBQH = self.unroll(batch, steps)
        weight_S = self._step_weight ** torch.arange(steps, device=device)
        return DraftLoss.apply(
            output_SBQH,
            self.unroll.head.lm_head.weight,
            self.target_head_UH,
            batch.hidden_BTH,
            batch.log_z_BT,
            batch.exists_BT,
            weight_S / weight_S.sum(),
            self._acceptance_share,
        )
