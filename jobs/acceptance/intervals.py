"""tau with intervals that resample prompts, not cycles: the cycles of one prompt are alike (DESIGN.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_REPEATS = 4000


def _percentiles(values: np.ndarray) -> list[float]:
    return [round(float(x), 3) for x in np.percentile(values, [2.5, 97.5])]


def pooled_tau(sums: np.ndarray) -> float:
    """sums [prompts, 2]: accepted tokens and cycles of each prompt."""
    accepted, cycles = sums.sum(0)
    return 1 + accepted / cycles


def tau_table(sums: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, dict]:
    """tau of each set, pooled over its cycles, and of their mean, each with a 95% interval over prompts."""
    draws = _resampled(sums, seed)
    table = {name: {"tau": round(float(pooled_tau(of_set)), 3), "interval": _percentiles(draws[name])} for name, of_set in sums.items()}
    mean = np.mean([pooled_tau(of_set) for of_set in sums.values()])
    table["mean"] = {"tau": round(float(mean), 3), "interval": _percentiles(np.mean(list(draws.values()), 0))}
    return table


def gain(sums: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray], seed: int = 0) -> dict:
    """Mean tau over the base's, in percent, with a 95% interval; both are resampled with the same prompts (paired)."""
    ours, theirs = (np.mean(list(_resampled(of_sets, seed).values()), 0) for of_sets in (sums, base))
    point = np.mean([pooled_tau(of_set) for of_set in sums.values()]) / np.mean([pooled_tau(of_set) for of_set in base.values()])
    return {"percent": round(100 * float(point - 1), 1), "interval": [round(x, 1) for x in _percentiles(100 * (ours / theirs - 1))]}


def _resampled(sums: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    draws = {}
    for name, of_set in sums.items():
        index = generator.integers(len(of_set), size=(_REPEATS, len(of_set)))
        totals = of_set[index].sum(1)
        draws[name] = 1 + totals[:, 0] / totals[:, 1]
    return draws
