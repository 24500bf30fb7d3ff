"""The processes of a job: the driver, and what Ray has started for it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]

#: victim -> what its command line begins with, or holds
_COMMANDS = {
    "engine": "ray::MapWorker(MapBatches(GenerateRows))",
    "reader": "ray::Read",
    "ray process": "ray::",
    "raylet": "/raylet/raylet ",
}
LOCAL_VICTIMS = tuple(_COMMANDS)
_SPARED = "ray::MapWorker"  # among "ray process": an engine may be killed once in a life, or its rows are condemned


class Life:
    """A driver, from its start to its end.

    Args:
        folder: for what it prints.
        rng: picks one of several victims.
        root: id of the process below which victims are looked for; None: the driver's.
        others: victims that are no single process: their names, each with what kills one and says what it was.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        rng: random.Random,
        *,
        root: int | None = None,
        others: Mapping[str, Callable[[], str | None]] | None = None,
    ):
        self.started_at = time.monotonic()
        self._stderr = folder / "stderr"
        with open(folder / "stdout", "wb") as out, open(self._stderr, "wb") as err:
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        self._rng = rng
        self._root = root or self._process.pid
        self._others = others or {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def exit_code(self) -> int | None:
        """Negative: ended by that signal. None: runs."""
        return self._process.poll()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def send(self, victim: str, number: signal.Signals) -> str | None:
        """Sends a signal; returns whom it met, None when there is nobody of the kind."""
        if self.exit_code is not None:
            return None
        if victim == "driver":
            os.kill(self.pid, number)
            return "driver"
        if victim == "group":
            os.killpg(self.pid, number)
            return "driver and its process group"
        if victim in self._others:
            return self._others[victim]()
        for process in self._find(victim):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = _command(process)
                process.send_signal(number)
                return name if name.startswith("ray::") else victim
        return None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, None after the time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.exit_code

    def processes(self) -> list[psutil.Process]:
        """The driver's and below."""
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.pid)
            return [driver, *driver.children(recursive=True)]
        return []

    def close(self) -> None:
        """Ends it if it still runs."""
        if self.exit_code is None:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()

    def _find(self, victim: str) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._root).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    name = _command(process)
                    if _COMMANDS[victim] in name and not (victim == "ray process" and name.startswith(_SPARED)):
                        found.append(process)
        self._rng.shuffle(found)
        return found


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()


def end_leftovers(known: Mapping[int, float]) -> None:
    """Kills what is left of former lives: two of Ray's agents wait a minute for a raylet that is dead.

    known: process id -> when it was created.
    """
    for pid, created in known.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
