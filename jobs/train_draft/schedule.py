"""The learning rate: up, level, and down at the end. A longer run needs no other beginning, so it can go on from a shorter one's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """peak: the level. warmup: steps up to it. decay: share of the steps, the last ones, in which it falls to zero."""

    steps: int
    peak: float
    warmup: int
    decay: float

    @property
    def decay_from(self) -> int:
        return self.steps - round(self.decay * self.steps)

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        up = min(1.0, (step + 1) / (self.warmup + 1))
        down = min(1.0, (self.steps - step) / max(1, self.steps - self.decay_from))
        return self.peak * min(up, down)
