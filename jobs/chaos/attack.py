"""Waits for a moment in the life of a driver, and kills."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import psutil

from jobs.chaos.moments import Moment
from jobs.chaos.processes import Life
from jobs.chaos.report import Kill
from jobs.chaos.watcher import Watcher

_POLL_S = 0.01
_HUNG_S = 240.0
_MAX_BOOTS = 5
_NOTE_S = 2.0
_SEARCH_S = 3.0


class Hung(Exception):
    """A driver that neither goes on nor ends. The message has the stacks of its threads, where py-spy is there to tell them."""


class Attack:
    """Args:
    num_rows: of the job. boot_s: how long a start takes until the first part is there, for a beginning.
    """

    def __init__(self, output, watcher: Watcher, num_rows: int, boot_s: float):
        self.seen: dict[int, float] = {}  # processes of all lives: id -> when it was created
        self._output = output
        self._watcher = watcher
        self._num_rows = num_rows
        self._boots = deque([boot_s], maxlen=_MAX_BOOTS)
        self._noted_at = 0.0

    @property
    def boot_s(self) -> float:
        return statistics.median(self._boots)

    def kill_at(self, life: Life, moment: Moment) -> Kill | None:
        """None when the driver ended before. A victim that is not found for a while is replaced by the driver. Raises Hung."""
        kills: list[Kill] = []
        is_done = threading.Event()
        firing = threading.Lock()  # the driver's end may be seen before the shot is noted

        def fire(whom: str = moment.victim) -> None:
            with firing:
                age_s = life.age_s
                victim = life.send(whom, moment.signal)
                if victim is not None:
                    kills.append(Kill(victim, moment.signal.name, moment.describe(), age_s))
                    is_done.set()

        if moment.trigger is not None:
            self._output.arm(moment.trigger, fire)
        patience = _Patience(self._watcher)
        has_parts = self._output.num_parts > 0
        since = life.started_at if moment.at == "start" else None
        while life.exit_code is None and not is_done.is_set():
            if not has_parts and self._output.num_parts:
                has_parts = True
                self._boots.append(life.age_s)
            if since is None and self._has_come(moment):
                since = time.monotonic()
            late_s = -1.0 if since is None else time.monotonic() - since - moment.delay_s
            if late_s >= 0:
                fire(moment.victim if late_s < _SEARCH_S else "driver")
            if patience.is_over():
                raise Hung(_describe_threads(life))
            self._note_processes(life)
            is_done.wait(_POLL_S)
        self._output.disarm()
        with firing:
            return kills[0] if kills else None

    def await_end(self, life: Life) -> int:
        """The exit code. Raises Hung."""
        patience = _Patience(self._watcher)
        while (code := life.wait(1.0)) is None:
            if patience.is_over():
                raise Hung(_describe_threads(life))
        return code

    def _note_processes(self, life: Life) -> None:
        """Remembers whom a killed driver may leave behind."""
        if time.monotonic() < self._noted_at + _NOTE_S:
            return
        self._noted_at = time.monotonic()
        for process in life.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen[process.pid] = process.create_time()

    def _has_come(self, moment: Moment) -> bool:
        if moment.at == "rows":
            return self._output.num_parts > 0
        return moment.at == "whole" and self._watcher.num_rows >= self._num_rows


class _Patience:
    """Is over when nothing has changed in the output for a long time."""

    def __init__(self, watcher: Watcher):
        self._watcher = watcher
        self._state: tuple[int, int] | None = None
        self._since = time.monotonic()

    def is_over(self) -> bool:
        state = self._watcher.num_rows, self._watcher.num_parts
        if state != self._state:
            self._state, self._since = state, time.monotonic()
        return time.monotonic() > self._since + _HUNG_S


def _describe_threads(life: Life) -> str:
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return "hung"
    done = subprocess.run([spy, "dump", "--nonblocking", "--pid", str(life.pid)], capture_output=True, text=True)
    return f"hung\n{done.stdout}{done.stderr}"
