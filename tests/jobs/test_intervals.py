"""tau with intervals, and gains over the same prompts (FIELD-CASES B7)."""

from __future__ import annotations

import numpy as np
import pytest

from jobs.acceptance.intervals import gain, pooled_tau, tau_table


def sums(rates: np.ndarray, num_cycles: np.ndarray) -> np.ndarray:
    return np.stack([rates * num_cycles, num_cycles], 1)


def test_tau_is_pooled_over_cycles_and_averaged_over_sets():
    sets = {"short": np.array([[4, 1], [0, 3]]), "long": np.array([[300, 100]])}
    assert (pooled_tau(sets["short"]), pooled_tau(sets["long"])) == (2.0, 4.0)
    table = tau_table(sets)
    assert {name: row["tau"] for name, row in table.items()} == {"short": 2.0, "long": 4.0, "mean": 3.0}
    assert table["long"]["interval"] == [4.0, 4.0]  # one prompt, however many cycles: nothing to resample


def test_intervals_resample_prompts():
    """A hundred cycles of a prompt that are all alike say no more than one of them."""
    rates = np.random.default_rng(1).uniform(0, 4, 80)
    few, many = (tau_table({"set": sums(rates, np.full(80, count))})["set"] for count in (1, 100))
    assert few == many
    low, high = many["interval"]
    standard_error = rates.std() / 80**0.5
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)
    assert low < many["tau"] < high


def test_gains_are_paired():
    """Prompts differ far more than methods do: 5% more on each prompt is seen, and the same rows gain nothing."""
    base = sums(np.random.default_rng(2).uniform(0, 8, 60), np.full(60, 10.0))
    better = base.copy()
    better[:, 0] += 0.05 * base.sum(1)
    low, high = gain({"set": better}, {"set": base})["interval"]
    assert 4.5 < low <= high < 5.5
    assert gain({"set": base}, {"set": base}) == {"percent": 0.0, "interval": [0.0, 0.0]}
    alone = tau_table({"set": base})["set"]["interval"]
    assert alone[1] / alone[0] > 1.15
