"""Ratios of speeds and their spread. A ratio is taken within one round, in which both cells ran minutes apart: machines drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobs.throughput.cell import Cell
from jobs.throughput.store import Store

_COVERAGE = 0.95


@dataclass(frozen=True)
class Spread:
    """low, high: an interval that holds the median of what was sampled with the probability `coverage`; with few values less than 95%."""

    median: float
    low: float
    high: float
    coverage: float


def spread(values: Sequence[float]) -> Spread:
    """Median and interval by order statistics, which assume nothing of the values' law but that they are independent.

    The k-th smallest and the k-th largest of n values miss the median only where fewer than k of them fall on one side of it: the coverage
    is 1 - 2 P(Binomial(n, 1/2) < k). The largest k with 95% is taken, and k = 1, the extremes, where there is none: n = 5 gives 93.75%.
    """
    ordered = sorted(values)
    n = len(ordered)
    k = max((k for k in range(1, n // 2 + 1) if _coverage(n, k) >= _COVERAGE), default=1)
    return Spread(float(np.median(ordered)), ordered[k - 1], ordered[n - k], _coverage(n, k))


def _coverage(n: int, k: int) -> float:
    return max(0.0, 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)


def ratios(store: Store, cell: Cell, baseline: Cell, repeats: Sequence[int]) -> list[float]:
    """Tokens per second over the baseline's, of the rounds that have both."""
    pairs = ((store.get(cell, repeat), store.get(baseline, repeat)) for repeat in repeats)
    return [ours.rate / theirs.rate for ours, theirs in pairs if ours and theirs]
