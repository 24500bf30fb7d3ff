"""Coupled trees (LAW.md section 7): the text is a function of p and the noise alone, and the noise draws exactly from p."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import pytest
import torch
from enumeration import Arm, TableModel, constant_model, random_model, run_cycle
from scipy.integrate import quad
from torch import Tensor

from engine.drafting import COUPLED_NOISE_SCALE, COUPLED_SCALE
from engine.law.candidates import CoupledPolicy, Frontier, Policy, RheoPolicy, Slots, TopKPolicy
from engine.law.draws import Draws, KeyedDraws
from engine.law.keys import gumbel, row_key, uniform
from engine.law.theory import acceptance_coupled_floor, acceptance_coupled_single

LENGTH = 5  # tokens of each text


class TableNoise(KeyedDraws):
    """Production draws, but the noise of a row comes from a table [B, positions, V]."""

    def __init__(self, noise_BPV: Tensor):
        super().__init__(torch.arange(len(noise_BPV)) * 104729)
        self.noise_BPV = noise_BPV

    def noise(self, position_B: Tensor, num_tokens: int) -> Tensor:
        return self.noise_BPV[torch.arange(len(position_B)), position_B, :num_tokens]


def noise_tables(num_tokens: int) -> Tensor:
    """Few values each, so that all combinations occur at the first position, and exact ties."""
    value_3 = torch.tensor([-0.7, 0.4, 2.5], dtype=torch.float64)
    first = torch.cartesian_prod(*[value_3] * num_tokens).repeat(4, 1)
    index = torch.randint(3, (len(first), 2 * LENGTH + 2, num_tokens), generator=torch.Generator().manual_seed(1))
    return torch.cat([first.unsqueeze(1), value_3[index]], 1)


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Candidate sets that look at the noise of the target's own draw: its likely winners, or its losers. Scores too depend on it."""

    model: TableModel
    noise_BPV: Tensor
    position_B: Tensor
    likes_winners: bool

    def __call__(self, logits_BFV: Tensor, frontier: Frontier) -> Slots:
        noise_BV = self.noise_BPV[torch.arange(len(self.position_B)), self.position_B + frontier.level - 1]
        liking_BFV = noise_BV[:, self.model.target_token_V].unsqueeze(1) + 0.1 * logits_BFV
        token_BFK = liking_BFV.topk(2, largest=self.likes_winners).indices
        value_BFK = -liking_BFV.gather(-1, token_BFK).abs() - 0.01
        return Slots(token_BFK=token_BFK, value_BFK=value_BFK, sampled_BFK=torch.zeros_like(token_BFK, dtype=torch.bool))


def policies(model: TableModel, temperature: float, draws: TableNoise, cycle_B: Tensor, position_B: Tensor) -> dict[str, Policy | None]:
    temperature_B = torch.full(cycle_B.shape, temperature, dtype=torch.float64)
    rheo = {"draft_top": 0, "temperature_B": temperature_B, "cycle_B": cycle_B, "draws": draws}
    coupled = {"temperature_B": temperature_B, "position_B": position_B, "target_token_V": model.target_token_V}
    adversary = {"model": model, "noise_BPV": draws.noise_BPV, "position_B": position_B}
    return {
        "coupled": CoupledPolicy(
            top_k=3, scale=COUPLED_SCALE, noise_scale=COUPLED_NOISE_SCALE, num_target_tokens=model.num_tokens, draws=draws, **coupled
        ),
        "coupled, one candidate": CoupledPolicy(
            top_k=1, scale=2.0, noise_scale=0.5, num_target_tokens=model.num_tokens, draws=draws, **coupled
        ),
        "topk": TopKPolicy(top_k=2),
        "rheo": RheoPolicy(top_k=3, m=1, **rheo),
        "chain": RheoPolicy(top_k=1, m=0, **rheo),
        "friend": Adversary(likes_winners=True, **adversary),
        "foe": Adversary(likes_winners=False, **adversary),
    }


PolicyOf = Callable[[Tensor, Tensor], Policy | None]


