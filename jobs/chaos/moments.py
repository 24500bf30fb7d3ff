"""When, whom and how: the kills of a life, drawn at random."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Literal

#: how a request is cut off on its way to an object store
PHASES = ("dropped", "half", "stored", "late")


@dataclass(frozen=True)
class Trigger:
    """A write of the driver.

    what: `part` is anything in rows/. number: which write of that kind, counted from 1 since the driver was started.
    share: how far into a write on a disk, in typical durations of one.
    phase: of a request to an object store. release: when a late one is let in: just before or after the next one of its name, or by the
    clock, delay_s seconds later.
    """

    what: Literal["part", "run.json"]
    number: int
    share: float = 0.0
    phase: str = "dropped"
    release: Literal["before", "after", "clock"] = "clock"
    delay_s: float = 0.0


@dataclass(frozen=True)
class Moment:
    """at: `start` and `rows` are delay_s seconds after the driver's start and its first part; `whole` is after the last row is there;
    `write` is a trigger's.

    victim: `driver`, its process `group`, or another process (see `jobs.chaos.processes`).
    """

    at: Literal["start", "rows", "whole", "write"]
    victim: str
    signal: signal.Signals
    delay_s: float = 0.0
    trigger: Trigger | None = None

    def describe(self) -> str:
        if self.trigger is None:
            since = {"start": "its start", "rows": "its first part", "whole": "the last row"}[self.at]
            return f"{self.delay_s:.2f} s after {since}"
        return f"at write {self.trigger.number} of a {self.trigger.what}"


class Moments:
    """Draws moments.

    Args:
        others: the victims beside the driver.
        boot_s: how long a start takes until there are rows; the caller keeps it up to date.
    """

    def __init__(self, rng: random.Random, others: tuple[str, ...], boot_s: float):
        self._rng = rng
        self._others = others
        self.boot_s = boot_s

    def draw(self, *, may_kill_engine: bool, more_writes: bool, is_nearly_whole: bool) -> Moment:
        """more_writes: whether too few kills were in the middle of a write so far. is_nearly_whole: few rows are left to do."""
        draw = self._rng.random()
        if is_nearly_whole and draw < 0.6:
            return self._at_the_end()
        draw = self._rng.random()
        if draw < (0.75 if more_writes else 0.5):
            return self._in_a_write("part", self._rng.randint(1, 8))
        draw = self._rng.random()
        if draw < 0.12:
            return self._in_a_write("run.json", 1)
        if draw < 0.52:
            return Moment("start", self._driver(), signal.SIGKILL, self._rng.uniform(0, 1.3 * self.boot_s))
        if draw < 0.64:
            return Moment("rows", self._driver(), signal.SIGKILL, self._rng.uniform(0, 3))
        if draw < 0.80:
            signals = (signal.SIGINT, signal.SIGTERM)
            if self._rng.random() < 0.4:
                return Moment("start", self._driver(), self._rng.choice(signals), self._rng.uniform(0, 1.3 * self.boot_s))
            return Moment("rows", self._driver(), self._rng.choice(signals), self._rng.uniform(0, 3))
        victim = self._rng.choice([victim for victim in self._others if may_kill_engine or victim != "engine"])
        if victim == "reader":  # which is done soon
            return Moment("start", victim, signal.SIGKILL, self._rng.uniform(0.6, 1) * self.boot_s)
        return Moment("rows", victim, signal.SIGKILL, self._rng.uniform(0, 2))

    def after_a_signal(self) -> Moment | None:
        """Perhaps a kill while the driver ends as it was told to."""
        if self._rng.random() < 0.3:
            return Moment("start", self._driver(), signal.SIGKILL, self._rng.uniform(0, 3))
        return None

    def _at_the_end(self) -> Moment:
        if self._rng.random() < 0.3:
            return self._in_a_write("run.json", 2)
        kill = signal.SIGKILL if self._rng.random() < 0.75 else self._rng.choice((signal.SIGINT, signal.SIGTERM))
        return Moment("whole", self._driver(), kill, self._rng.uniform(0, 3))

    def _in_a_write(self, what: str, number: int) -> Moment:
        trigger = Trigger(
            what,
            number,
            share=max(0.0, self._rng.uniform(-0.3, 0.8)),
            phase=self._rng.choice(PHASES),
            release=self._rng.choice(("before", "after", "clock")),
            delay_s=self._rng.uniform(0, 1.6) * self.boot_s,
        )
        return Moment("write", self._driver(), signal.SIGKILL, trigger=trigger)

    def _driver(self) -> str:
        return self._rng.choice(("driver", "driver", "group"))
