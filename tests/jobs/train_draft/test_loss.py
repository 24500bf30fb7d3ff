"""The gradient that is computed beside the loss is that of the loss."""

from __future__ import annotations

import pytest
import torch

from jobs.train_draft.loss import DraftLoss, _choose_columns, _compare, _compare_fused
from tests.kernels import needs_kernels

S, B, Q, H, U, V = 2, 5, 3, 8, 12, 20


def draw():
    torch.manual_seed(3)
    output, head = torch.randn(S, B, Q, H), torch.randn(U, H)
    full_head, hidden = torch.randn(V, H), torch.randn(B, Q + S - 1, H)
    log_z = (hidden @ full_head.T).logsumexp(-1)
    exists = torch.rand(B, Q + S - 1) < 0.7
    return output, head, full_head[:U], torch.zeros(U), hidden, log_z, exists, torch.tensor([0.6, 0.4])


def plain_loss(output, head, target_head, _, hidden, log_z, exists, weight, acceptance_share):
    law = ((hidden @ target_head.T) - log_z.unsqueeze(-1)).exp()
    total = 0.0
    for step in range(S):
        p, there = law[:, step : step + Q], exists[:, step : step + Q]
        log_q = (output[step] @ head.T).log_softmax(-1)
        entropy = -(p * log_q).sum(-1)
        accepted = torch.minimum(p, log_q.exp()).sum(-1)
        loss = (1 - acceptance_share) * entropy - acceptance_share * accepted.log()
        total = total + weight[step] * loss[there].mean()
    return total


@pytest.mark.parametrize("acceptance_share", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_autograd(acceptance_share):
    values = draw()
    for value in values[:2]:
        value.requires_grad_()
    expected = plain_loss(*values, acceptance_share)
    gradients = torch.autograd.grad(expected, values[:2])
    loss, _ = DraftLoss.apply(*values, acceptance_share)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, values[:2]), gradients, atol=1e-6, rtol=1e-4)


@needs_kernels
def test_the_fused_comparison_is_the_same_one():
    output, head, target_head, log_share, hidden, log_z, exists, _ = draw()
    values = output[0] @ head.T, (hidden @ target_head.T)[:, :Q], log_z[:, :Q], log_share, exists[:, :Q] / 7, 0.3
    for fused, plain in zip(_compare_fused(*values), _compare(*values), strict=True):
        torch.testing.assert_close(fused, plain)


def test_the_metrics_are_sums_over_the_places_that_exist():
    values = draw()
    output, head, target_head, _, hidden, log_z, exists, _ = values
    _, sums = DraftLoss.apply(*values, 0.0)
    law = ((hidden @ target_head.T) - log_z.unsqueeze(-1)).exp()
    for step in range(S):
        p, there = law[:, step : step + Q], exists[:, step : step + Q]
        q = (output[step] @ head.T).softmax(-1)
        expected = [-(p * q.log()).sum(-1), torch.minimum(p, q).sum(-1), (p.argmax(-1) == q.argmax(-1)).float(), torch.ones(B, Q)]
        torch.testing.assert_close(sums[step], torch.stack([value[there].sum() for value in expected]))


@pytest.mark.parametrize("acceptance_share", [0.0, 1.0])
def test_a_token_that_stands_for_several_counts_as_so_many(acceptance_share):
    output, head, target_head, _, *rest = draw()
    share = torch.ones(U)
    share[-1] = 3
    several = torch.cat([torch.arange(U), torch.tensor([U - 1, U - 1])])
    values = output.requires_grad_(), head, target_head
    loss, sums = DraftLoss.apply(*values, share.log(), *rest, acceptance_share)
    expected, expected_sums = DraftLoss.apply(output, head[several], target_head[several], torch.zeros(U + 2), *rest, acceptance_share)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums[:, [0, 1, 3]], expected_sums[:, [0, 1, 3]])
    torch.testing.assert_close(torch.autograd.grad(loss, output), torch.autograd.grad(expected, output), atol=1e-6, rtol=1e-4)


def test_the_tokens_that_are_looked_at_stand_for_all():
    mass = torch.arange(40.0).flip(0)
    looked_at = []
    for seed in range(400):
        torch.manual_seed(seed)
        column_C, share_C = _choose_columns(mass, 16)
        assert column_C[:12].tolist() == list(range(12))
        assert len(set(column_C.tolist())) == 16
        looked_at.append((mass[column_C] * share_C.exp()).sum())
    assert share_C.exp().sum() == pytest.approx(40)
    assert torch.stack(looked_at).mean() == pytest.approx(mass.sum().item(), rel=0.02)
