"""What all engines of a job report to: rows in flight, so that a row which kills its engine is found, and counts for the progress.

A row in flight when its engine died is a suspect. Suspects run alone; one that dies alone is condemned, and becomes an error row.
Plain Python: the job makes a Ray actor of it that needs no CPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

Key = tuple[int, int]  # row_index, sample


class Ledger:
    """Args:
    max_idle_deaths: engine deaths in a row, without a row finished between them, after which no engine is started again.
    """

    def __init__(self, max_idle_deaths: int = 6):
        self._max_idle_deaths = max_idle_deaths
        self._idle_deaths = 0
        self._open: dict[str, dict[Key, bool]] = {}
        self._suspects: set[Key] = set()
        self._condemned: set[Key] = set()
        self._errors: set[Key] = set()
        self._failures: list[str] = []
        self._last_failure: dict[str, str] = {}  # of a worker, until it starts again
        self._last_death: str | None = None
        self._engine: dict | None = None
        self._refusal: str | None = None
        self._finished: Counter = Counter()  # of engines that died
        self._current: dict[str, dict] = {}
        self._num_starts = 0
        self._num_ready = 0
        self._num_deaths = 0
        self._ready_at: float | None = None
        self._first_row_at: float | None = None
        self._abandon_at: float | None = None  # on the monotonic clock, once the job is being stopped

    def start(self, worker: str) -> str | None:
        """A worker begins, perhaps again. Rows it left open are judged; returns why it must not start, or None."""
        self._num_starts += 1
        left = self._open.pop(worker, None)
        self._finished.update(self._current.pop(worker, {}))
        if left is not None:
            self._num_deaths += 1
            self._last_death = self._last_failure.pop(worker, "its process ended").strip().splitlines()[-1]
            self._idle_deaths += 1
            for key, alone in left.items():
                (self._condemned if alone else self._suspects).add(key)
                if alone:
                    self._suspects.discard(key)
        self._open[worker] = {}
        if self._idle_deaths >= self._max_idle_deaths:
            return f"engines died {self._idle_deaths} times in a row without finishing a row; the last: {self._last_death}"
        return None

    def ready(self, engine: dict) -> None:
        """An engine is loaded; `engine`: what its options came to."""
        self._engine = engine
        self._num_ready += 1
        self._ready_at = self._ready_at or time.time()

    def stop(self, grace_s: float) -> None:
        """From now on no row is begun; those that still run after so many seconds are to be given up."""
        if self._abandon_at is None:
            self._abandon_at = time.monotonic() + grace_s

    def phase(self) -> Literal["run", "finish", "abandon"]:
        """What the workers are to do: all rows, those that run already, or none any more."""
        if self._abandon_at is None:
            return "run"
        return "finish" if time.monotonic() < self._abandon_at else "abandon"

    def begin(self, worker: str, keys: Sequence[Key]) -> tuple[list[Key], list[Key]] | None:
        """Rows arrive at a worker; returns (suspects to be run alone, condemned), and the others are now open. None: the job stops."""
        if self._abandon_at is not None:
            return None
        suspects = [key for key in keys if key in self._suspects]
        condemned = [key for key in keys if key in self._condemned]
        apart = {*suspects, *condemned}
        self._open[worker].update(dict.fromkeys((key for key in keys if key not in apart), False))
        return suspects, condemned

    def begin_alone(self, worker: str, key: Key) -> bool:
        """A suspect is about to run with nothing beside it; False: the job stops."""
        if self._abandon_at is not None:
            return False
        self._open[worker][key] = True
        return True

    def end(self, worker: str, keys: Sequence[Key]) -> None:
        """Rows are finished: none of them kills engines."""
        for key in keys:
            self._open[worker].pop(key, None)
            self._suspects.discard(key)
        if keys:
            self._idle_deaths = 0

    def fail(self, worker: str, message: str) -> None:
        """An engine failed, and its worker is about to die."""
        self._failures.append(message)
        self._last_failure[worker] = message

    def refuse(self, worker: str, message: str) -> None:
        """An engine cannot be loaded as it was asked to: the user's error, which only the model could show."""
        self._refusal = message

    def count_errors(self, worker: str, keys: Sequence[Key]) -> None:
        """Rows ended as errors without coming to the engine. A row that Ray brings again is counted once."""
        self._errors.update(keys)

    def progress(self, worker: str, totals: dict) -> None:
        self._current[worker] = totals
        if self._first_row_at is None and totals.get("rows"):
            self._first_row_at = time.time()

    def read(self) -> dict:
        """Counts over all engines, when they were ready and had the first row (seconds since 1970), and what went wrong so far."""
        totals = Counter(self._finished)
        for counts in self._current.values():
            totals.update(counts)
        totals.update(rows=len(self._errors), errors=len(self._errors))
        return {
            "engine": self._engine,
            "totals": dict(totals),
            "num_starts": self._num_starts,
            "num_deaths": self._num_deaths,
            "num_ready": self._num_ready,
            "ready_at": self._ready_at,
            "first_row_at": self._first_row_at,
            "last_death": self._last_death,
            "num_condemned": len(self._condemned),
            "refusal": self._refusal,
            "failures": self._failures[-3:],
        }