def generate(model: TableModel, arm: Arm, draws: Draws, policy: PolicyOf, num_rows: int) -> tuple[Tensor, float]:
    """(the first LENGTH tokens of each row, tokens a cycle). Rows of different lengths go on in one batch."""
    text_B = torch.zeros(num_rows, dtype=torch.long)
    num_cycles = 0
    for cycle in range(LENGTH):
        ended_B = text_B >= model.first_text(LENGTH)
        if bool(ended_B.all()):
            break
        num_cycles += int((~ended_B).sum())
        next_B = run_cycle(model, arm, draws, text_B, cycle, policy(torch.full_like(text_B, cycle), model.length(text_B)))
        text_B = torch.where(ended_B, text_B, next_B)
    num_tokens = int(model.length(text_B).sum())
    while bool((too_long_B := text_B >= model.first_text(LENGTH + 1)).any()):
        text_B = torch.where(too_long_B, (text_B - 1) // model.num_tokens, text_B)
    return text_B, num_tokens / num_cycles


@pytest.mark.parametrize("temperature", (0.3, 1.0, 1.5, 0.0))
@pytest.mark.parametrize("kind", ("plain", "ties", "near_empty", "holes", "missing", "truncated", "overflow"))
def test_every_tree_emits_what_off_emits(kind, temperature):
    model = random_model(kind, num_tokens=4, seed=1)
    draws = TableNoise(noise_tables(model.num_tokens))
    num_rows = len(draws.noise_BPV)
    expected_B, _ = generate(model, Arm(method="off", temperature=temperature), draws, lambda *_: None, num_rows)
    assert len(expected_B.unique()) > (5 if temperature else 0)
    rate = {}
    for name in policies(model, temperature, draws, torch.zeros(1), torch.zeros(1)):
        for size in (6, lambda pool, *_: 1 + (pool.score_BP.exp().sum(-1) * 5).long() % 9):  # the last reads this cycle's scores
            arm = Arm(method="coupled", depth=3, width=2, size=size, temperature=temperature)

            def policy(cycle_B: Tensor, position_B: Tensor, name: str = name) -> Policy | None:
                return policies(model, temperature, draws, cycle_B, position_B)[name]

            text_B, rate[name] = generate(model, arm, draws, policy, num_rows)
            assert torch.equal(text_B, expected_B), (name, size)
    assert max(rate.values()) > 1.2  # the trees were used


def test_keyed_noise_gives_the_same_text():
    """The same with production's keyed noise: one seed, one text, whatever the method."""
    model = random_model("plain", num_tokens=5, seed=2)
    draws = KeyedDraws(torch.tensor([row_key(0, str(row), 0) for row in range(2000)]))
    expected_B, _ = generate(model, Arm(method="off"), draws, lambda *_: None, 2000)
    for top_k in (1, 3):

        def policy(cycle_B: Tensor, position_B: Tensor, top_k: int = top_k) -> Policy:
            return CoupledPolicy(
                top_k=top_k,
                scale=COUPLED_SCALE,
                noise_scale=COUPLED_NOISE_SCALE,
                temperature_B=torch.ones(2000),
                position_B=position_B,
                target_token_V=model.target_token_V,
                num_target_tokens=5,
                draws=draws,
            )

        text_B, rate = generate(model, Arm(method="coupled", depth=3, size=8), draws, policy, 2000)
        assert torch.equal(text_B, expected_B)
        assert rate > 1.5


def test_token_is_the_argmax_and_has_probability():
    generator = torch.Generator().manual_seed(3)
    p_BV = torch.rand(5000, 7, generator=generator, dtype=torch.float64) * (torch.rand(5000, 7, generator=generator) < 0.5)
    p_BV[:, 3] += 0.01
    noise_BPV = torch.randn(5000, 1, 7, generator=generator, dtype=torch.float64)
    zeros_B = torch.zeros(5000, dtype=torch.long)
    token_B = TableNoise(noise_BPV).token(p_BV, zeros_B.bool(), zeros_B)
    assert torch.equal(token_B, (p_BV.log() + noise_BPV[:, 0]).argmax(-1))
    assert bool((p_BV.gather(1, token_B.unsqueeze(1)) > 0).all())
    # a tie goes to the lowest id
    even = torch.full((1, 4), 0.25)
    assert TableNoise(torch.zeros(1, 1, 4)).token(even, torch.ones(1).bool(), zeros_B[:1]).item() == 0


def win_both(p: Tensor, q: Tensor, x: int) -> float:
    """The chance that x is the argmax both of log p + g and of log q + g: the integral of the density of g_x times the chance that every
    other g_y lies below both bounds."""
    bounds = [min(math.log(p[x] / p[y]), math.log(q[x] / q[y])) for y in range(len(p)) if y != x]
    value, _ = quad(lambda g: math.exp(-g - math.exp(-g) - sum(math.exp(-g - bound) for bound in bounds)), -5, 45, epsabs=1e-14, limit=400)
    return value


def law(seed: int, num_tokens: int, spread: float = 1.5) -> Tensor:
    return (spread * torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(0)


@pytest.mark.parametrize("seed", range(8))
def test_gumbel_max_is_p_by_quadrature(seed):
    """P(argmax = x) = integral of the density of g_x times the chance that every other log p + g lies below."""
    p = law(seed, 6)

    assert [win_both(p, p, x) for x in range(6)] == pytest.approx(p.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_one_candidate_by_quadrature(seed):
    p, q = law(seed, 6), law(seed + 100, 6)
    exact = sum(win_both(p, q, x) for x in range(6))
    assert abs(acceptance_coupled_single(p, q) - exact) < 1e-12


def test_one_candidate_with_disjoint_tails():
    p, q = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    # x = 0 wins both iff E_0 < E_1 * 7/3 and E_0 < E_2: rate 3/7 + 1
    assert abs(acceptance_coupled_single(p, q) - 1 / (1 + 3 / 7 + 1)) < 1e-12


def test_one_candidate_through_production():
    """400,000 rows through policy and verification: five standard errors, which are 0.0008 each."""
    num_rows, p, q = 400_000, law(5, 6, 1.0), law(6, 6, 1.0)
    model, draws = constant_model(p, q), KeyedDraws(torch.arange(num_rows))
    zeros_B = torch.zeros(num_rows, dtype=torch.long)
    policy = CoupledPolicy(
        top_k=1,
        scale=1.0,
        noise_scale=1.0,
        temperature_B=torch.ones(num_rows),
        position_B=zeros_B,
        target_token_V=torch.arange(6),
        num_target_tokens=6,
        draws=draws,
    )
    text_B = run_cycle(model, Arm(method="coupled", depth=1, size=2), draws, zeros_B, 0, policy)
    accepted = float((model.length(text_B) == 2).double().mean())
    expected = acceptance_coupled_single(p, q)
    assert abs(accepted - expected) < 5 * math.sqrt(expected * (1 - expected) / num_rows)
    first_B = torch.where(model.length(text_B) == 2, (text_B - 1) // 6, text_B) - 1
    frequency = torch.bincount(first_B, minlength=6) / num_rows
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / num_rows).sqrt()).all()


@pytest.mark.parametrize("seed", range(50))
def test_floor(seed):
    p, q = law(seed, 5, 0.2 + seed / 20), law(seed + 1000, 5, 0.2 + seed / 20)
    distance = 0.5 * float((p - q).abs().sum())
    single = acceptance_coupled_single(p, q)
    assert acceptance_coupled_floor(p, q) - 1e-12 <= single <= 1 - distance + 1e-12
    assert acceptance_coupled_floor(p, q) == pytest.approx((1 - distance) / (1 + distance), abs=1e-14)
    assert acceptance_coupled_single(p, p) == pytest.approx(1, abs=1e-12)


def test_greedy_pool_is_top_k():
    model = random_model("ties", num_tokens=6, seed=7)
    draws = TableNoise(torch.randn(40, 1, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64))
    zeros_B = torch.zeros(40, dtype=torch.long)
    logits_BFV = model.draft_logits(torch.arange(80).view(40, 2))
    frontier = Frontier(level=1, path_BF=zeros_B.unsqueeze(1).expand(40, 2), active_BF=torch.ones(40, 2, dtype=torch.bool))
    policy = policies(model, 0.0, draws, zeros_B, zeros_B)["coupled"]
    greedy, top = policy(logits_BFV, frontier), TopKPolicy(top_k=3)(logits_BFV, frontier)
    assert torch.equal(greedy.token_BFK, top.token_BFK)
    assert torch.equal(greedy.value_BFK, top.value_BFK)


# --- resolution of production's noise: counts over its grid of 2^52 cells, no sampling -------------------------------------------------


def cells_above(threshold: Tensor) -> Tensor:
    """How many of the 2^52 cells give gumbel() > threshold: the noise falls along the grid, so bisection counts them."""
    low, high = torch.zeros(threshold.shape, dtype=torch.long), torch.full(threshold.shape, 2**52)
    for _ in range(53):
        middle = (low + high) // 2
        above = (gumbel(middle << 12).double() > threshold) & (middle < 2**52)
        low, high = torch.where(above & (low < high), middle + 1, low), torch.where(above, high, middle)
    return low


def test_noise_has_gumbels_tail():
    threshold = torch.linspace(-2, 23, 129, dtype=torch.float64)  # to a chance of 1e-10; beyond, the grid itself has few cells
    exact = -torch.expm1(-torch.exp(-threshold))
    tail = cells_above(threshold).double() * 2.0**-52
    assert ((tail / exact - 1).abs() < 3e-6).all()


@pytest.mark.parametrize("p", (1e-3, 1e-8, 1e-10))
def test_rare_token_is_drawn_at_its_rate(p):
    """Against one competitor of probability 1 - p, whose exponential is integrated over by Gauss-Laguerre, exact tail counts inside."""
    node, weight = (torch.from_numpy(x) for x in numpy.polynomial.laguerre.laggauss(40))
    tail = cells_above(-node.log() + math.log((1 - p) / p)).double() * 2.0**-52
    assert abs(float((weight * tail).sum()) / p - 1) < 1e-5


def test_top_tokens_do_not_tie():
    """How much of the tail above a value is that value itself: the chance that the runner-up has the same noise as the winner."""
    value = gumbel((2.0 ** torch.linspace(20, 51, 200, dtype=torch.float64)).long() << 12)
    above = cells_above(value.double())
    same = cells_above(torch.nextafter(value, value.new_tensor(-math.inf)).double()) - above
    assert float((same / (above + same)).max()) < 1e-5  # 0.3% on a 24-bit grid with 49k tokens
    assert int(same.min()) >= 1  # the values are the grid's own


def test_ends_of_the_grid_are_finite():
    ends = torch.tensor([0, 2**52 - 1]) << 12
    assert torch.isfinite(gumbel(ends)).all()
    assert float(uniform(ends)[0]) > 0 and float(uniform(ends)[1]) < 1
