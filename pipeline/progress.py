"""Live progress: one bar on a terminal, a plain line every few seconds elsewhere. Both on stderr."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.notes import tell
from pipeline.wording import format_seconds

_POLL_S = 0.5
_LINE_S = 5.0
_JOIN_S = 2.0  # a ledger that is gone with its node must not hold up a stop


class ProgressView:
    """Polls the ledger in a thread of its own until closed.

    Args:
        read: gives the ledger's counts, or None while there is none.
        num_rows: rows that the job will have.
        num_done: of those, what an earlier run has committed.
    """

    def __init__(self, read: Callable[[], dict | None], num_rows: int, num_done: int = 0):
        self._read = read
        self._num_rows = num_rows
        self._num_done = num_done
        self._closed = threading.Event()
        self._shown_deaths = 0
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> ProgressView:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._closed.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        console = Console(file=sys.stderr)
        if console.is_terminal:
            self._run_bar(console)
        else:
            self._run_lines()

    def _run_bar(self, console: Console) -> None:
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=self._num_rows)
            show = functools.partial(bar.console.print, markup=False, highlight=False)  # a reason may hold brackets
            while not self._closed.wait(_POLL_S):
                state = self._read()
                if state is not None:
                    self._warn(state, show)
                    done = _count_rows(state, self._num_rows, self._num_done)
                    bar.update(task, completed=done, description=self._describe(state))

    def _run_lines(self) -> None:
        told_at, last = 0.0, ""
        while not self._closed.wait(_POLL_S):
            state = self._read()
            if state is None:
                continue
            self._warn(state, tell)
            line = self._describe(state)
            if time.monotonic() - told_at >= _LINE_S and line != last:
                tell(line)
                told_at, last = time.monotonic(), line

    def _describe(self, state: dict) -> str:
        return describe(state, self._num_rows, time.time(), num_done=self._num_done)

    def _warn(self, state: dict, show: Callable[[str], None]) -> None:
        """An engine that died and is started again is not an error of the run, but nobody should have to guess it."""
        if state["num_deaths"] > self._shown_deaths:
            self._shown_deaths = state["num_deaths"]
            show(f"rheo: an engine died ({state['last_death']}); it is started again and its rows go back ({self._shown_deaths} so far)")


def describe(state: dict, num_rows: int, now: float, *, num_done: int = 0) -> str:
    """One line: rows, rates, tau, errors, time left. Rows of an earlier run count among the rows, and for nothing else."""
    totals = state["totals"]
    done = _count_rows(state, num_rows, num_done)
    if not state["num_ready"]:
        return f"{done}/{num_rows} rows | loading the model"
    parts = [f"{done}/{num_rows} rows"]
    seconds = now - state["ready_at"]
    rate = (done - num_done) / seconds if seconds > 0 else 0.0
    if rate:
        parts += [f"{rate:.2f} rows/s", f"{totals.get('tokens', 0) / seconds:.1f} tokens/s"]
    if totals.get("cycles"):
        parts.append(f"tau {(totals['accepted'] + totals['cycles']) / totals['cycles']:.2f}")
    parts.append(f"{totals.get('errors', 0)} errors")
    if rate:
        parts.append("writing" if done == num_rows else f"{format_seconds((num_rows - done) / rate)} left")
    return " | ".join(parts)


def _count_rows(state: dict, num_rows: int, num_done: int) -> int:
    return min(num_rows, num_done + state["totals"].get("rows", 0))  # rows of a dead engine are generated, and counted, again
