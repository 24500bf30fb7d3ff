"""The one door for randomness. Every draw of a draft, an accept coin, a residual, a bonus or coupled noise goes through `Draws`.

The engine uses `KeyedDraws`. The exact-enumeration tests use another implementation, which visits every outcome with its probability and
so drives the production code; a verifier written a second time for a test would prove nothing (LAW.md section 5).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from engine.law.keys import fold, gumbel, uniform


class Purpose(IntEnum):
    """What a draw is for: the first coordinate of its key, so that no two uses share randomness (FIELD-CASES B33)."""

    DRAFT = 0  # coordinates: cycle, path of the node whose child is drawn, and the child's rank where a node has several
    ACCEPT = 1  # coordinate, here and below: output position; and the trial's rank where a node has several
    RESIDUAL = 2
    BONUS = 3
    LEAD = 4
    NOISE = 5


_CACHED_INTEGERS = 2**16


class Draws(Protocol):
    """Draws for a batch of B rows. `active` marks the places that really consume their key; elsewhere the answer means nothing."""

    def categorical(self, weight: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        """An index of the last dimension of `weight` [B, ..., V] (>= 0, not all 0), with probability proportional to it: [B, ...].

        `purpose` and `coordinates` are integers, or int64 tensors that broadcast to [B, ...].
        """
        ...

    def bernoulli(self, probability: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        """True with `probability` [B, ...]."""
        ...

    def noise(self, position_B: Tensor, num_tokens: int) -> Tensor:
        """Coupled Gumbel noise [B, num_tokens] of an output position: read by draft and target alike, and for nothing else."""
        ...

    def token(self, p_BV: Tensor, active_B: Tensor, position_B: Tensor) -> Tensor:
        """y_t for the methods that draw with coupled noise: argmax of log p + noise, an exact draw from p (LAW.md section 7)."""
        ...


def smallest_argmax(x: Tensor) -> Tensor:
    """Index of the maximum of the last dimension, the smallest one on a tie (torch.argmax promises none); with NaN it means nothing."""
    index = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), index, x.shape[-1] - 1).amin(-1)


class KeyedDraws:
    """Draws keyed by (row key, purpose, coordinates).

    Args:
        row_key_B: int64 keys of the rows, from `engine.law.keys.row_key`.
    """

    def __init__(self, row_key_B: Tensor):
        self._row_key_B = row_key_B

    def key(self, ndim: int, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        key = self._row_key_B.view(-1, *[1] * (ndim - 1))
        for coordinate in (purpose, *coordinates):
            key = fold(key, coordinate)
        return key

    def categorical(self, weight: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        # inverse of the distribution function in float64: with 2^52 cells a token of fp32 probability keeps its own rate
        cumulative = weight.double().cumsum(-1)
        u = uniform(self.key(active.ndim, purpose, *coordinates)).expand(active.shape)
        threshold = (u * cumulative[..., -1]).unsqueeze(-1)
        index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        return index.clamp_(max=weight.shape[-1] - 1)  # only where not active, or where all weights are 0

    def bernoulli(self, probability: Tensor, active: Tensor, purpose: Tensor | int, *coordinates: Tensor) -> Tensor:
        return uniform(self.key(active.ndim, purpose, *coordinates)) < probability

    def noise(self, position_B: Tensor, num_tokens: int) -> Tensor:
        key_B1 = self.key(1, Purpose.NOISE, position_B).unsqueeze(1)
        token_V = torch.arange(num_tokens, device=key_B1.device)
        if key_B1.device.type == "cpu":
            # a part's integers stay in the processor's cache, which is twice as fast as all rows at once
            num_rows = max(1, _CACHED_INTEGERS // num_tokens)
            return torch.cat([gumbel(fold(key_R1, token_V)) for key_R1 in key_B1.split(num_rows)])
        return gumbel(fold(key_B1, token_V))

    def token(self, p_BV: Tensor, active_B: Tensor, position_B: Tensor) -> Tensor:
        return smallest_argmax(p_BV.log() + self.noise(position_B, p_BV.shape[-1]))
