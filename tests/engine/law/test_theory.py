"""Closed forms of one layer (LAW.md 2.4, 3.3, 3.4) against the enumeration of production and against a linear program."""

from __future__ import annotations

import pytest
import torch
from enumeration import Arm, acceptance, constant_model
from scipy.optimize import linprog
from torch import Tensor

from engine.law import theory

V = 6
GRID = [(k, m) for k in (1, 2, 3, 4) for m in range(k)]


def laws(seed: int, m: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(p at T, q at T = 1, q~ at T)"""
    generator = torch.Generator().manual_seed(seed)
    logits_V = 1.3 * torch.randn(V, generator=generator, dtype=torch.float64)
    q_logits_V = logits_V + torch.randn(V, generator=generator, dtype=torch.float64)
    lead = theory.rank(q_logits_V)[:m]
    rest_V = q_logits_V.clone()
    rest_V[lead] = -torch.inf
    return (logits_V / temperature).softmax(0), q_logits_V.softmax(0), (rest_V / temperature).softmax(0)


def optimum(p: Tensor, q: Tensor, k: int, m: int, q_tilde: Tensor) -> float:
    """The most that any coupling of the pool's law with p accepts: max of the mass of (x_s, y) with y in the pool of x_s."""
    order = theory.rank(q).tolist()
    drawn = [x for x in order[m:] if q_tilde[x] > 0]
    gain, constraint, total = [], [], []
    for x in drawn:
        pool = {*order[:m], x, *[y for y in order[m:] if y != x][: k - m - 1]}
        gain += [-1.0 if y in pool else 0.0 for y in range(V)]
    for i, x in enumerate(drawn):
        constraint.append([float(j // V == i) for j in range(len(gain))])
        total.append(float(q_tilde[x]))
    for y in range(V):
        constraint.append([float(j % V == y) for j in range(len(gain))])
        total.append(float(p[y]))
    result = linprog(gain, A_eq=constraint, b_eq=total, bounds=(0, None), options={"primal_feasibility_tolerance": 1e-10})
    assert result.success
    return -result.fun


@pytest.mark.parametrize("temperature", (0.3, 1.0, 1.5))
@pytest.mark.parametrize("k, m", GRID)
def test_closed_forms(k, m, temperature):
    for seed in range(6):
        p, q, q_tilde = laws(seed, m, temperature)
        model = constant_model(p**temperature, q)  # production takes p at T from the logits
        arm = Arm(m=m, top_k=k, size=k + 1, temperature=temperature)
        stochastic = theory.acceptance_stochastic_first(p, q, k, m, q_tilde)
        best = theory.acceptance_optimal_transport(p, q, k, m, q_tilde)
        assert acceptance(model, arm) == pytest.approx(stochastic, abs=1e-12)
        assert optimum(p, q, k, m, q_tilde) == pytest.approx(best, abs=1e-8)
        assert stochastic <= best + 1e-12
        top_k = theory.acceptance_top_k(p, q, k)
        assert acceptance(model, Arm(method="topk", top_k=k, size=k + 1, temperature=temperature)) == pytest.approx(top_k, abs=1e-12)
        if m == k - 1:  # greedy draft sampling, LAW.md 3.4: stochastic-first is optimal
            lead = theory.rank(q)[:m]
            outside = torch.ones(V, dtype=torch.bool).index_fill(0, lead, False)
            greedy = float(p[lead].sum() + torch.minimum(p, q_tilde)[outside].sum())
            assert stochastic == pytest.approx(greedy, abs=1e-12) and best == pytest.approx(greedy, abs=1e-12)


@pytest.mark.parametrize("k, m", GRID)
def test_leads_first_accepts_less(k, m):
    """The paper's ablation. It may win by a hair where stochastic-first is short of the optimum (0 < m < k - 1), never on average."""
    difference = []
    for seed in range(10):
        p, q, q_tilde = laws(seed, m, 1.0)
        arm = Arm(m=m, top_k=k, size=k + 1, rule="deterministic_first")
        leads_first = acceptance(constant_model(p, q), arm)
        assert leads_first <= theory.acceptance_optimal_transport(p, q, k, m, q_tilde) + 1e-12
        difference.append(theory.acceptance_stochastic_first(p, q, k, m, q_tilde) - leads_first)
    if m == 0:
        assert difference == pytest.approx([0.0] * 10, abs=1e-12)
    else:
        assert sum(difference) / 10 > 0.01
    assert min(difference) > -1e-12 or 0 < m < k - 1


def test_the_gap_to_the_optimum_is_seen():
    """alpha_SF < alpha_OT somewhere on the grid, so that a formula that mixes them up would fail."""
    gaps = []
    for k, m in GRID:
        p, q, q_tilde = laws(1, m, 1.0)
        gaps.append(theory.acceptance_optimal_transport(p, q, k, m, q_tilde) - theory.acceptance_stochastic_first(p, q, k, m, q_tilde))
    assert max(gaps) > 1e-3


@pytest.mark.parametrize("m", (0, 1, 3))
def test_residual_law(m):
    _, q, q_tilde = laws(3, m, 1.0)
    assert torch.allclose(theory.residual_law(q, m), q_tilde, atol=1e-15)
    assert theory.acceptance_stochastic_first(q, q, 4, m) == theory.acceptance_stochastic_first(q, q, 4, m, q_tilde)


def test_chain_accepts_one_minus_tv():
    p, q, _ = laws(4, 0, 1.0)
    assert theory.acceptance_stochastic_first(p, q, 1, 0) == pytest.approx(1 - 0.5 * float((p - q).abs().sum()), abs=1e-14)
