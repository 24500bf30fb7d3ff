"""Public reports in small figures, computed by hand, through the production functions (FIELD-CASES B1 to B4, B8, B34, B42).

The laws of whole cycles that the bugs of B1 to B3 give are in test_mutants.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from enumeration import Arm, acceptance, constant_model, error_of_arm, law_of_arm, random_model, run_cycle
from test_mutants import mutate
from torch import Tensor

from engine.law import candidates, static, verification
from engine.law.draws import KeyedDraws, Purpose

P, Q = [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.15, 0.05]

#: one drafted token, by every rule that tests it against its q
ONE_SAMPLE = {
    "chain": Arm(method="chain", width=1, size=2),
    "chain, leads first": Arm(method="chain", width=1, size=2, rule="deterministic_first"),
    "static": Arm(method="static", paths=((0,),)),
}


class _EachToken(KeyedDraws):
    """Row r drafts the draft's r-th token, and every coin falls on rejection. Takes down the coins' chances and the residuals."""

    def __init__(self, row_key_B: Tensor):
        super().__init__(row_key_B)
        self.coins: list[Tensor] = []
        self.residuals: list[Tensor] = []

    def bernoulli(self, probability: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        self.coins.append(probability)
        return torch.zeros_like(active)

    def categorical(self, weight: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        if purpose is Purpose.DRAFT:
            return torch.arange(len(active)).view(-1, *[1] * (active.ndim - 1)).expand(active.shape)
        if bool((torch.as_tensor(purpose) == Purpose.RESIDUAL).all()):
            self.residuals.append(weight)
        return super().categorical(weight, active, purpose, *coordinates)


@pytest.mark.parametrize(
    "draft_top, accept, rest",
    [
        (0, [0.8, 1, 1, 1], [0, 0, 1 / 2, 1 / 2]),  # p / q, and (p - q)+ = (0, 0, .05, .05)
        (2, [0.64, 0.8], [0, 0, 2 / 3, 1 / 3]),  # q~ = (.625, .375, 0, 0), and (p - q~)+ = (0, 0, .2, .1)
    ],
)
@pytest.mark.parametrize("arm", ONE_SAMPLE.values(), ids=ONE_SAMPLE)
def test_coins_and_residuals(arm, draft_top, accept, rest):
    """One residual for all drafted tokens: it subtracts the whole of q~, truncated and renormalised, and not the drafted token's share."""
    draws = _EachToken(torch.arange(len(accept)))
    run_cycle(constant_model(P, Q), replace(arm, draft_top=draft_top), draws, torch.zeros(len(accept), dtype=torch.long), 0)
    assert draws.coins[0].tolist() == pytest.approx(accept, abs=1e-12)
    for rest_V in draws.residuals[0]:
        assert (rest_V / rest_V.sum()).tolist() == pytest.approx(rest, abs=1e-12)


def test_the_target_keeps_tokens_that_the_draft_dropped(monkeypatch):
    """Only q is sparse. A residual over the draft's two tokens alone has no mass, and p in its place gives .3 of p too much."""
    model, arm = constant_model(P, Q), replace(ONE_SAMPLE["chain"], draft_top=2)
    assert law_of_arm(model, arm, 1, cycles=1).tolist() == pytest.approx(P, abs=1e-12)
    whole = "(p_BV - q_BV).clamp_(min=0)"
    mutate(monkeypatch, verification, whole, f"{whole} * (q_BV > 0)")
    assert law_of_arm(model, arm, 1, cycles=1).tolist() == pytest.approx([0.52, 0.39, 0.06, 0.03], abs=1e-12)


@pytest.mark.parametrize("p, q, one_hot, sampled", [([0.9, 0.1], [0.6, 0.4], 0.9, 0.7), ([0.6, 0.4], [0.6, 0.4], 0.6, 1.0)], ids=str)
def test_neither_a_drawn_token_nor_the_top_one_is_always_better(p, q, one_hot, sampled):
    """A draft that is right but not sure enough: its top token is accepted with p, a drawn one with the sum of min(p, q)."""
    model = constant_model(p, q)
    assert acceptance(model, Arm(method="topk", top_k=1, width=1, size=2)) == pytest.approx(one_hot, abs=1e-12)
    for arm in ONE_SAMPLE.values():
        assert acceptance(model, arm) == pytest.approx(sampled, abs=1e-12)


# --- half precision ----------------------------------------------------------------------------------------------------------------------

_DRAWN = "proposal_BFM, frontier.active_BF & has_sample_BF"
#: a tree, and where its sampled tokens are drawn: the module, and the law and mask given to the draw
HALF = {
    "chain": (ONE_SAMPLE["chain"], candidates, _DRAWN),
    "m0": (Arm(m=0, size=3), candidates, _DRAWN),
    "m1": (Arm(m=1, size=3), candidates, _DRAWN),
    "static": (Arm(method="static", paths=((0,), (1,))), static, "categorical(law_BFM, is_drawn_BF"),
}


@pytest.mark.parametrize("arm, module, drawn", HALF.values(), ids=HALF)
def test_logits_of_half_precision(monkeypatch, arm, module, drawn):
    """Logits in bf16, near ties among them: one law in fp32 is drawn from and divided by. Drawn in bf16, claimed in fp32 is seen."""
    model = random_model("plain", num_tokens=3, seed=40)
    model = replace(model, draft_SV=(model.draft_SV / 20 + 4).bfloat16())
    assert error_of_arm(model, arm, 3) < 1e-6
    mutate(monkeypatch, module, drawn, drawn.replace(",", ".bfloat16(),", 1))
    assert error_of_arm(model, arm, 3) > 1e-5


# --- nothing left ------------------------------------------------------------------------------------------------------------------------

NOTHING_LEFT = {**ONE_SAMPLE, "m0": Arm(m=0, size=3)}


def test_a_residual_without_mass_is_the_law_itself():
    law_BV = torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.9999999, 1e-7, 0]])
    assert torch.equal(verification.residual(law_BV, law_BV), law_BV)


@pytest.mark.parametrize("arm", NOTHING_LEFT.values(), ids=NOTHING_LEFT)
def test_a_draft_that_is_the_target(monkeypatch, arm):
    """In fp32 a coin of chance 1 - 6e-8 may fall on rejection with nothing left to draw from: 0 / 0 without a rule for it."""
    model = random_model("same", num_tokens=3, seed=41)
    model = replace(model, target_SV=model.target_SV.float(), draft_SV=model.draft_SV.float())
    assert error_of_arm(model, arm, 3) < 1e-6
    mutate(monkeypatch, verification, "torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)", "rest_BV")
    assert math.isnan(error_of_arm(model, arm, 3))
