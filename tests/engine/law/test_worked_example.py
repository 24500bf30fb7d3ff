"""q = (.5, .3, .2), K = 3, m = 1, by name (LAW.md 2.1): the proxy is min(.5, .5) = .5, so x_s ranks second whatever is drawn."""

from __future__ import annotations

import pytest
import torch
from enumeration import Arm, EnumeratedDraws, build_trees, constant_model, error_of_arm

from engine.law import candidates
from engine.law.candidates import Frontier, RheoPolicy, Slots
from engine.law.draws import KeyedDraws

P, Q = (0.25, 0.3, 0.45), (0.5, 0.3, 0.2)


def propose(q: tuple[float, ...], dtype: torch.dtype, num_rows: int = 64) -> Slots:
    zeros_B = torch.zeros(num_rows, dtype=torch.long)
    policy = RheoPolicy(
        top_k=3, m=1, draft_top=0, temperature_B=torch.ones(num_rows), cycle_B=zeros_B, draws=KeyedDraws(torch.arange(num_rows) * 7919)
    )
    frontier = Frontier(level=1, path_BF=zeros_B.unsqueeze(1), active_BF=torch.ones(num_rows, 1, dtype=torch.bool))
    return policy(torch.tensor(q, dtype=dtype).log().expand(num_rows, 1, 3), frontier)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_slots(dtype):
    slots = propose(Q, dtype)
    token_BK, value_BK = slots.token_BFK.squeeze(1), slots.value_BFK.squeeze(1).exp()
    assert slots.sampled_BFK.tolist() == [[[False, True, False]]] * 64
    drew_b = token_BK[:, 1] == 1
    assert 0.4 < drew_b.double().mean() < 0.8  # q~ = (0, .6, .4)
    assert (token_BK == torch.where(drew_b.unsqueeze(1), torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1]))).all()
    expected_BK = torch.where(drew_b.unsqueeze(1), torch.tensor([0.5, 0.5, 0.2]), torch.tensor([0.5, 0.5, 0.3]))
    assert torch.allclose(value_BK, expected_BK.to(dtype), atol=1e-6)
    assert torch.allclose(slots.proposal.probability[:, 0], torch.tensor([0, 0.6, 0.4], dtype=dtype), atol=1e-6)


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_proxy_of_a_half_is_lossless(size):
    assert error_of_arm(constant_model(P, Q), Arm(m=1, size=size), 4) < 1e-12


@pytest.mark.parametrize("size", range(1, 14))
def test_two_levels_are_lossless(size):
    assert error_of_arm(constant_model(P, Q), Arm(m=1, depth=2, size=size), 3) < 1e-12


def test_proxy_of_a_quarter_is_not(monkeypatch):
    """Between q(C) = .2 and q(B) = .3: a drawn B outranks its fill C, a drawn C does not outrank its fill B. At R = 3 only B survives."""
    monkeypatch.setattr(candidates, "proxy", lambda q_BFM, m: torch.full_like(q_BFM[..., 0], 0.25))
    with pytest.raises(RuntimeError, match="rank floor"):
        error_of_arm(constant_model(P, Q), Arm(m=1, size=3), 1)
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    errors = [error_of_arm(constant_model(P, Q), Arm(m=1, size=size), 2) for size in (1, 2, 3, 4)]
    print(f"error {errors[2]:.4f}")
    assert errors[2] > 0.1
    assert max(errors[0], errors[1], errors[3]) < 1e-12  # nothing to choose: never kept, or always


# B45: the proxy equals the lead's value; the lead and the sampled token tie with the fill; everything ties. In each order of ids.
TIES = [(0.4, 0.35, 0.25), (0.35, 0.4, 0.25), (0.25, 0.35, 0.4), (0.4, 0.4, 0.2), (0.2, 0.4, 0.4), (0.25, 0.25, 0.25, 0.25), Q]


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("q", TIES, ids=str)
def test_survival_does_not_depend_on_the_token(q, size):
    model, arm = constant_model((0.1, 0.2, 0.3, 0.4)[: len(q)], q), Arm(m=1, size=size)
    draws = EnumeratedDraws(torch.arange(len(q) - 1).unsqueeze(1) + 1, torch.ones(len(q) - 1, dtype=torch.long))  # each rank but the lead
    zeros_B = torch.zeros(len(q) - 1, dtype=torch.long)
    trees = build_trees(model, arm, arm.policy(draws, zeros_B), zeros_B, zeros_B)
    survives_B = trees.sampled_BR.any(-1)
    drawn = trees.token_BR[trees.sampled_BR]
    assert bool(survives_B.all()) if size >= 3 else not bool(survives_B.any())  # second by slot order, in a tie too
    assert len(drawn.unique()) == len(drawn)  # the worlds did draw different tokens
    assert error_of_arm(model, arm, 3) < 1e-12
