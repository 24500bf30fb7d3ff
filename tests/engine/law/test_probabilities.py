"""From logits to a law: order of the filters, ties, the ends of the temperature range, precision (LAW.md 2.3)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.law.probabilities import Filters, probabilities, process_logits, softmax_at

P = (0.5, 0.3, 0.15, 0.05)


def law(p: tuple[float, ...] = P, temperature: float = 1.0, dtype: torch.dtype = torch.float64, **filters: float) -> list[float]:
    """The law of one row whose logits are log p."""
    values = {f"{name}_B": torch.tensor([value]) for name, value in filters.items()}
    logits_BV = torch.tensor([p], dtype=torch.float64).log().to(dtype)
    return probabilities(logits_BV, Filters(temperature_B=torch.tensor([temperature], dtype=torch.float64), **values))[0].tolist()


def normalised(*weight: float) -> object:
    return pytest.approx([w / sum(weight) for w in weight], abs=1e-12)


@pytest.mark.parametrize("temperature", (0.3, 0.7, 1.0, 1.5))
def test_temperature(temperature):
    assert law(temperature=temperature) == normalised(*[p ** (1 / temperature) for p in P])


def test_temperature_zero_is_the_argmax_with_the_lowest_id():
    assert law((0.1, 0.35, 0.35, 0.2), temperature=0.0) == [0, 1, 0, 0]
    assert law((0.35, 0.1, 0.35, 0.2), temperature=0.0, top_p=0.1, min_p=0.9, eta=0.5, top_k=3) == [1, 0, 0, 0]


@pytest.mark.parametrize("temperature", (1e-6, 1e-20, 1e-38))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_tiny_temperature(temperature, dtype):
    """Large logits, a temperature near 0: no overflow, and a tie stays a tie."""
    logits = torch.tensor([[300.0, -2e4, 299.0, 300.0, -torch.inf]], dtype=dtype)
    assert softmax_at(logits, torch.tensor([temperature]))[0].tolist() == [0.5, 0, 0, 0.5, 0]


def test_rows_of_a_batch_keep_their_own_temperature():
    logits_BV = torch.tensor([P] * 3, dtype=torch.float64).log()
    together = softmax_at(logits_BV, torch.tensor([0.5, 0.0, 1.5], dtype=torch.float64))
    for row, temperature in enumerate((0.5, 0.0, 1.5)):
        assert together[row].tolist() == pytest.approx(law(temperature=temperature), abs=1e-15)


@pytest.mark.parametrize("largest", (-torch.inf, torch.inf, torch.nan))
def test_logits_without_a_law_give_no_mass(largest):
    logits = torch.tensor([[largest, -torch.inf, -torch.inf], [largest] * 3]).repeat_interleave(2, 0)
    assert softmax_at(logits, torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == [[0, 0, 0]] * 4


@pytest.mark.parametrize("top_k, kept", [(0, 4), (1, 1), (2, 2), (4, 4), (9, 4)])
def test_top_k(top_k, kept):
    assert law(top_k=top_k) == normalised(*P[:kept], *[0] * (4 - kept))


def test_top_k_ties_by_lower_id():
    assert law((0.2, 0.3, 0.2, 0.3), top_k=3) == normalised(0.2, 0.3, 0, 0.3)
    assert law((0.25, 0.25, 0.25, 0.25), top_k=2) == normalised(1, 1, 0, 0)
    assert law((1e-3, 3e-3) * 500, top_k=3) == normalised(*[0, 1] * 3, *[0] * 994)  # so many that an unstable sort mixes them


@pytest.mark.parametrize("top_p, kept", [(0.3, 1), (0.49, 1), (0.51, 2), (0.7, 2), (0.81, 3), (0.96, 4), (1.0, 4), (1e-6, 1)])
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    """Before each token lies (0, .5, .8, .95)."""
    assert law(top_p=top_p) == normalised(*P[:kept], *[0] * (4 - kept))


def test_top_p_ties_by_lower_id():
    assert law((0.25, 0.25, 0.25, 0.25), top_p=0.6) == normalised(1, 1, 1, 0)


@pytest.mark.parametrize("min_p, kept", [(0.0, 4), (0.099, 4), (0.11, 3), (0.31, 2), (0.61, 1), (1.0, 1)])
def test_min_p(min_p, kept):
    assert law(min_p=min_p) == normalised(*P[:kept], *[0] * (4 - kept))


def test_min_p_keeps_all_of_the_largest():
    assert law((0.4, 0.4, 0.2), min_p=1.0) == normalised(1, 1, 0)


@pytest.mark.parametrize("eta", (0.0, 1e-4, 0.02, 0.1, 0.3, 0.9))
def test_eta(eta):
    """Kept: p >= min(eta, sqrt(eta) exp(-H)), and the largest at any rate."""
    entropy = -sum(p * math.log(p) for p in P)
    floor = min(min(eta, math.sqrt(eta) * math.exp(-entropy)), max(P))
    assert law(eta=eta) == normalised(*[p if p >= floor else 0 for p in P])


def test_eta_uses_delta_sqrt_eps():
    """About flat over 20: exp(-H) = .05, so at eps = .25 the floor is .5 * .05 = .025. With delta = 1 it would be .05."""
    assert law((0.0502, 0.0498) * 10, eta=0.25) == normalised(*(0.0502, 0.0498) * 10)
    assert law((0.98 / 19,) * 19 + (0.02,), eta=0.25) == normalised(*[1] * 19, 0)


@pytest.mark.parametrize("num_tokens", range(2, 60))
def test_eta_never_drops_all(num_tokens):
    """On a flat law the floor at eps = 1 is the law itself, and rounding may put it above."""
    filters = Filters(temperature_B=torch.ones(1), eta_B=torch.ones(1))
    assert float(probabilities(torch.zeros(1, num_tokens), filters).sum()) == pytest.approx(1)


def test_order_top_k_before_top_p():
    """top_p acts on what top_k leaves, renormalised: (.625, .375) at .6 keeps one; on the whole law .6 would keep two."""
    assert law(top_k=2, top_p=0.6) == normalised(1, 0, 0, 0)
    assert law(top_p=0.6) == normalised(0.5, 0.3, 0, 0)


def test_order_temperature_before_top_p():
    """At T = 2 the law is flatter, and .7 keeps three."""
    flat = [math.sqrt(p) for p in P]
    assert law(temperature=2.0, top_p=0.7) == normalised(*flat[:3], 0)


def test_order_top_p_before_eta():
    """top_p = .7 leaves (.625, .375): H = .66, and eta = .8 has the floor min(.8, .89 * .516 = .46). The whole law's, .89 * .32 = .29,
    would keep the second."""
    assert law(eta=0.8) == normalised(0.5, 0.3, 0, 0)
    assert law(eta=0.8, top_p=0.7) == normalised(1, 0, 0, 0)


def test_order_min_p_before_eta():
    assert law(eta=0.8, min_p=0.55) == normalised(1, 0, 0, 0)


def test_filters_are_per_row():
    logits_BV = torch.tensor([P] * 4, dtype=torch.float64).log()
    filters = Filters(
        temperature_B=torch.ones(4),
        top_k_B=torch.tensor([0, 2, 0, 0]),
        top_p_B=torch.tensor([1.0, 1.0, 0.3, 1.0]),
        min_p_B=torch.tensor([0.0, 0.0, 0.0, 0.31]),
        eta_B=torch.tensor([0.8, 0.0, 0.0, 0.0]),
    )
    assert probabilities(logits_BV, filters).tolist() == [
        pytest.approx(row, abs=1e-12) for row in (law(eta=0.8), law(top_k=2), law(top_p=0.3), law(min_p=0.31))
    ]


FILTERS = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"eta": 0.01}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "eta": 0.001}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_single_precision_agrees_with_double(filters):
    logits_BV = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()

    def laws(dtype: torch.dtype) -> Tensor:
        values = {f"{name}_B": torch.full((50,), value) for name, value in filters.items()}
        return probabilities(logits_BV.to(dtype), Filters(temperature_B=torch.full((50,), 0.8), **values))

    single, double = laws(torch.float32), laws(torch.float64)
    assert single.dtype == torch.float32
    assert torch.equal(single > 0, double > 0)
    assert float((single - double).abs().max()) < 2e-6
    assert float((single.sum(-1) - 1).abs().max()) < 1e-6
    half = probabilities(logits_BV.bfloat16(), Filters(temperature_B=torch.ones(50)))
    assert half.dtype == torch.float32  # half-precision logits, fp32 laws


# --- processors of logits --------------------------------------------------------------------------------------------------------------


def test_repetition_penalty_lowers_what_was_seen():
    logits_BV = torch.tensor([[2.0, -2.0, 1.0, 0.0], [2.0, -2.0, 1.0, 0.0]])
    seen_BV = torch.tensor([[True, True, False, True]] * 2)
    processed = process_logits(logits_BV, repetition_penalty_B=torch.tensor([2.0, 1.0]), seen_BV=seen_BV)
    assert processed.tolist() == [[1, -4, 1, 0], [2, -2, 1, 0]]


def test_bias_comes_before_the_penalty_and_masks_last():
    logits_BV = torch.tensor([[-1.0, 1.0, 0.5]])
    processed = process_logits(
        logits_BV,
        bias_BV=torch.tensor([[3.0, 0.0, 100.0]]),
        repetition_penalty_B=torch.tensor([2.0]),
        seen_BV=torch.tensor([[True, False, False]]),
        banned_BV=torch.tensor([[False, False, True]]),
    )
    assert processed.tolist() == [[1, 1, -math.inf]]  # (-1 + 3) / 2; penalty first would give -2 + 3
    assert probabilities(processed, Filters(temperature_B=torch.ones(1))).tolist() == [[0.5, 0.5, 0]]


def test_banned_token_stays_out_at_any_temperature():
    logits_BV = torch.tensor([[5.0, 1.0, 1.0]] * 2)
    processed = process_logits(logits_BV, banned_BV=torch.tensor([[True, False, False]] * 2))
    assert probabilities(processed, Filters(temperature_B=torch.tensor([0.0, 1.0]))).tolist() == [[0, 1, 0], [0, 0.5, 0.5]]


def test_no_processor_changes_nothing():
    logits_BV = torch.randn(3, 5)
    assert process_logits(logits_BV) is logits_BV
